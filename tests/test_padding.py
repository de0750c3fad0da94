"""Constant padding and cropping of a sharded tensor against one process, forward and gradient, and what it sends."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from harness import DEVICE, Sent, assert_parity, shard, simulated, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_paddings(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2)]))
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    padded = data.draw(st.integers(1, len(shape)))
    pad: list[int] = []
    for size in reversed(shape[len(shape) - padded :]):
        before = data.draw(st.integers(1 - size, 6))
        pad += [before, data.draw(st.integers(1 - size - min(before, 0), 6))]
    placements = [data.draw(st.sampled_from([Replicate(), Partial(), *map(Shard, range(len(shape)))])) for _ in mesh]
    value = data.draw(st.sampled_from([0.0, 1.5]))
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x = torch.randn(shape, dtype=torch.float64, device=DEVICE)
            channels_last = len(shape) == 4 and data.draw(st.booleans())
            x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
        result = assert_parity(lambda x: F.pad(x, pad, value=value), [x], devices, [placements])
        assert list(result.placements) == [Replicate() if isinstance(p, Partial) else p for p in placements]


def test_only_what_changes_owner_travels() -> None:
    """12 columns over 3 ranks, 4 each; with 3 more in front, 5 each: ranks 0, 1, 2 need columns -3..1, 2..6, 7..11."""
    with simulated(3):
        x = shard(torch.randn(2, 12), init_device_mesh("cpu", (3,)), [Shard(1)])
        with wire() as sent:
            F.pad(x, (3, 0))
    assert sent == [Sent("all_to_all_single", {0: 0, 1: 2 * 2, 2: 2 * 1})]
