"""Sharded convolution against one process: forward and every gradient, in float64, simulated ranks and real ones."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from harness import assert_parity, simulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 1)]


class Case(NamedTuple):
    """One random convolution."""

    mesh: tuple[int, ...]
    input: list[Placement]
    weight: list[Placement]
    bias: list[Placement] | None
    batch: int | None
    channels: tuple[int, int]
    groups: int
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...] | None
    channels_last: bool
    needs_grad: tuple[bool, bool, bool]

    def check(self) -> None:
        mesh = init_device_mesh("cpu", self.mesh)
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        from torch.distributed._local_tensor import maybe_disable_local_tensor_mode

        transposed = self.output_padding is not None
        first, second = self.channels
        with maybe_disable_local_tensor_mode():
            x = random(*([] if self.batch is None else [self.batch]), first * self.groups, *self.sizes)
            if transposed:
                w = random(first * self.groups, second, *self.kernel)
            else:
                w = random(second * self.groups, first, *self.kernel)
            b = None if self.bias is None else random(second * self.groups)
            if self.channels_last and x.ndim in (4, 5):
                x = x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
        name = f"conv{'_transpose' if transposed else ''}{len(self.sizes)}d"
        kwargs = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        if transposed:
            kwargs["output_padding"] = self.output_padding
        needs_grad = [*self.needs_grad[:2], self.needs_grad[2] and b is not None]

        def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            return getattr(F, name)(x, w, b, **kwargs)

        result = assert_parity(function, [x, w, b], mesh, [self.input, self.weight, self.bias], needs_grad=needs_grad)
        if all(isinstance(p, Replicate) for p in self.weight):
            for got, given in zip(result.placements, self.input, strict=True):
                stays = isinstance(given, Shard) and given != Shard(self.channel_dim)
                assert not stays or got == given, "a batch or spatial axis must stay as it is"

    @property
    def channel_dim(self) -> int:
        return 0 if self.batch is None else 1


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh = draw(st.sampled_from(MESHES))
    ndim = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    batch = draw(st.sampled_from([None, 1, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    channels = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    each = st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim).map(tuple)
    kernel = draw(st.lists(st.integers(1, 4 if ndim < 3 else 3), min_size=ndim, max_size=ndim).map(tuple))
    stride, dilation = draw(each), draw(each)
    top = 12 if ndim < 3 else 7
    if transposed:
        sizes = tuple(draw(st.integers(1, top)) for _ in range(ndim))
        output_padding = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        room = [
            (n - 1) * s + d * (k - 1) + o for n, s, d, k, o in zip(sizes, stride, dilation, kernel, output_padding, strict=True)
        ]
        padding = tuple(draw(st.integers(0, min(4, r // 2))) for r in room)
    else:
        output_padding = None
        padding = draw(
            st.sampled_from(["same", "valid"]) | st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim).map(tuple)
        )
        if padding == "same":
            stride = (1,) * ndim
        ends = (0,) * ndim if isinstance(padding, str) else padding
        least = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, ends, strict=True)]
        sizes = tuple(draw(st.integers(max(1, low), max(1, low) + top)) for low in least)
    offset = 0 if batch is None else 1
    spatial = [Shard(offset + 1 + d) for d in range(ndim)]
    anywhere = [Replicate(), Partial(), Shard(offset), *spatial, *spatial, *([Shard(0)] if batch else [])]
    return Case(
        mesh=mesh,
        input=[draw(st.sampled_from(anywhere)) for _ in mesh],
        weight=[draw(st.sampled_from([Replicate()] * 4 + [Shard(0), Shard(1), Shard(2), Partial()])) for _ in mesh],
        bias=draw(st.none() | st.just([draw(st.sampled_from([Replicate(), Replicate(), Shard(0)])) for _ in mesh])),
        batch=batch,
        channels=channels,
        groups=groups,
        sizes=sizes,
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=output_padding,
        channels_last=draw(st.booleans()),
        needs_grad=draw(st.sampled_from([(True, True, True), (False, True, True), (True, False, False), (False, False, True)])),
    )


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_random_convolutions_on_simulated_ranks(case: Case) -> None:
    with simulated(math.prod(case.mesh)):
        case.check()


def _check_all(cases: list[Case]) -> None:
    for case in cases:
        case.check()
