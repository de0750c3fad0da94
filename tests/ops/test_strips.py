"""Bulk and strips: convolutions and pools of shards that are large beside their halos, computed in parts and at once."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, simulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from torchhalo.exchange import parts, windowed
from torchhalo.geometry import Box
from torchhalo.ops.convolution_work import Local, Work


@pytest.mark.slow
@pytest.mark.parametrize("on", [True, False])
def test_random_shards_wider_than_their_halos(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    seen: Counter[object] = Counter()
    stock = Local.work

    def work(self: Local, *args: object) -> Work:
        found = stock(self, *args)  # type: ignore[arg-type]
        strips = sum(map(len, found.strips))
        cropped = found.bulk is not None and not found.bulk.recipe.untouched
        seen[len(self.exchange.dims), self.sparse, strips, cropped, len(found.strips) < strips] += 1
        return found

    monkeypatch.setattr(Local, "work", work)
    multiplied: Counter[object] = Counter()
    by_tap = Local.products

    def products(self: Local, *args: object) -> object:
        found = by_tap(self, *args)  # type: ignore[arg-type]
        multiplied[len(self.exchange.dims), self.sparse, bool(found)] += 1
        return found

    monkeypatch.setattr(Local, "products", products)

    @settings(max_examples=180 if on else 15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        mesh = data.draw(st.sampled_from([(2,), (3,), (4,), (2, 2)]))
        transposed = data.draw(st.booleans())
        dilation = data.draw(st.integers(1, 2))
        stride = data.draw(st.sampled_from([1, 1, 2, 3]))
        kernel = data.draw(st.integers(2, 4)) if transposed else data.draw(st.sampled_from([2, 3, 3, 4, 5, 7]))
        padding = (dilation * (kernel - 1) + 1 - stride + 1) // 2 if transposed else dilation * (kernel - 1) // 2
        padding = max(0, padding + data.draw(st.sampled_from([0, 0, 0, -1])))
        size = [data.draw(st.integers(4, 6)) * stride * n + data.draw(st.sampled_from([0, 0, 1, 2])) for n in mesh]
        dims = list(range(2, 2 + len(mesh)))
        if len(mesh) == 1:
            dims = [data.draw(st.sampled_from([2, 3]))]
            size.insert(3 - dims[0], 13)
        groups = data.draw(st.sampled_from([1, 2]))
        batch = data.draw(st.sampled_from([1, 2]))
        with simulated(math.prod(mesh)):
            devices = init_device_mesh(DEVICE, mesh)
            with maybe_disable_local_tensor_mode():
                x = torch.randn(batch, 4, *size, dtype=torch.float64, device=DEVICE)
                if data.draw(st.booleans()):
                    x = x.contiguous(memory_format=torch.channels_last)
                w = torch.randn(4, 4 // groups, kernel, kernel, dtype=torch.float64, device=DEVICE)
                b = torch.randn(4 // groups * groups, dtype=torch.float64, device=DEVICE)
            op = F.conv_transpose2d if transposed else F.conv2d

            def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return op(x, w, b, stride=stride, padding=padding, dilation=dilation, groups=groups)

            everywhere = [Replicate()] * len(mesh)
            placements = [Shard(dim) for dim in dims]
            needs_grad = data.draw(st.sampled_from([[True, True, True], [False, True, True], [True, False, True]]))
            with parts.in_parts(on):
                assert_parity(function, [x, w, b], devices, [placements, everywhere, everywhere], needs_grad=needs_grad)

    check()
    for dims in (1, 2):
        for sparse in (True, False):
            strips = {strips for d, side, strips, _, _ in seen if (d, side) == (dims, sparse)}
            assert strips == {0} if not on else {dims, 2} <= strips, (dims, sparse, seen)
            assert multiplied[dims, sparse, True] > 0 if on else not multiplied, multiplied
    if on:
        assert any(cropped for *_, cropped, _ in seen), seen
        assert any(stacked for *_, stacked in seen), seen


def test_random_pools_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[object] = Counter()
    stock = parts.bulk_and_strips

    def counted(*args: Any) -> Any:
        bulk, strips = stock(*args)
        cropped = bulk is not None and bulk.region.spans != tuple(bulk.owned.spans[dim] for dim in bulk.dims)
        seen[len(args[2].dims), bulk is not None, len(strips), cropped] += 1
        return bulk, strips

    monkeypatch.setattr(windowed, "bulk_and_strips", counted)
    returned: Counter[int] = Counter()
    gathered = windowed._gathered

    def sent_back(box: Box, *args: Any) -> torch.Tensor:
        returned[len(box.spans)] += 1
        return gathered(box, *args)

    monkeypatch.setattr(windowed, "_gathered", sent_back)

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        mesh = data.draw(st.sampled_from([(2,), (3,), (2, 2)]))
        kernel, stride = data.draw(st.sampled_from([(3, 1), (3, 2), (2, 1), (5, 2), (3, 3), (4, 2)]))
        padding, ceil = data.draw(st.integers(0, kernel // 2)), data.draw(st.booleans())
        size = [data.draw(st.integers(4, 6)) * stride * n + data.draw(st.sampled_from([0, 0, 1, 2])) for n in mesh]
        dims = [2, 3]
        if len(mesh) == 1:
            dims = [data.draw(st.sampled_from([2, 3]))]
            size.insert(3 - dims[0], 11)
        shape = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 3])), *size
        largest, include = data.draw(st.booleans()), data.draw(st.booleans())
        with simulated(math.prod(mesh)):
            devices = init_device_mesh(DEVICE, mesh)
            with maybe_disable_local_tensor_mode():
                x = torch.randn(shape, dtype=torch.float64, device=DEVICE)
                infinite, last = data.draw(st.booleans()), data.draw(st.booleans())
                # CUDA's channels-last kernel answers 0, which is not in the window, where nothing is above minus infinity.
                x[..., :4] = -torch.inf if infinite and largest and not (last and DEVICE == "cuda") else 0.0
                # torch's gradient of averages of channels-last images leaves the padding out, on a GPU
                if last and (largest or not padding or DEVICE == "cpu"):
                    x = x.contiguous(memory_format=torch.channels_last)

            def pool(x: torch.Tensor) -> torch.Tensor:
                if not largest:
                    return F.avg_pool2d(x, kernel, stride, padding, ceil_mode=ceil, count_include_pad=include)
                values, indices = F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil, return_indices=True)
                return values.clamp(min=-1e3) + indices

            with parts.in_parts(True):
                assert_parity(pool, [x], devices, [[Shard(dim) for dim in dims]])

    check()
    for dims in (1, 2):
        assert {strips for d, split, strips, _ in seen if d == dims and split} >= {dims, 2}, seen
        assert returned[dims] > 10, returned
    assert any(cropped for *_, cropped in seen) and any(not split for _, split, *_ in seen), seen


def test_small_shards_are_computed_at_once_and_large_ones_in_parts() -> None:
    for size, expected in ((parts.ENOUGH["cpu"] - 1, False), (parts.ENOUGH["cpu"], True)):
        assert parts.worthwhile(size, "cpu") is expected
