"""What the tests of stock DTensor's features share: meshes of all ranks, a small model, and its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import DEVICE, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate

Run = Callable[..., list[Any]]


def line_mesh() -> DeviceMesh:
    """All ranks along one axis."""
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def grid_mesh() -> DeviceMesh:
    """All ranks along two axes, 2x1 or 2x2."""
    return init_device_mesh(DEVICE, (2, dist.get_world_size() // 2))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (Replicate(),) * mesh.ndim


class Model(nn.Module):
    """Two convolutions, the second without bias, a buffer and a frozen parameter."""

    def __init__(self, device: str = DEVICE, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, device=device, dtype=dtype)
        self.second = nn.Conv2d(8, 4, 3, stride=2, padding=1, bias=False, device=device, dtype=dtype)
        self.register_buffer("scale", torch.full((4, 1, 1), 2.0, device=device, dtype=dtype))
        self.shift = nn.Parameter(torch.full((4, 1, 1), 0.5, device=device, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()) * self.scale + self.shift


SIZE = (2, 3, 10, 14)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum() / output.numel()


def assert_same_gradients(sharded: nn.Module, plain: nn.Module, atol: float = 1e-10) -> None:
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in sharded.named_parameters()] == names
    for name, got, want in zip(names, sharded.parameters(), plain.parameters(), strict=True):
        if want.grad is None:
            assert got.grad is None, name
        else:
            assert isinstance(got.grad, DTensor) and got.grad.shape == want.shape and got.grad.dtype == want.grad.dtype
            torch.testing.assert_close(whole(got.grad), want.grad, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")  # noqa: B023
