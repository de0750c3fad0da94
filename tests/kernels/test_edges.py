"""The edges of convolutions by Triton's kernels: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, simulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import interpret
from memory import any_memory
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from torchhalo.exchange import parts
from torchhalo.geometry import Span, Window
from torchhalo.kernels import edges
from torchhalo.kernels.edges import Edge, Halo, add_pairs, write_strips

SETTINGS: dict[str, Any] = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, edges)


@settings(max_examples=20, **SETTINGS)
@given(data=st.data())
def test_random_edges(data: st.DataObject) -> None:
    """Strips of a convolution and of its input's gradient, and the pairs across, wherever the cuts are."""
    ndim, transposed, draw = data.draw(st.sampled_from([1, 2, 2, 3])), data.draw(st.booleans()), data.draw
    windows = []
    for _ in range(ndim):
        kernel, dilation = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 1, 2]))
        padding = draw(st.integers(0, dilation * (kernel - 1)))
        windows.append(Window(kernel, draw(st.sampled_from([1, 1, 2, 3])), padding, padding, dilation))
    shape = draw(st.integers(1, 2)), draw(st.sampled_from([1, 3])), *(draw(st.integers(5, 7)) for _ in range(ndim))
    dense = draw(st.booleans())
    dim = draw(st.integers(2, ndim + 1))
    conv = getattr(F, f"conv{'_transpose' * transposed}{ndim}d")
    kernel, stride, padding, _, dilation = zip(*windows, strict=True)
    options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": 1 if dense else shape[1]}
    random: dict[str, Any] = {"dtype": torch.float64, "device": DEVICE}
    channels = (draw(st.sampled_from([2, 17])), shape[1]) if dense else (shape[1], 1)
    x, w = torch.randn(shape, **random), torch.randn(*(channels[::-1] if dense and transposed else channels), *kernel, **random)
    bias = torch.randn(channels[0], **random) if draw(st.booleans()) else None
    x, w, bias = (None if tensor is None else draw(any_memory())(tensor) for tensor in (x, w, bias))
    x.requires_grad_()
    y = conv(x, w, bias, **options)
    grad = torch.randn_like(y)
    (x_grad,) = torch.autograd.grad(y, x, grad)

    def some(size: int) -> Span:
        start = draw(st.integers(0, size - 1))
        return Span(start, draw(st.integers(start + 1, size)))

    def along(tensor: torch.Tensor, span: Span) -> torch.Tensor:
        return tensor.narrow(dim, span.start, span.size)

    def anyhow(tensor: torch.Tensor) -> torch.Tensor:
        return draw(any_memory(repeated=False))(tensor)

    def check(source: torch.Tensor, target: torch.Tensor, mirrored: bool, bias: torch.Tensor | None) -> tuple[Edge, Halo]:
        held, own = some(source.shape[dim]), some(target.shape[dim])
        before, after = Span(0, held.start), Span(held.stop, source.shape[dim])
        ends = Span(own.start, own.start + 1), Span(own.stop - 1, own.stop)
        edge = Edge(dim, tuple(windows), mirrored, held, before, after, own, ends if own.size > 2 else (own,))
        halo = Halo(*(anyhow(along(source, span)) if span.size else source for span in (before, after)))
        expected = torch.full_like(along(target, own), 7.0)
        out = anyhow(expected)
        for strip in edge.strips:
            expected.narrow(dim, strip.start - own.start, strip.size).copy_(along(target, strip))
        write_strips(out, along(source, held), halo, w, bias, edge)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
        return edge, halo

    check(x.detach(), y.detach(), transposed, bias)
    edge, halo = check(grad, x_grad, not transposed, None)
    if edge.before.size + edge.after.size:
        received, owned = grad.clone(), torch.zeros_like(x)
        along(received, edge.held).zero_()
        along(owned, edge.own).copy_(along(x, edge.own))
        filters = w.clone().requires_grad_()
        (expected,) = torch.autograd.grad(conv(owned.detach(), filters, None, **options), filters, received)
        found = anyhow(torch.ones_like(w))
        add_pairs(found, along(x.detach(), edge.own), halo, edge)
        torch.testing.assert_close(found - 1, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("groups", "filters", "help"), [(2, 1, True), (2, 2, False), (1, 3, True)])
def test_sharded_convolutions(monkeypatch: pytest.MonkeyPatch, groups: int, filters: int, help: bool, transposed: bool) -> None:
    """Forward and all gradients; where the kernels cannot help, the usual strips do."""
    help = help and (DEVICE == "cpu" or groups == 2)  # Triton multiplies no matrices of float64 on every GPU
    calls: Counter[str] = Counter()
    for each in (write_strips, add_pairs):

        def counted(*args: Any, kernel: Callable[..., None] = each) -> None:
            calls[kernel.__name__] += 1
            kernel(*args)

        monkeypatch.setattr(edges, each.__name__, counted)
    helped: Counter[tuple[bool, bool]] = Counter()

    @settings(max_examples=7, **SETTINGS)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        draw = data.draw
        mesh = draw(st.sampled_from([(2,), (3,), (4,), (2, 2)]))
        kernel, stride, dilation = draw(st.sampled_from([(3, 1, 1), (5, 1, 1), (3, 2, 1), (2, 2, 1), (3, 1, 2), (4, 2, 1)]))
        padding = dilation * (kernel - 1) // 2
        size = [draw(st.integers(4, 5)) * stride * n + draw(st.integers(0, 2)) for n in mesh]
        dims = list(range(2, 2 + len(mesh)))
        if len(mesh) == 1:
            dims = [draw(st.sampled_from([2, 3]))]
            size.insert(3 - dims[0], 5)
        calls.clear()
        with simulated(math.prod(mesh)):
            devices = init_device_mesh(DEVICE, mesh)
            with maybe_disable_local_tensor_mode():
                random: dict[str, Any] = {"dtype": torch.float64, "device": DEVICE}
                x = torch.randn(draw(st.integers(1, 2)), 2, *size, **random)
                if draw(st.booleans()):
                    x = x.contiguous(memory_format=torch.channels_last)
                sides = (2, filters) if transposed else (groups * filters, 2 // groups)
                w, b = torch.randn(*sides, kernel, kernel, **random), torch.randn(groups * filters, **random)
            op = F.conv_transpose2d if transposed else F.conv2d

            def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
                return op(x, w, b, stride=stride, padding=padding, dilation=dilation, groups=groups)

            everywhere = [Replicate()] * len(mesh)
            needs_grad = draw(st.sampled_from([[True, True, True], [False, True, True], [True, False, True]]))
            with parts.in_parts(True):
                placements = [[Shard(dim) for dim in dims], everywhere, everywhere]
                assert_parity(function, [x, w, b], devices, placements, needs_grad=needs_grad)
        assert (help and len(mesh) == 1) or not calls, calls
        helped[calls["write_strips"] > 0, calls["add_pairs"] > 0] += 1

    check()
    assert helped[help, help], helped
