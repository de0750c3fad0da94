"""Convolutions of plain tensors: the same results as torch's own, by faster kernels where torch takes a slow one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import MEMORIES, any_memory
from torch.utils.flop_counter import FlopCounterMode

from torchhalo.kernels import local_convolution

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    """The slow kernel and the faster one are those of a CPU."""
    with torch.device("cpu"):
        yield


def test_random_convolutions() -> None:
    """All gradients, in float32 against float64; another kernel is taken only where torch's own would be."""
    taken: Counter[bool] = Counter()

    @settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        draw = data.draw
        ndim = draw(st.sampled_from([2, 3, 3, 3]))
        kernel, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
        groups = draw(st.sampled_from([1, 1, 1, 2]))
        batch, channels, filters = (draw(st.sampled_from(sizes)) for sizes in ([1, 1, 1, 2], [2, 8, 16], [2, 8]))
        sizes = [draw(st.integers(8, 40 if ndim == 2 else 24)) for _ in range(ndim)]
        x, w = torch.randn(batch, channels, *sizes), torch.randn(filters, channels // groups, *[kernel] * ndim)
        b = torch.randn(filters) if draw(st.booleans()) else None
        x, w, b = (None if tensor is None else draw(any_memory())(tensor) for tensor in (x, w, b))
        call: tuple[Any, ...] = [stride] * ndim, [kernel // 2] * ndim, [dilation] * ndim, False, [0] * ndim, groups
        slow = local_convolution._slow(x, w, call)
        taken[slow] += 1
        if slow:
            assert "Slow" in str(torch._C._select_conv_backend(x, w, b, *call))
        # other dtypes are copies, and dense
        expected = aten.convolution(x.double(), w.double(), None if b is None else b.double(), *call)
        found = local_convolution.forward(x, w, b, call)
        # 4 * 4 * 4 * 16 products of size one: their sum is rounded to 24 bits.
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
        grad, mask = (
            draw(any_memory())(torch.randn_like(found)),
            draw(st.sampled_from([[True, True, True], [True, False, False], [False, True, False]])),
        )
        wide = aten.convolution_backward(grad.double(), x.double(), w.double(), [filters], *call, mask)
        for ours, theirs in zip(local_convolution.backward(grad, x, w, [filters], call, mask), wide, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.layout == torch.strided
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))

    check()
    assert min(taken[True], taken[False]) > 10, taken


@pytest.mark.parametrize("name", MEMORIES)
def test_parameters_in_any_memory(name: str) -> None:
    """oneDNN reads a bias as if it were dense."""
    x, memory = torch.randn(1, 8, 8, 12, 12), MEMORIES[name]
    w, b = memory(torch.randn(8, 8, 3, 3, 3)), memory(torch.randn(8))
    call: tuple[Any, ...] = [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1
    assert local_convolution._slow(x, w, call)
    expected = aten.convolution(x.double(), w.double(), b.double(), *call)
    torch.testing.assert_close(local_convolution.forward(x, w, b, call).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("channels, depth, faster", [(16, 12, True), (16, 27, False), (2, 12, False)])
def test_the_choice_follows_torchs_own(monkeypatch: pytest.MonkeyPatch, channels: int, depth: int, faster: bool) -> None:
    """16 x 26 x 48 is the largest product below 20,480; above it torch takes oneDNN by itself."""
    x, w = torch.randn(1, channels, depth, 48, 48), torch.randn(8, channels, 3, 3, 3)
    call: tuple[Any, ...] = [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1
    assert local_convolution._slow(x, w, call) is faster
    with FlopCounterMode(display=False):
        assert not local_convolution._slow(x, w, call)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not local_convolution._slow(x, w, call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes", [(3,), (10, 3), (3, 10), (6, 5, 3)])
def test_thin_outputs_of_half_types(sizes: tuple[int, ...], transposed: bool, dtype: torch.dtype) -> None:
    """On CPUs with AMX torch 2.11 gives garbage for them."""
    for width, (kernel, stride) in product((1, 2, 3), [(2, 2), (3, 2), (2, 3)]):
        shape = [width if transposed else kernel + width - 1 if size == 3 else size for size in sizes]
        x, w, b = torch.randn(2, 3, *shape), torch.randn(3, 3, *[kernel] * len(sizes)), torch.randn(3)
        x, w, b = (tensor.to("cpu", dtype) for tensor in (x, w, b))
        call = [stride] * len(sizes), [0] * len(sizes), [1] * len(sizes), transposed, [0] * len(sizes), 1
        found = local_convolution.forward(x, w, b, call)
        expected = aten.convolution(x.double(), w.double(), b.double(), *call)
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=unit, atol=4 * unit * float(expected.abs().max()))
        grad = torch.randn(expected.shape, device="cpu").to(dtype)
        got = local_convolution.backward(grad, x, w, [3], call, [True, True, True])
        wanted = aten.convolution_backward(grad.double(), x.double(), w.double(), [3], *call, [True, True, True])
        for ours, theirs in zip(got, wanted, strict=True):
            assert ours.dtype == dtype
            torch.testing.assert_close(ours.double(), theirs, rtol=unit, atol=8 * unit * float(theirs.abs().max()))
