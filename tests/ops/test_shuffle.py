"""Pixel and channel shuffles of a sharded tensor against one process, forward and gradient, and what they send."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_shuffles(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    name = data.draw(st.sampled_from(["pixel_shuffle", "pixel_unshuffle", "channel_shuffle"]))
    factor = data.draw(st.integers(1, 3))
    blocks = {"pixel_shuffle": (factor**2, 1, 1), "pixel_unshuffle": (1, factor, factor), "channel_shuffle": (factor, 1, 1)}[
        name
    ]
    batch = [] if name != "channel_shuffle" and data.draw(st.booleans()) else [data.draw(st.integers(1, 3))]
    shape = batch + [block * data.draw(st.integers(1, most)) for block, most in zip(blocks, (3, 6, 6), strict=True)]
    placements = [data.draw(st.sampled_from([Replicate(), Partial(), *map(Shard, range(len(shape)))])) for _ in mesh]
    format = torch.channels_last if batch and data.draw(st.booleans()) else torch.contiguous_format
    function = getattr(F, name)
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x = torch.randn(shape, dtype=torch.float64, device=DEVICE).contiguous(memory_format=format)
        result = assert_parity(lambda x: function(x, factor), [x], devices, [placements], atol=0)
        assert list(result.placements) == [Replicate() if isinstance(p, Partial) else p for p in placements]


def test_aligned_blocks_do_not_travel() -> None:
    """5 rows over 3 ranks are 2, 2, 1; of the 10 after a shuffle by two each has 4, 4, 2: nothing is sent, there or back."""
    with simulated(3):
        x = shard(torch.randn(1, 8, 5, 3), init_device_mesh(DEVICE, (3,)), [Shard(2)]).requires_grad_()
        with wire() as sent:
            y = F.pixel_shuffle(x, 2)
            y.backward(torch.ones_like(y))
            F.pixel_unshuffle(y, 2)
            F.channel_shuffle(y, 2)
    assert not sent


def test_only_what_changes_owner_travels() -> None:
    """7 rows over 3 ranks are 3, 3, 1; of the 14 after a shuffle they have 5, 5, 4, which read rows 0..2, 2..4 and 5..6."""
    with simulated(3):
        x = shard(torch.randn(1, 4, 7, 3), init_device_mesh(DEVICE, (3,)), [Shard(2)]).requires_grad_()
        with wire() as sent:
            y = F.pixel_shuffle(x, 2)
        grad = torch.ones_like(y)
        with wire() as back:
            y.backward(grad)
    assert sent == [Sent("all_to_all_single", {0: 0, 1: 1 * 12, 2: 1 * 12})]
    # backward, rows 0..5, 6..11, 12..13 of 14 make rows 0..2, 3..5, 6 of 7
    assert back == [Sent("all_to_all_single", {0: 1 * 6, 1: 2 * 6, 2: 0})]


@pytest.mark.parametrize("name, factor", [("pixel_shuffle", 2), ("pixel_unshuffle", 2), ("channel_shuffle", 3)])
def test_errors_come_before_anything_is_sent(name: str, factor: int) -> None:
    function = getattr(F, name)
    with simulated(2):
        with maybe_disable_local_tensor_mode(), pytest.raises(RuntimeError):
            function(torch.randn(1, 2, 5, 7), factor)
        x = shard(torch.randn(1, 2, 5, 7), init_device_mesh(DEVICE, (2,)), [Shard(2)])
        with wire() as sent, pytest.raises(RuntimeError):
            function(x, factor)
    assert not sent


def shuffled(x: torch.Tensor) -> torch.Tensor:
    return F.pixel_unshuffle(torch.tanh(F.pixel_shuffle(F.channel_shuffle(x, 2), 2)), 2)


def train(compiled: bool) -> None:
    x = torch.randn(1, 4, 7, 3)
    plain = x.clone().requires_grad_()
    shuffled(plain).square().sum().backward()
    sharded = distribute_tensor(x, mesh_of((3,)), [Shard(2)]).requires_grad_()
    function = torch.compile(shuffled, backend="aot_eager", fullgraph=True) if compiled else shuffled
    function(sharded).square().sum().backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
def test_on_processes(pool, compiled: bool) -> None:
    pool(3).run(train, compiled)


def infer() -> None:
    """On a mesh that leaves rank 0 out."""
    mesh = DeviceMesh(DEVICE, [1, 2])
    x = torch.randn(1, 4, 7, 3)
    with torch.inference_mode():
        result = shuffled(distribute_tensor(x, mesh, [Shard(2)]))
        if mesh.get_coordinate() is not None:
            assert torch.equal(result.full_tensor(), shuffled(x))


def test_inference_on_a_submesh(pool) -> None:
    pool(3).run(infer)
