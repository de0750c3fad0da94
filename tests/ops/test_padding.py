"""Padding and cropping of a sharded tensor against one process, forward and gradient, and what it sends."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]


def check(data: st.DataObject, shape: list[int], **kwargs: object) -> None:
    """``F.pad`` of a random float64 tensor, on a random mesh with random placements."""
    mesh = data.draw(st.sampled_from(MESHES))
    placements = [data.draw(st.sampled_from([Replicate(), Partial(), *map(Shard, range(len(shape)))])) for _ in mesh]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    format = formats[len(shape)] if len(shape) in formats and data.draw(st.booleans()) else torch.contiguous_format
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x = torch.randn(shape, dtype=torch.float64, device=DEVICE).contiguous(memory_format=format)
        result = assert_parity(lambda x: F.pad(x, **kwargs), [x], devices, [placements])
        assert list(result.placements) == [Replicate() if isinstance(p, Partial) else p for p in placements]


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_paddings(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    padded = data.draw(st.integers(1, len(shape)))
    pad: list[int] = []
    for size in reversed(shape[len(shape) - padded :]):
        before = data.draw(st.integers(1 - size, 6))
        pad += [before, data.draw(st.integers(1 - size - min(before, 0), 6))]
    check(data, shape, pad=pad, value=data.draw(st.sampled_from([0.0, 1.5])))


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_paddings_from_the_edges(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["reflect", "replicate"]))
    padded = data.draw(st.sampled_from([1, 2, 2, 3]))
    shape = data.draw(st.lists(st.integers(1, 7), min_size=padded + 1, max_size=padded + 2))
    pad: list[int] = []
    for size in reversed(shape[len(shape) - padded :]):
        most = size - 1 if mode == "reflect" else 6
        before = data.draw(st.integers(1 - size, most))
        pad += [before, data.draw(st.integers(1 - size - min(before, 0), most))]
    check(data, shape, pad=pad, mode=mode)


def test_only_what_changes_owner_travels() -> None:
    """12 columns over 3 ranks, 4 each; with 3 more in front, 5 each: ranks 0, 1, 2 need columns -3..1, 2..6, 7..11."""
    with simulated(3):
        x = shard(torch.randn(2, 12), init_device_mesh(DEVICE, (3,)), [Shard(1)])
        with wire() as sent:
            F.pad(x, (3, 0))
    assert sent == [Sent("all_to_all_single", {0: 0, 1: 2 * 2, 2: 2 * 1})]


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_edges_travel_once(mode: str) -> None:
    """12 columns over 3 ranks, 4 each; padded by (2, 7) 21, 7 each.

    Columns that ranks 0, 1 and 2 need: reflected 0..4, 5..11, 4..10, replicated 0..4, 5..11, 11. Each travels once, whatever
    the number of its copies, there and back.
    """
    needs = [set(range(5)), set(range(5, 12)), set(range(4, 11)) if mode == "reflect" else {11}]
    owns = [set(range(4 * rank, 4 * rank + 4)) for rank in range(3)]
    least = {rank: len(needs[rank] - owns[rank]) for rank in range(3)}
    lent = {rank: sum(len(needs[other] & owns[rank]) for other in range(3) if other != rank) for rank in range(3)}
    with simulated(3):
        x = shard(torch.randn(2, 1, 12), init_device_mesh(DEVICE, (3,)), [Shard(2)]).requires_grad_()
        with wire() as sent:
            y = F.pad(x, (2, 7), mode=mode)
        grad = torch.ones_like(y)
        with wire() as back:
            y.backward(grad)
    assert sent == [Sent("all_to_all_single", {rank: 2 * n for rank, n in least.items()})]
    assert back == [Sent("all_to_all_single", {rank: 2 * n for rank, n in lent.items()})]


MODES = ["reflect", "replicate", "circular"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placements", [[Shard(3)], [Shard(2)]])
def test_padding_modes_of_convolution(mode: str, placements: list[Shard]) -> None:
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        with maybe_disable_local_tensor_mode():
            x, w = torch.randn(2, 2, 7, 8, dtype=torch.float64), torch.randn(3, 2, 3, 5, dtype=torch.float64)

        def padded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return F.conv2d(F.pad(x, (2, 2, 1, 1), mode=mode), w)

        assert_parity(padded, [x, w], mesh, [placements, [Replicate()]])


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_half_precision(mode: str) -> None:
    """Forward is a copy: bit for bit. Backward adds at most four numbers per dim, each sum rounded to bfloat16 once."""
    with simulated(3), maybe_disable_local_tensor_mode():
        x = torch.randn(1, 2, 7, 9).bfloat16()
        plain = x.clone().requires_grad_()
        expected = F.pad(plain, (3, 2, 1, 2), mode=mode)
        grad = torch.randn(expected.shape).bfloat16()
        expected.backward(grad)
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        sharded = shard(x, mesh, [Shard(3)]).requires_grad_()
        result = F.pad(sharded, (3, 2, 1, 2), mode=mode)
        result.backward(shard(grad, mesh, [Shard(3)]))
        assert torch.equal(whole(result), expected)
        assert sharded.grad.dtype == torch.bfloat16
        torch.testing.assert_close(whole(sharded.grad), plain.grad, rtol=2**-6, atol=2**-4)


@pytest.mark.parametrize("pad", [(4, 0), (0, 5), (-2, -2), (1, 1, 1, 1, 1, 1)])
def test_errors_are_plain_torchs(pad: tuple[int, ...]) -> None:
    with simulated(2):
        x = torch.randn(1, 1, 4)
        with maybe_disable_local_tensor_mode(), pytest.raises((RuntimeError, NotImplementedError)) as expected:
            F.pad(torch.randn(1, 1, 4), pad, mode="reflect")
        x = shard(x, init_device_mesh(DEVICE, (2,)), [Shard(2)])
        with wire() as sent, pytest.raises((RuntimeError, NotImplementedError)) as got:
            F.pad(x, pad, mode="reflect")
    first_lines = (str(error.value).splitlines()[0] for error in (got, expected))
    got_text, expected_text = (re.sub(r"torch.Size\((.*)\)", r"\1", line) for line in first_lines)
    assert got_text == expected_text and not sent


def train(mode: str, compiled: bool) -> None:
    """A step of a padded convolution on real processes."""
    mesh = mesh_of((3,))
    model = torch.nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode, dtype=torch.float64)
    x = torch.randn(1, 2, 5, 7, dtype=torch.float64)
    plain = x.clone().requires_grad_()
    model(plain).square().sum().backward()
    expected = [plain.grad, model.weight.grad.clone()]
    model.zero_grad()
    model = distribute_module(model, mesh)
    sharded = distribute_tensor(x, mesh, [Shard(3)]).requires_grad_()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    run(sharded).square().sum().backward()
    for got, want in zip([sharded.grad, model.weight.grad], expected, strict=True):
        torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mode, compiled", [("reflect", False), ("replicate", False), ("circular", False), ("reflect", True)])
def test_modules_on_processes(pool, mode: str, compiled: bool) -> None:
    pool(3).run(train, mode, compiled)


def infer() -> None:
    """On a mesh that leaves rank 0 out."""
    submesh = DeviceMesh(DEVICE, [1, 2])
    x = torch.randn(1, 2, 5, 7)
    with torch.inference_mode():
        for mode in ("reflect", "replicate"):
            result = F.pad(distribute_tensor(x, submesh, [Shard(2)]), (2, -1, 3, 3), mode=mode)
            if torch.distributed.get_rank():
                assert torch.equal(result.full_tensor(), F.pad(x, (2, -1, 3, 3), mode=mode))
            else:
                assert result.to_local().numel() == 0


def test_inference_on_a_submesh(pool) -> None:
    pool(3).run(infer)
