"""Batch norm by torch's kernels for CUDA: on a GPU, and, by plain formulas in their place, what they are given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, shard, simulated, whole
from memory import MEMORIES, Memory
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from torchhalo.kernels import group_norm, norms

CALLS: list[str] = []


def per_channel(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.view(1, -1, *[1] * (like.ndim - 2))


def dims(input: torch.Tensor) -> list[int]:
    return [0, *range(2, input.ndim)]


def stats(input: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS.append("stats")
    input = input.to(torch.promote_types(input.dtype, torch.float32))
    return input.mean(dims(input)), (input.var(dims(input), correction=0) + eps).rsqrt()


def gather_stats(
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As torch's kernel does, one part after the other; so also what it divides by zero."""
    CALLS.append("gather_stats")
    assert mean.shape == invstd.shape == (len(counts), input.shape[1]) and counts.dtype == mean.dtype
    assert all(running is None or running.dtype == mean.dtype for running in (running_mean, running_var))
    assert input.dtype == counts.dtype or running_mean is not None
    average, squares, n = torch.zeros_like(mean[0]), torch.zeros_like(mean[0]), torch.zeros_like(counts[0])
    for m, s, count in zip(mean, invstd, counts, strict=True):
        factor = 1 / (n + count)
        squares = squares + (1 / s**2 - eps) * count + (average - m) ** 2 * n * count * factor
        average, n = n * factor * average + count * factor * m, n + count
    for running, value in ((running_mean, average), (running_var, squares / (n - 1))):
        if running is not None:
            running.copy_((1 - momentum) * running + momentum * value)
    return average, (squares / n + eps).rsqrt()


def elemt(input: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, invstd: torch.Tensor, eps: float) -> torch.Tensor:
    CALLS.append("elemt")
    out = (input - per_channel(mean, input)) * per_channel(invstd, input)
    out = out if weight is None else out * per_channel(weight, input)
    return (out if bias is None else out + per_channel(bias, input)).to(input.dtype)


def backward_reduce(
    grad: torch.Tensor, input: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: Any, *wanted: bool
) -> tuple[torch.Tensor | None, ...]:
    CALLS.append("backward_reduce")
    assert wanted == (True, False, False)
    return grad.sum(dims(input)), (grad * (input - per_channel(mean, input))).sum(dims(input)), None, None


def backward_elemt(
    grad: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: Any,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    CALLS.append("backward_elemt")
    assert count.dtype == torch.int32
    n = count.sum()
    rest = (input - per_channel(mean, input)) * per_channel(invstd**2 * sum_dy_xmu / n, input)
    out = (grad - per_channel(sum_dy / n, input) - rest) * per_channel(invstd, input)
    return out if weight is None else out * per_channel(weight, input)


EMULATED = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": elemt,
    "batch_norm_backward_reduce": backward_reduce,
    "batch_norm_backward_elemt": backward_elemt,
}
KERNELS = {name.removeprefix("batch_norm_").removesuffix("_with_counts") for name in EMULATED}
CASES = [
    ((4,), (2, 3, 9, 5), [Shard(2)]),
    ((4,), (2, 3, 5, 2), [Shard(2)]),  # an empty shard
    ((3,), (2, 7, 4, 3, 2), [Shard(1)]),
    ((2, 2), (3, 4, 5, 6), [Shard(2), Shard(3)]),
    ((2, 2), (3, 4, 1, 6), [Shard(2), Shard(0)]),  # empty on the second row of ranks
    ((3,), (2, 3, 8), [Replicate()]),
]


