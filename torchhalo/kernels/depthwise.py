"""The edges of a shard in a depthwise convolution, on a GPU.

Such a convolution waits for memory, and for its strips cuDNN wants a copy of all that they read, three times what they write
for a 7x7 kernel. The kernels here, in Triton, read the shard and its halo where they lie and write where the strips belong.

All tensors are seen with three spatial dims: first the cut one, whichever it is, in coordinates of the whole tensor; then the
others, the last of which is walked in blocks, together with the channels.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

import torch

from torchhalo.geometry import Span, Window
from torchhalo.kernels import triton
from torchhalo.torch_internals import tracing

#: What a program works on at once: so many elements that lie one behind another in memory, and so many such rows. Measured on
#: an H200 for a 7x7 kernel over 256 channels, channels-last: 23 us for all strips, 21 us for all pairs.
STRIP, PAIRS = (128, 16), (64, 64)
#: Over how many programs the pairs of a tap and a block of channels are spread; each leaves a sum of the size of the weight.
SPLITS = 4


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


class Halo(NamedTuple):
    """What was received, of the source's shape but along the cut dim; any tensor where that is nothing."""

    before: torch.Tensor
    after: torch.Tensor


def usable(tensor: torch.Tensor) -> bool:
    """Whether the kernels here can run on a tensor."""
    return tensor.is_cuda and tracing.is_plain(tensor) and triton.compiles()


def write_strips(
    out: torch.Tensor, shard: torch.Tensor, halo: Halo, weight: torch.Tensor, bias: torch.Tensor | None, edge: Edge
) -> None:
    """Write the strips of a convolution, or of the gradient of its input, into ``out``.

    Args:
        shard: What the rank owns of the source.
        weight: Of one filter per channel.

    Example:
        The last row of the first of two ranks, for which it received one::

            out = conv2d(shard, weight, padding=1, groups=channels)
            windows = (Window(3, 1, 1, 1), Window(3, 1, 1, 1))
            edge = Edge(2, windows, False, Span(0, 8), Span(0, 0), Span(8, 9), Span(0, 8), (Span(7, 8),))
            write_strips(out, shard, Halo(shard, row), weight, None, edge)
    """
    first, last = edge.strips[0], edge.strips[-1]
    rows = sum(strip.size for strip in edge.strips)
    into, before, held, after, filters = (_seen(tensor, edge.dim) for tensor in (out, halo.before, shard, halo.after, weight))
    batch, channels, _, width, length = into.shape
    block_e, block_c = _block(length, channels, held, STRIP)
    with torch.cuda.device_of(out):
        _kernels().strips[batch * rows * width, _count(length, block_e), _count(channels, block_c)](
            into,
            before,
            held,
            after,
            filters,
            out if bias is None else bias.contiguous(),  # the kernel knows the strides of all others
            into.stride(),
            (before.stride(), held.stride(), after.stride()),
            filters.stride(),
            (first.start, first.size, last.start, rows),
            edge.own.start,
            (edge.before.start, *edge.held[:2], edge.after.stop),
            (channels, width, length, *held.shape[3:]),
            tuple(filters.shape[2:]),
            _parameters(edge),
            edge.mirrored,
            bias is not None,
            out.dtype == torch.float64,
            block_e,
            block_c,
        )


def add_pairs(grad_weight: torch.Tensor, input: torch.Tensor, halo: Halo, edge: Edge) -> None:
    """Add the pairs of the rank's input and the halo of ``grad_output`` to the gradient of the weight.

    Args:
        edge: That of the input's gradient.

    Example:
        After `write_strips` of the gradient of ``input``::

            add_pairs(grad_weight, input, halo, edge)
    """
    into, own, before, after = (_seen(tensor, edge.dim) for tensor in (grad_weight, input, *halo))
    batch, channels, _, width, length = (before if edge.before.size else after).shape
    block_e, block_c = _block(length, channels, own, PAIRS)
    items = batch * width * _count(length, block_e)
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    sums = input.new_empty((min(SPLITS, items), channels, 1, *into.shape[2:]), dtype=dtype)
    with torch.cuda.device_of(input):
        _kernels().pairs[_count(channels, block_c), prod(into.shape[2:]), len(sums)](
            sums,
            own,
            before,
            after,
            own.stride(),
            (before.stride(), after.stride()),
            edge.own[:2],
            (edge.before[:2], edge.after[:2]),
            items,
            (channels, width, length, *own.shape[3:]),
            tuple(into.shape[2:]),
            _parameters(edge),
            not edge.mirrored,
            dtype == torch.float64,
            block_e,
            block_c,
        )
    into.add_(sums.sum(0))


@lru_cache(maxsize=1)
def _kernels() -> Any:
    return import_module("torchhalo.kernels.triton.depthwise")


def _seen(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """As (batch, channels, cut dim, others), with five dims."""
    tensor = tensor.movedim(dim, 2)
    return tensor[(slice(None),) * 3 + (None,) * (5 - tensor.ndim)]


@lru_cache(maxsize=1024)
def _parameters(edge: Edge) -> tuple[int, ...]:
    """Stride, padding and dilation of each window, in the order of `_seen`."""
    cut = edge.windows[edge.dim - 2]
    others = [window for dim, window in enumerate(edge.windows, start=2) if dim != edge.dim]
    windows = [cut, *[Window(1)] * (2 - len(others)), *others]
    return tuple(number for window in windows for number in (window.stride, window.before, window.dilation))


def _block(length: int, channels: int, tensor: torch.Tensor, most: tuple[int, int]) -> tuple[int, int]:
    """What a program takes of the last dim and of the channels, in powers of two."""
    along, across = most if tensor.stride(4) < tensor.stride(1) else most[::-1]
    return min(along, 1 << (length - 1).bit_length()), min(across, 1 << (channels - 1).bit_length())


def _count(size: int, block: int) -> int:
    return -(-size // block)
