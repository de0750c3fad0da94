"""Modules of norms that train, on simulated ranks and on processes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import DEVICE, assert_parity, simulated
from monai.networks.blocks import SpatialAttentionBlock
from test_normalization import random
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor


class ChannelsLastNorm(nn.LayerNorm):
    """Layer norm of the channels of an image, whose output is channels-last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def network_of_norms() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 1), ChannelsLastNorm(4), nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 3, padding=1, groups=4))


def spatial_attention() -> nn.Module:
    return SpatialAttentionBlock(2, 32, norm_num_groups=32)


@pytest.mark.parametrize("make, shape", [(network_of_norms, (1, 2, 24, 11)), (spatial_attention, (1, 32, 8, 8))])
@pytest.mark.parametrize("dim", [2, 3])
def test_views_between_norms(make: Callable[[], nn.Module], shape: tuple[int, ...], dim: int) -> None:
    """Permuted tokens, flattened images and expanded statistics give the norms strides that nobody would choose.

    The kernel that sums up for the norms was given them, was wrong by 0.13, or read beyond its tensors' ends.
    """
    with simulated(2):
        with maybe_disable_local_tensor_mode():
            torch.manual_seed(0)
            model = make().to(DEVICE).double()
        names = [name for name, _ in model.named_parameters()]

        def call(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), x)

        tensors = [random(*shape), *(parameter.detach() for parameter in model.parameters())]
        assert_parity(call, tensors, init_device_mesh(DEVICE, (2,)), [[Shard(dim)], *[[Replicate()]] * len(names)])


class Net(nn.Module):
    """Every norm module, on channels, groups, samples and rows."""

    def __init__(self, size: int, **kwargs: Any):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(4, **kwargs),
            nn.GroupNorm(2, 4),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            nn.SyncBatchNorm(4, **kwargs),
            nn.LayerNorm([size]),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def run_beside_one_process(mesh: DeviceMesh, placements: list[Placement], size: int, steps: int = 2, **kwargs: Any) -> None:
    """Some training steps and an evaluation on this rank: outputs, gradients and buffers are one process's."""
    torch.manual_seed(0)
    plain = Net(size, **kwargs).double()
    sharded = distribute_module(copy.deepcopy(plain), mesh)
    # SyncBatchNorm takes no plain tensor on the CPU; beside one process it is batch norm.
    plain.layers[3] = nn.BatchNorm2d(4, **kwargs).double()
    plain.layers[3].load_state_dict({k: v.full_tensor() for k, v in sharded.layers[3].state_dict().items()})
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, sharded)]
    for step in range(steps + 2):
        if step == steps:
            plain.eval(), sharded.eval()
        x = torch.randn(3, 4, 5, size, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) + 3
        a, b = x.clone().requires_grad_(), distribute_tensor(x, mesh, placements).requires_grad_()
        if step == steps + 1:
            with torch.inference_mode():
                torch.testing.assert_close(sharded(b.detach()).full_tensor(), plain(a.detach()), rtol=0, atol=1e-10)
            break
        expected, result = plain(a), sharded(b)
        assert result.placements == tuple(placements)
        expected.square().mean().backward()
        result.square().mean().backward()
        torch.testing.assert_close(result.full_tensor(), expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=0, atol=1e-9)
        for got, want in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=0, atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for got, want in zip(sharded.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=1e-10)


def run_modules(ranks: tuple[int, ...]) -> None:
    mesh = init_device_mesh(DEVICE, ranks)
    where: list[list[Placement]] = (
        [[Shard(3)], [Shard(2)], [Shard(0)]] if len(ranks) == 1 else [[Shard(2), Shard(3)], [Shard(0), Shard(3)]]
    )
    for placements in where:
        for kwargs in ({}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}):
            run_beside_one_process(mesh, placements, 7, **kwargs)
    run_beside_one_process(mesh, where[0], 2)  # empty shards


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2,), (3,), (2, 2)])
def test_modules_train_as_in_one_process(pool, ranks) -> None:
    """On real ranks: momentum, cumulative averages, no tracking, no parameters; evaluation and inference mode."""
    pool(math.prod(ranks)).run(run_modules, ranks)


def run_sub_mesh() -> None:
    """Two of three ranks normalise; the third, outside, calls the same ops and holds nothing."""
    mesh = DeviceMesh(DEVICE, [2, 0])
    for norm in (
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.group_norm(x, 2),
        lambda x: F.layer_norm(x, [7]),
        lambda x: x.softmax(2),
        lambda x: x.var(2),
    ):
        x = random(2, 4, 7)
        size = 4 if dist.get_rank() == 2 else 3
        start = 0 if dist.get_rank() == 2 else 4
        local = x[..., start : start + size] if dist.get_rank() != 1 else x.new_empty(0)
        sharded = DTensor.from_local(local, mesh, [Shard(2)], run_check=False, shape=x.shape, stride=x.stride())
        result, expected = norm(sharded), norm(x)
        assert result.shape == expected.shape
        if dist.get_rank() == 1:
            assert result.to_local().numel() == 0
        else:
            part = expected[..., start : start + size] if result.placements == (Shard(2),) else expected
            torch.testing.assert_close(result.to_local(), part, rtol=0, atol=1e-10)


def test_sub_mesh(pool) -> None:
    pool(3).run(run_sub_mesh)


def test_sync_batch_norm_with_ranks_outside_the_mesh(pool) -> None:
    pool(3).run(run_sync_outside)


def run_sync_outside() -> None:
    # Both on all ranks: torch names a process group by how many a rank has seen.
    meshes = DeviceMesh(DEVICE, [0, 1]), DeviceMesh(DEVICE, [2])
    mesh = meshes[dist.get_rank() == 2]
    x = distribute_tensor(torch.randn(2, 3, 4), mesh, [Shard(2)])
    norm = distribute_module(nn.SyncBatchNorm(3), mesh)
    with pytest.raises(RuntimeError, match=r"SyncBatchNorm: its process group must lie in the device mesh.*process_group=mesh"):
        norm(x)
    norm.process_group = mesh.get_group()
    expected = F.batch_norm(x.full_tensor(), None, None, training=True)
    torch.testing.assert_close(norm(x).full_tensor(), expected)
    torch.testing.assert_close(norm.eval()(x).full_tensor(), x.full_tensor() / math.sqrt(1 + 1e-5), rtol=0.2, atol=1.0)
