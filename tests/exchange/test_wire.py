"""What convolution puts on the wire: each element that a rank needs and does not own, once forward and once backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, shard, simulated, wire
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from torchhalo.exchange.parts import in_parts

Pairs = list[set[int]]  # for each output coordinate along a dim, the inputs that it reads


def pairs(size: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool) -> tuple[Pairs, Pairs]:
    """Which inputs each output reads, and which outputs each input touches, along one dim, by asking torch."""
    op: Callable[..., torch.Tensor] = F.conv_transpose1d if transposed else F.conv1d
    x = torch.eye(size).unsqueeze(1)
    y = op(x, torch.ones(1, 1, kernel), stride=stride, padding=padding, dilation=dilation)[:, 0]
    return [set(column.nonzero()[:, 0].tolist()) for column in y.T], [set(row.nonzero()[:, 0].tolist()) for row in y]


def chunk(size: int, parts: int) -> list[set[int]]:
    spans = [set(part.tolist()) for part in torch.arange(size).chunk(parts)] if size else []
    return spans + [set()] * (parts - len(spans))


def bound(related: Sequence[Pairs], sizes: Sequence[int], mesh: tuple[int, ...]) -> list[int]:
    """For each rank, how many elements of a tensor of ``sizes`` it needs for its part of the other side and does not own."""
    needs, owns = [], []
    for pair, size, parts in zip(related, sizes, mesh, strict=True):
        needs.append([set().union(*(pair[i] for i in part)) for part in chunk(len(pair), parts)])
        owns.append(chunk(size, parts))
    counts = []
    for place in product(*map(range, mesh)):
        need = [needs[dim][part] for dim, part in enumerate(place)]
        own = [owns[dim][part] for dim, part in enumerate(place)]
        counts.append(math.prod(map(len, need)) - math.prod(len(n & o) for n, o in zip(need, own, strict=True)))
    return counts


def check(
    mesh: tuple[int, ...], size: tuple[int, ...], kernel: int, stride: int, padding: int, dilation: int, transposed: bool
) -> None:
    forward, backward = zip(*(pairs(n, kernel, stride, padding, dilation, transposed) for n in size), strict=True)
    out = [len(pair) for pair in forward]
    if 0 in out:
        return
    batch, channels, features = 2, 3, 4
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        rest = (5,) * (2 - len(size))
        x = torch.randn(batch, channels, *rest, *size)
        w = torch.randn(channels, features, 1, 1) if transposed else torch.randn(features, channels, 1, 1)
        w = w.expand(-1, -1, 1 if rest else kernel, kernel).contiguous()
        dims = [4 - len(size) + i for i in range(len(size))]
        x = shard(x, devices, [Shard(dim) for dim in dims]).requires_grad_()
        w = shard(w, devices, [Replicate()] * len(mesh)).requires_grad_()
        full = [0] * len(rest) + [1] * len(size)
        kwargs = {
            "stride": [max(1, stride * f) for f in full],
            "padding": [padding * f for f in full],
            "dilation": [max(1, dilation * f) for f in full],
        }
        with wire() as sent_forward:
            y = (F.conv_transpose2d if transposed else F.conv2d)(x, w, **kwargs)
        grad = shard(torch.ones(y.shape), devices, y.placements)
        with wire() as sent_backward:
            y.backward(grad)
    for sent, least, per_element in (
        (sent_forward, bound(forward, size, mesh), batch * channels * math.prod(rest)),
        (sent_backward, bound(backward, out, mesh), batch * features * math.prod(rest)),
    ):
        assert len(sent) <= 1, "one exchange each way"
        assert all(each.name == "all_to_all_single" for each in sent)
        received = sent[0].received if sent else dict.fromkeys(range(len(least)), 0)
        assert [received[rank] for rank in range(len(least))] == [n * per_element for n in least]


KERNELS = {
    "k3 s1": (3, 1, 1, 1, False),
    "k3 s2": (3, 2, 1, 1, False),
    "k7 s2": (7, 2, 3, 1, False),
    "k4 s2": (4, 2, 1, 1, False),
    "k1 s2": (1, 2, 0, 1, False),
    "k3 d4": (3, 1, 4, 4, False),
    "k4 s4": (4, 4, 0, 1, False),
    "t k4 s2": (4, 2, 1, 1, True),
    "t k2 s2": (2, 2, 0, 1, True),
    "t k3 s2 d2": (3, 2, 1, 2, True),
}


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_only_halos_travel(name: str, overlapped: bool) -> None:
    for mesh, size in [((2,), (24,)), ((4,), (24,)), ((3,), (25,)), ((2, 2), (16, 17))]:
        with in_parts(overlapped):
            check(mesh, size, *KERNELS[name])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_window_sends_its_lower_bound(data: st.DataObject) -> None:
    kernel, stride, dilation = (data.draw(st.integers(1, 4)) for _ in range(3))
    transposed = data.draw(st.booleans())
    padding = data.draw(st.integers(0, 4))
    mesh = data.draw(st.sampled_from([(2,), (3,), (4,), (2, 2)]))
    if transposed:
        least = -(-max(0, 2 * padding - dilation * (kernel - 1)) // stride) + 1
    else:
        least = max(1, dilation * (kernel - 1) + 1 - 2 * padding)
    size = tuple(data.draw(st.integers(least, least + 16)) for _ in mesh)
    check(mesh, size, kernel, stride, padding, dilation, transposed)
