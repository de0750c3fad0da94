"""The edges of a shard in a convolution, on a GPU.

For its strips cuDNN wants a copy of all that they read, and what the halo adds to the gradient of the weight takes a launch per
tap. The kernels here, in Triton, read the shard and its halo where they lie and write where the strips belong: one launch for
all strips, and one for all pairs across the edge. A depthwise convolution has blocks of its own, as it waits for memory.

All tensors are seen with three spatial dims: first the cut one, whichever it is, in coordinates of the whole tensor; then the
others, the last of which is walked in blocks, together with the channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

import torch

from torchhalo.geometry import Span, Window
from torchhalo.kernels import triton
from torchhalo.kernels.triton.launches import launch
from torchhalo.torch_internals import tracing

#: What a program of a depthwise convolution works on at once: so many elements that lie one behind another in memory, and so
#: many such rows. Measured on an H200, 7x7 over 256 channels, channels-last: 23 us for all strips, 21 us for all pairs.
STRIP, PAIRS = (128, 16), (64, 64)
#: Over how many programs the pairs of a tap and a block of channels are spread; each leaves a sum of the size of the weight.
SPLITS = 4
#: The same of all others: how long a block is along each side of a product, at least as the hardware wants it and at most.
SMALLEST, LARGEST = 16, 64
#: How many programs should run at once.
PROGRAMS = 132


class Edge(NamedTuple):
    """Where the strips of a rank are, and what they read.

    Attributes:
        dim: The dim that is cut.
        windows: Of each spatial dim.
        mirrored: Whether the source is the sparse side of the windows.
        held: What the rank owns of the source.
        before: What it received of what lies right in front of that; may be empty.
        after: The same, right behind it.
        own: What it owns of the target.
        strips: Parts of that, one or two.
    """

    dim: int
    windows: tuple[Window, ...]
    mirrored: bool
    held: Span
    before: Span
    after: Span
    own: Span
    strips: tuple[Span, ...]


class Layout(NamedTuple):
    """How a tensor lies in memory, as the kernels see it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def turned(self) -> Layout:
        """With the first two dims the other way round."""
        return Layout(*(each[1::-1] + each[2:] for each in self))


#: Shape and strides of each tensor of a launch.
Layouts = tuple[tuple[torch.Size, tuple[int, ...]], ...]


class Halo(NamedTuple):
    """What was received, of the source's shape but along the cut dim; any tensor where that is nothing."""

    before: torch.Tensor
    after: torch.Tensor


