"""Modules whose tokens are shared out by samples before queries, keys and values are made of them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, mesh_of, simulated, whole, wire
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import torchhalo
from torchhalo.ops import attention_inputs


class Attention(nn.Module):
    def __init__(self, channels: int, heads: int, fused: bool):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.bias = nn.Parameter(torch.randn(1, heads, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.qkv(x).view(len(x), -1, 3, self.heads, x.shape[-1] // self.heads)
        q, k, v = y.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT + self.bias).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Grid(nn.Module):
    """As MaxViT has it: each pixel attends to those at the same place of all windows."""

    def __init__(self, fused: bool = True, again: bool = False):
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)
        self.attention, self.again = Attention(8, 2, fused), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        y = x.view(b, 4, h // 4, 4, w // 4, c).permute(0, 2, 4, 1, 3, 5).reshape(-1, 4, 4, c)
        y = self.norm(y)
        y = checkpoint(self.attention, y, use_reentrant=False) if self.again else y + self.attention(y)
        y = y.view(b, h // 4, w // 4, 4, 4, c).permute(0, 3, 1, 4, 2, 5).reshape(b, h, w, c)
        return (x + y).permute(0, 3, 1, 2)


def check_steps(model: nn.Module, shape: tuple[int, ...], mesh: tuple[int, ...], dims: tuple[int, ...]) -> list[int]:
    """Compare three steps with those of one process, and count what each sends."""
    sent = []
    with simulated(math.prod(mesh)), torchhalo.strict():
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            plain = copy.deepcopy(model).double()
            x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
            expected = plain(x)
            expected.sin().sum().backward()
        parallel = torchhalo.parallelize(copy.deepcopy(model).double(), devices, dims=dims)
        for _ in range(3):
            parallel.zero_grad()
            given = torchhalo.shard(x.detach(), devices, dims=dims).requires_grad_()
            with wire() as each:
                out = parallel(given)
                out.sin().sum().backward()
            sent.append(sum(sum(one.received.values()) for one in each if one.name == "all_to_all_single"))
            torch.testing.assert_close(whole(out), expected.detach(), rtol=0, atol=1e-11)
            torch.testing.assert_close(whole(given.grad), x.grad, rtol=0, atol=1e-10)
            for got, want in zip(parallel.parameters(), plain.parameters(), strict=True):
                if want.grad is not None:
                    torch.testing.assert_close(whole(got.grad), want.grad, rtol=0, atol=1e-10)
        assert not attention_inputs._calls
    return sent


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mesh, dims", [((2,), (3,)), ((2,), (2,)), ((4,), (3,)), ((2, 2), (2, 3)), ((3,), (3,))])
def test_tokens_travel_once_there_and_once_back(mesh: tuple[int, ...], dims: tuple[int, ...], fused: bool) -> None:
    shape = (1, 3, 12, 12) if mesh == (3,) else (2, 3, 8, 16)
    first, *later = check_steps(Grid(fused), shape, mesh, dims)
    assert len(set(later)) == 1
    if mesh != (3,):  # where nothing else moves but the halos of the convolution: fused or not, half
        tokens, ranks = 2 * 8 * 16 * 8, math.prod(mesh)
        assert first - later[0] == 4 * tokens * (ranks - 1) // ranks


def test_computed_again() -> None:
    """A step does what it did at first when it computes activations again."""
    first, *later = check_steps(Grid(again=True), (1, 3, 8, 16), (2,), (3,))
    assert first > later[0] == later[1]


class Few(Attention):
    """Whose output is of another shape, and goes nowhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[:, :2]


def test_a_module_of_another_form_is_left_alone() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attention = nn.Conv2d(3, 8, 1), Few(8, 2, True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(self.embed(x).flatten(2).transpose(1, 2))

    assert len(set(check_steps(Model(), (4, 3, 4, 6), (2,), (3,)))) == 1


class Fails(Attention):
    broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise ValueError("broken")
        return super().forward(x)


def check_error() -> None:
    torch.manual_seed(0)
    model = Grid()
    model.attention = Fails(8, 2, True)
    model = torchhalo.parallelize(model, mesh_of((2,)), dims=3)
    x = torch.randn(1, 3, 8, 16)
    expected = [model(x) for _ in range(2)][-1]
    model.attention.broken = True
    with pytest.raises(ValueError, match="broken"):
        model(x)
    assert not attention_inputs._calls
    model.attention.broken = False
    out = model(x)
    assert isinstance(out, DTensor) and out.placements == expected.placements
    torch.testing.assert_close(out.full_tensor(), expected.full_tensor())


def test_error(pool) -> None:
    pool(2).run(check_error)


def check_compiled() -> None:
    torch.manual_seed(0)
    plain = Grid().double()
    model = torchhalo.parallelize(copy.deepcopy(plain), mesh_of((2,)), dims=3)
    x = torch.randn(1, 3, 8, 16, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(model(x).full_tensor(), plain(x), rtol=0, atol=1e-12)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(out.full_tensor(), plain(x), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_compiled(pool) -> None:
    pool(2).run(check_compiled)