def check(
    device: str,
    mesh: tuple[int, ...],
    shape: tuple[int, ...],
    placements: list[Placement],
    kind: str,
    memory: Memory | None = None,
) -> None:
    """Output, gradients and running statistics against plain torch."""
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(device, mesh)
        with maybe_disable_local_tensor_mode():
            generator = torch.Generator().manual_seed(3)
            x, w, b, mean, var = (
                torch.randn(*size, dtype=torch.float64, generator=generator).to(device) for size in (shape, *[shape[1:2]] * 4)
            )
            x, var = x + 2, var.square()
            if kind == "channels-last" and x.ndim == 4:
                x = x.contiguous(memory_format=torch.channels_last)
        tensors: list[Any] = [x, *([None, None] if kind == "bare" else [w, b])]
        found: dict[bool, list[torch.Tensor]] = {}
        channels = [Shard(0) if p == Shard(1) else Replicate() for p in placements]

        def norm(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
            sharded = type(x) is not torch.Tensor
            if kind == "bare":
                return F.batch_norm(x, None, None, w, b, training=True)
            with maybe_disable_local_tensor_mode():
                running = [mean.clone(), var.clone()]
            found[sharded] = [shard(t, devices, channels) for t in running] if sharded else running
            return F.batch_norm(x, found[sharded][0], found[sharded][1], w, b, training=True, momentum=0.3, eps=1e-3)

        whole_places = [Replicate()] * len(mesh)
        needs_grad = [True, *[kind != "bare"] * 2]
        places = [placements, whole_places, whole_places]
        lies = None if memory is None else [memory, Memory(), Memory(), memory]
        assert_parity(norm, tensors, devices, places, needs_grad=needs_grad, memory=lies)
        if kind != "bare":
            for got, want in zip(found[True], found[False], strict=True):
                torch.testing.assert_close(whole(got), want, rtol=0, atol=1e-10)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cpu":
        pytest.skip("formulas stand for the kernels of CUDA on a CPU alone")
    for name, function in EMULATED.items():
        monkeypatch.setattr(torch, name, function)
    monkeypatch.setattr(norms, "FUSED", {"cpu"})
    CALLS.clear()


@pytest.mark.parametrize(("mesh", "shape", "placements"), CASES)
@pytest.mark.parametrize("kind", ["affine", "bare", "channels-last"])
def test_emulated(
    emulated: None, mesh: tuple[int, ...], shape: tuple[int, ...], placements: list[Placement], kind: str
) -> None:
    """What the kernels are given, and what is made of their results."""
    check("cpu", mesh, shape, placements, kind)
    assert set(CALLS) == KERNELS


LARGE = [case for case in CASES if len(case[1]) > 3] + [((2,), (1, 3, 6, 5), [Shard(2)])]


@pytest.mark.parametrize(("mesh", "shape", "placements"), LARGE)
@pytest.mark.parametrize("memory", ["channels last", "channels last, odd strides", "odd strides", "transposed"])
def test_large(
    emulated: None,
    monkeypatch: pytest.MonkeyPatch,
    mesh: tuple[int, ...],
    shape: tuple[int, ...],
    placements: list[Placement],
    memory: str,
) -> None:
    """Where memory suits them, the kernels of group norm stand in place of torch's, but for the merge."""
    from interpreted import interpret  # skips what imports it, where there is no Triton

    interpret(monkeypatch, group_norm)
    monkeypatch.setattr(norms, "LARGE", 0)
    check("cpu", mesh, shape, placements, "affine", MEMORIES[memory])
    if memory.startswith("channels last"):
        assert set(CALLS) == {"gather_stats"}


def test_running_statistics_of_a_half_type(emulated: None) -> None:
    """A model that is bfloat16 throughout: the kernel, which takes float32 alone, updates a copy."""
    with simulated(2):
        devices = init_device_mesh("cpu", (2,))
        with maybe_disable_local_tensor_mode():
            x, w, mean, var = (torch.randn(*size, dtype=torch.bfloat16) for size in ((2, 3, 8, 5), *[(3,)] * 3))
            var = var.square()
            expected = [mean.clone(), var.clone()]
            F.batch_norm(x, *expected, w, w, training=True, momentum=0.3)
        running = [shard(t, devices, [Replicate()]) for t in (mean, var)]
        factor = shard(w, devices, [Replicate()])
        F.batch_norm(shard(x, devices, [Shard(2)]), *running, factor, factor, training=True, momentum=0.3)
        assert "gather_stats" in CALLS
        for got, want in zip(running, expected, strict=True):
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(whole(got), want, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has these kernels for CUDA alone")
@pytest.mark.parametrize(("mesh", "shape", "placements"), CASES)
@pytest.mark.parametrize("kind", ["affine", "bare", "channels-last"])
def test_on_a_gpu(mesh: tuple[int, ...], shape: tuple[int, ...], placements: list[Placement], kind: str) -> None:
    check("cuda", mesh, shape, placements, kind)
