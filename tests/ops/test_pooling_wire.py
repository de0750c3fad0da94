"""What pools send and launch."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, Sent, shard, simulated, wire
from test_wire import bound, chunk
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torchhalo
from benchmarks.launches import count_launches
from benchmarks.still import still_line


def needs(size: int, pool: Callable[[torch.Tensor], torch.Tensor]) -> list[set[int]]:
    """Which inputs each output reads, by asking torch: a maximum of zeros and a one is one where it reads that one."""
    return [set(column.nonzero()[:, 0].tolist()) for column in pool(torch.eye(size)).T]


def returned(related: Sequence[list[set[int]]], sizes: Sequence[int], mesh: tuple[int, ...]) -> list[int]:
    """For each rank, how many elements of its part of the input other ranks read, each counted for every one of them."""
    read, own = [], []
    for reads, size, cuts in zip(related, sizes, mesh, strict=True):
        read.append([set().union(*(reads[i] for i in part)) for part in chunk(len(reads), cuts)])
        own.append(chunk(size, cuts))
    ranks = list(itertools.product(*map(range, mesh)))
    return [
        sum(
            math.prod(len(read[dim][b] & own[dim][a]) for dim, (a, b) in enumerate(zip(here, other, strict=True)))
            for other in ranks
            if other != here
        )
        for here in ranks
    ]


WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "max k3 s2 p1": ("max_pool", {"kernel_size": 3, "stride": 2, "padding": 1}),
    "max k2 s1 d3": ("max_pool", {"kernel_size": 2, "stride": 1, "dilation": 3}),
    "max k1 s2": ("max_pool", {"kernel_size": 1, "stride": 2}),
    "max k3 s2 ceil": ("max_pool", {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    "avg k3 s1 p1": ("avg_pool", {"kernel_size": 3, "stride": 1, "padding": 1, "count_include_pad": False}),
    "avg k2 s3": ("avg_pool", {"kernel_size": 2, "stride": 3}),
    "max to 5": ("adaptive_max_pool", {"output_size": 5}),
    "avg to 7": ("adaptive_avg_pool", {"output_size": 7}),
    "avg to 40": ("adaptive_avg_pool", {"output_size": 40}),
}


@pytest.mark.parametrize("mesh, sizes", [((2,), (24,)), ((4,), (23,)), ((3,), (7,)), ((2, 2), (16, 17))])
@pytest.mark.parametrize("name", WINDOWS)
def test_only_what_is_read_travels(name: str, mesh: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    kind, parameters = WINDOWS[name]
    line = functools.partial(
        getattr(F, f"{kind}1d".replace("avg", "max")), **{k: v for k, v in parameters.items() if k != "count_include_pad"}
    )
    related = [needs(size, line) for size in sizes]
    one_dim = len(sizes) == 1
    with simulated(math.prod(mesh)):
        x = shard(torch.randn(2, 3, *sizes), init_device_mesh(DEVICE, mesh), [Shard(2 + d) for d in range(len(sizes))])
        x = x.detach().requires_grad_()
        with wire() as forward:
            y = getattr(F, f"{kind}{len(sizes)}d")(x, **parameters)
        grad = shard(torch.ones(y.shape), y.device_mesh, y.placements)
        with wire() as backward:
            y.backward(grad)
    assert one_dim or y.placements == (Shard(2), Shard(3))
    for sent, counts in ((forward, bound(related, sizes, mesh)), (backward, returned(related, sizes, mesh))):
        expected = [Sent("all_to_all_single", {rank: 6 * n for rank, n in enumerate(counts)})] if any(counts) else []
        assert sent == expected


def test_windows_within_shards_send_nothing() -> None:
    with simulated(4):
        x = shard(torch.randn(1, 2, 16, 24), init_device_mesh(DEVICE, (2, 2)), [Shard(2), Shard(3)])
        x = x.detach().requires_grad_()
        with wire() as sent, torchhalo.strict():
            for pool in (F.max_pool2d, F.avg_pool2d, F.lp_pool2d):
                y = pool(x, *([2.0] if pool is F.lp_pool2d else []), 2)
                y.backward(torch.ones_like(y))
            for adaptive in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
                y = adaptive(x, (4, 6))
                y.backward(torch.ones_like(y))
    assert sent == []


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_launches_of_the_gradient_of_a_maximum(memory_format: torch.memory_format) -> None:
    """Torch's own kernel: where no window crosses the edge it is told where the shard begins, in one pass over the indices."""
    x = torch.randn(1, 2, 8, 12, device="cpu").contiguous(memory_format=memory_format)
    with still_line("cpu", 4) as mesh, torchhalo.enable():
        sharded = DTensor.from_local(x, mesh, [Shard(2)], run_check=False).requires_grad_()
        y = F.max_pool2d(sharded, 2)
        grad = torch.ones_like(y)
        found: list[torch.Tensor] = []
        assert count_launches(lambda: found.extend(torch.autograd.grad(y, sharded, grad))) == 2
    plain = x.clone().requires_grad_()
    y = F.max_pool2d(plain, 2)
    (expected,) = torch.autograd.grad(y, plain, torch.ones_like(y))
    assert torch.equal(found[0].to_local(), expected) and expected.is_contiguous(memory_format=memory_format)


def test_launches_of_a_gradient_that_is_folded() -> None:
    """Indices moved, the kernel, what goes back packed, sent and added; the shard is written once, with no zeros before."""
    with still_line("cpu", 4) as mesh, torchhalo.enable():
        x = DTensor.from_local(torch.randn(1, 2, 8, 12), mesh, [Shard(2)], run_check=False).requires_grad_()
        y = F.max_pool2d(x, 3, 2, 1)
        grad = torch.ones_like(y)
        assert count_launches(lambda: torch.autograd.grad(y, x, grad, retain_graph=True)) == 6