def usable(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels here can run on a tensor; Triton multiplies no matrices of float64 on every GPU."""
    if not (tensor.is_cuda and tracing.is_plain(tensor) and tensor.dtype == weight.dtype):
        return False
    return (tensor.dtype != torch.float64 or _one_filter(weight.shape, tensor.shape[1])) and triton.compiles()


def _one_filter(weight: Sequence[int], *channels: int) -> bool:
    """Whether the convolution is a depthwise one: of so many channels each has one filter of its own."""
    return weight[1] == 1 and all(count == weight[0] for count in channels)


def write_strips(
    out: torch.Tensor, shard: torch.Tensor, halo: Halo, weight: torch.Tensor, bias: torch.Tensor | None, edge: Edge
) -> None:
    """Write the strips of a convolution, or of the gradient of its input, into ``out``.

    Args:
        shard: What the rank owns of the source.
        weight: Of one group, or of one filter per channel.

    Example:
        The last row of the first of two ranks, for which it received one::

            out = conv2d(shard, weight, padding=1)
            windows = (Window(3, 1, 1, 1), Window(3, 1, 1, 1))
            edge = Edge(2, windows, False, Span(0, 8), Span(0, 0), Span(8, 9), Span(0, 8), (Span(7, 8),))
            write_strips(out, shard, Halo(shard, row), weight, None, edge)
    """
    tensors = out, halo.before, shard, halo.after, weight
    layouts = tuple([(tensor.shape, tensor.stride()) for tensor in tensors])
    kernel, grid, rest = _strips(edge, layouts, bias is not None, out.dtype == torch.float64, _precision())
    # The kernel knows the strides of all but the bias.
    launch(kernel, grid, (*tensors, out if bias is None else bias.contiguous()), rest)


@lru_cache(maxsize=4096)
def _strips(edge: Edge, layouts: Layouts, bias: bool, wide: bool, precision: str) -> tuple[Any, ...]:
    """The kernel of strips, its grid, and its arguments but for the tensors."""
    first, last = edge.strips[0], edge.strips[-1]
    rows = sum(strip.size for strip in edge.strips)
    into, before, held, after, weight = (_seen(*layout, edge.dim) for layout in layouts)
    filters, depthwise = _filters(weight, held.shape[1], into.shape[1], edge)
    (sources, targets), (width, length) = filters.shape[:2], into.shape[3:]
    lines = into.shape[0] * rows * width
    if depthwise:
        blocks = _blocks_by_channel(length, targets, held, STRIP)
    else:
        blocks = _blocks(length, sources, targets, lambda e, s, t: lines * _count(length, e) * _count(targets, t))
    rest = (
        into.stride,
        (before.stride, held.stride, after.stride),
        filters.stride,
        (first.start, first.size, last.start, rows),
        edge.own.start,
        (edge.before.start, *edge.held[:2], edge.after.stop),
        (sources, targets, width, length, *held.shape[3:]),
        filters.shape[2:],
        _parameters(edge),
        edge.mirrored,
        bias,
        depthwise,
        wide,
        precision,
        *blocks,
    )
    return _kernels().strips, (lines, _count(length, blocks[0]), _count(targets, blocks[2])), rest


def add_pairs(grad_weight: torch.Tensor, input: torch.Tensor, halo: Halo, edge: Edge) -> None:
    """Add the pairs of the rank's input and the halo of ``grad_output`` to the gradient of the weight.

    Args:
        edge: That of the input's gradient.

    Example:
        After `write_strips` of the gradient of ``input``::

            add_pairs(grad_weight, input, halo, edge)
    """
    tensors, wide = (input, *halo), input.dtype == torch.float64
    layouts = tuple([(tensor.shape, tensor.stride()) for tensor in (grad_weight, *tensors)])
    kernel, grid, rest, into, sums = _pairs(edge, layouts, wide, _precision())
    found = grad_weight if sums is None else input.new_empty(sums, dtype=torch.float64 if wide else torch.float32)
    launch(kernel, grid, (found, *tensors), rest)
    if sums is not None:
        grad_weight.as_strided(*into).add_(found.sum(0))


@lru_cache(maxsize=4096)
def _pairs(edge: Edge, layouts: Layouts, wide: bool, precision: str) -> tuple[Any, ...]:
    """As `_strips`; then how the gradient of the weight is seen, and the shape of sums that are to be added to it, if any."""
    weight, own, before, after = (_seen(*layout, edge.dim) for layout in layouts)
    batch, channels, _, width, length = (before if edge.before.size else after).shape
    into, depthwise = _filters(weight, channels, own.shape[1], edge)
    (sources, targets), taps = into.shape[:2], prod(into.shape[2:])
    if depthwise:
        blocks = _blocks_by_channel(length, targets, own, PAIRS)
    else:
        blocks = _blocks(length, sources, targets, lambda e, s, t: PROGRAMS)
    items = batch * width * _count(length, blocks[0])
    programs = _count(sources, blocks[1]) * _count(targets, blocks[2])
    # Of the taps those of one row or so meet an edge.
    splits = min(SPLITS, items) if depthwise else max(1, min(PROGRAMS * into.shape[2] // (programs * taps), items // 4))
    sums = None if splits == 1 else (splits, *into.shape)
    rest = (
        into.stride if sums is None else tuple(prod(into.shape[dim + 1 :]) for dim in range(5)),
        own.stride,
        (before.stride, after.stride),
        edge.own[:2],
        (edge.before[:2], edge.after[:2]),
        items,
        (sources, targets, width, length, *own.shape[3:]),
        into.shape[2:],
        _parameters(edge),
        not edge.mirrored,
        splits == 1,
        depthwise,
        wide,
        precision,
        *blocks,
    )
    return _kernels().pairs, (programs, taps, splits), rest, into, sums


def _filters(weight: Layout, sources: int, targets: int, edge: Edge) -> tuple[Layout, bool]:
    """A weight as (sources of each target, targets, taps), and whether each channel has a filter of its own."""
    depthwise = _one_filter(weight.shape, sources, targets)
    return (weight if edge.mirrored and not depthwise else weight.turned()), depthwise


def _blocks(length: int, sources: int, targets: int, programs: Callable[[int, int, int], int]) -> tuple[int, int, int]:
    """How much a program takes of the last dim and of either side's channels, in powers of two: enough for `PROGRAMS`."""
    e, s, t = (max(SMALLEST, min(LARGEST, _power(size))) for size in (length, sources, targets))
    while programs(e, s, t) < PROGRAMS and max(e, t) > SMALLEST:
        e, t = (e, t // 2) if t >= e else (e // 2, t)
    return e, s, t


def _blocks_by_channel(length: int, channels: int, layout: Layout, most: tuple[int, int]) -> tuple[int, int, int]:
    """The same of a depthwise convolution: more of what lies one behind another, and one source for each target."""
    along, across = most if layout.stride[4] < layout.stride[1] else most[::-1]
    return min(along, _power(length)), 1, min(across, _power(channels))


def _precision() -> str:
    """How products of float32 are rounded: as cuDNN's convolutions are."""
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


@lru_cache(maxsize=1)
def _kernels() -> Any:
    return import_module("torchhalo.kernels.triton.edges")


def _seen(shape: Sequence[int], stride: Sequence[int], dim: int) -> Layout:
    """As (batch, channels, cut dim, others), with five dims."""
    others = [other for other in range(2, len(shape)) if other != dim]
    order, more = (0, 1, dim, *others), (1,) * (5 - len(shape))
    sizes, steps = (tuple(each[at] for at in order) for each in (shape, stride))
    return Layout(sizes[:3] + more + sizes[3:], steps[:3] + more + steps[3:])


@lru_cache(maxsize=1024)
def _parameters(edge: Edge) -> tuple[int, ...]:
    """Stride, padding and dilation of each window, in the order of `_seen`."""
    cut = edge.windows[edge.dim - 2]
    others = [window for dim, window in enumerate(edge.windows, start=2) if dim != edge.dim]
    windows = [cut, *[Window(1)] * (2 - len(others)), *others]
    return tuple(number for window in windows for number in (window.stride, window.before, window.dilation))


def _power(size: int) -> int:
    """The power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def _count(size: int, block: int) -> int:
    return -(-size // block)
