"""Group norm of one rank's part on a GPU, by Triton kernels: two passes forward, two backward, and no copy of an activation.

torch's kernel gives each sample and group to one block of threads, which leaves most of a GPU idle where images are large and
few, and knows no channels-last. Here a shard is cut in chunks, as many as fill the GPU: a first pass leaves two numbers per
chunk and channel, a small kernel merges these, in a fixed order, and a second pass writes the result. Between both, the numbers
of all ranks are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from torchhalo.geometry import Span
from torchhalo.kernels import triton
from torchhalo.kernels.triton.launches import launch
from torchhalo.torch_internals import recording, tracing
from torchhalo.torch_internals.constants import constant
from torchhalo.torch_internals.recording import local_kernel

aten = torch.ops.aten

#: How many elements a program has at once; for how many programs a shard is cut in chunks; and how many channels that are
#: innermost in memory are taken together.
TILE, PROGRAMS, CHANNELS = 4096, 1056, 128
#: So many tiles are on their way from memory, or at work.
STAGES = 3
#: How many numbers a program takes at once when it merges those of chunks, and those of ranks.
MERGED, CELLS = 1024, 128


class Groups(NamedTuple):
    """The channels that a rank owns, of ``groups`` groups of ``size`` channels each."""

    channels: Span
    size: int
    groups: int

    @property
    def all(self) -> bool:
        """Whether it owns every channel."""
        return self.channels.size == self.groups * self.size

    def lengths(self) -> tuple[int, ...]:
        """How many of the rank's channels each group has."""
        return tuple((self.channels & Span(g * self.size, (g + 1) * self.size)).size for g in range(self.groups))

    def whole(self, cells: torch.Tensor) -> torch.Tensor:
        """Zeros for the channels of other ranks: ``[..., own] -> [..., all]``."""
        if self.all:
            return cells
        return aten.constant_pad_nd(cells, [self.channels.start, self.groups * self.size - self.channels.stop])

    def sum(self, cells: torch.Tensor) -> torch.Tensor:
        """Over the rank's channels of each group: ``[..., own] -> [..., groups]``."""
        return self.whole(cells).unflatten(-1, (self.groups, self.size)).sum(-1)

    def spread(self, groups: torch.Tensor) -> torch.Tensor:
        """To each of the rank's channels what its group has: ``[..., groups] -> [..., own]``."""
        every = groups.unsqueeze(-1).expand(*groups.shape, self.size).flatten(-2)
        return every if self.all else every[..., self.channels.start : self.channels.stop]


class _Walk(NamedTuple):
    """How the programs of a large kernel go over a shard.

    Attributes:
        sizes: Samples, channels, elements of each, and the chunk of those that a program has.
        splits: How many such chunks there are.
        last: Whether the channels are innermost in memory.
        blocks: What a program takes at once of the elements of a channel, and of the channels.
    """

    sizes: tuple[int, int, int, int]
    splits: int
    last: bool
    blocks: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        samples, channels = self.sizes[:2]
        return samples * -(-channels // self.blocks[1]), self.splits


def usable(tensor: torch.Tensor) -> bool:
    """Whether the kernels here can run on a tensor, now or when what is recorded is replayed."""
    return tensor.is_cuda and (tracing.is_plain(tensor) or recording.is_recording()) and triton.compiles()


@local_kernel(like=lambda input, groups: input.new_empty((2, len(input), groups.groups), dtype=torch.float64))
def statistics(input: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Of each sample and group of one rank's part the mean and the mean of squared deviations: ``[2, N, groups]`` in float64.

    Args:
        input: Dense in memory, in the usual order of dims or channels-last; so are all tensors of that size here.

    Example:
        A shard with the first three of two groups' four channels::

            parts = statistics(shard, Groups(Span(0, 3), 2, 2))
    """
    parts = input.new_empty((2, len(input), groups.groups), dtype=torch.float64)
    if not input.numel():
        return parts.zero_()
    walk = _walk(input)
    samples, channels = walk.sizes[:2]
    partials = input.new_empty((2 * walk.splits + 1) * samples * channels, dtype=_wide(input))
    kernels, over = _kernels(), (walk.sizes, walk.splits)
    options = walk.last, _is_wide(input), *walk.blocks, STAGES
    launch(kernels.statistics, walk.grid, (input, partials), (*over, *options), num_warps=_warps(walk.blocks))
    block = min(MERGED, _power(walk.splits * groups.size))
    launch(kernels.merge_chunks, (samples * groups.groups,), (partials, parts), (*over, _numbers(groups), block))
    return parts


def normalize(
    input: torch.Tensor,
    parts: torch.Tensor,
    shares: Sequence[Any],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    groups: Groups,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One rank's output, and of each sample and group the mean and one over the standard deviation.

    Args:
        parts: What all ranks made by `statistics`: ``[ranks, 2, N, groups]``.
        shares: What part of all elements each rank has: a number, or one for each group.
        weight, bias: Of the rank's channels.
        dtype: Of the output; that of the input, if there is none.

    Example:
        Of one rank::

            out, mean, rstd = normalize(shard, statistics(shard, groups).unsqueeze(0), (1.0,), weight, bias, 1e-5, groups)
    """
    mean, rstd, rest = merged(parts, shares, eps, _wide(input))
    return applied(input, mean, rstd, rest, weight, bias, groups, dtype=dtype), mean, rstd


@local_kernel(like=lambda parts, shares, eps, dtype: parts.new_empty((3, *parts.shape[2:]), dtype=dtype))
def merged(parts: torch.Tensor, shares: Sequence[Any], eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Of each sample and group the mean, one over the standard deviation, and what rounding to ``dtype`` takes from the mean.

    Example:
        Of one rank::

            mean, rstd, rest = merged(statistics(shard, groups).unsqueeze(0), (1.0,), 1e-5, torch.float32)
    """
    ranks, _, *cells = parts.shape
    few = parts.new_empty((3, *cells), dtype=dtype)
    if few.numel():
        known, programs = constant(shares, parts), -(-few[0].numel() // CELLS)
        rest = ranks, *cells, eps, known.ndim > 1, CELLS
        launch(_kernels().merge_ranks, (programs,), (parts, known, few), rest, num_warps=4)
    return few


@local_kernel(like=lambda input, *args, dtype=None: torch.empty_like(input, dtype=dtype), simple=True)
def applied(
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    rest: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: Groups,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """One rank's output, from what `merged` returned; ``rest`` may be missing.

    Example:
        After `merged`::

            out = applied(shard, mean, rstd, rest, weight, bias, groups)
    """
    out = torch.empty_like(input, dtype=dtype)
    if not input.numel():
        return out
    walk = _walk(input)
    tensors = (
        input,
        out,
        mean,
        rstd,
        mean if rest is None else rest,
        input if weight is None else weight.contiguous(),
        input if bias is None else bias.contiguous(),
    )
    given = rest is not None, weight is not None, bias is not None
    numbers = walk.sizes, _numbers(groups), walk.last, *given, _is_wide(input), *walk.blocks, STAGES
    launch(_kernels().normalize, walk.grid, tensors, numbers, num_warps=_warps(walk.blocks))
    return out


@local_kernel(
    like=lambda grad, input, mean, rstd, weight, groups: input.new_empty(
        2 * (len(input) + groups.size) * groups.groups, dtype=_wide(input)
    )
)
def products(
    grad: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    groups: Groups,
) -> torch.Tensor:
    """Sums over one rank's part of the gradient, and of its product with the deviations from the mean, flat, in one tensor.

    First, with the weight, those of each sample and group: ``[2, N, groups]``; then those of each channel of all ranks, where
    the second is multiplied by ``rstd``: ``[2, C]``, the gradients of bias and weight.

    Args:
        grad: Of the output, whose dtype it may have; in memory as the input.
        mean, rstd: Of each sample and group.

    Example:
        After `normalize`::

            sums = products(grad, shard, mean, rstd, weight, groups)
            grad_weight = sums[-channels:]
    """
    rows, every = len(input) * groups.groups, groups.groups * groups.size
    sums = input.new_empty(2 * (rows + every), dtype=_wide(input))
    if not input.numel():
        return sums.zero_()
    walk = _walk(input)
    samples, channels = walk.sizes[:2]
    partials = input.new_empty(2 * walk.splits * samples * channels, dtype=sums.dtype)
    kernels, wide, mean, rstd = _kernels(), _is_wide(input), mean.contiguous(), rstd.contiguous()
    across = min(16, _power(every))
    rest = walk.sizes, walk.splits, _numbers(groups), walk.last, wide, *walk.blocks, STAGES
    launch(kernels.products, walk.grid, (grad, input, mean, partials), rest, num_warps=_warps(walk.blocks))
    tensors = partials, rstd, input if weight is None else weight.contiguous(), sums
    blocks = (
        min(MERGED, _power(walk.splits * groups.size)),
        min(max(1, MERGED // across), _power(walk.splits * samples)),
        across,
    )
    numbers = (samples, channels, walk.splits), _numbers(groups)
    launch(kernels.merge_products, (rows + -(-every // across),), tensors, (*numbers, weight is not None, wide, *blocks))
    return sums


@local_kernel(like=lambda grad, input, *args, **kwargs: torch.empty_like(input))
def input_gradient(
    grad: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    sums: torch.Tensor,
    members: int,
    groups: Groups,
    weighted: bool = True,
) -> torch.Tensor:
    """The gradient of one rank's part, in memory as the input.

    Args:
        sums: What all ranks made by `products`, added up.
        members: How many elements a sample has of a group.
        weighted: Whether the sums have the weight in them.

    Example:
        After `products`::

            grad_input = input_gradient(grad, shard, mean, rstd, weight, sums, members, groups)
    """
    out = torch.empty_like(input)
    if not input.numel():
        return out
    walk = _walk(input)
    given = input if weight is None else weight.contiguous()
    tensors = grad, input, out, mean.contiguous(), rstd.contiguous(), given, sums
    options = walk.last, weight is not None, weighted, _is_wide(input), *walk.blocks, STAGES
    rest = members, walk.sizes, _numbers(groups), *options
    launch(_kernels().input_gradient, walk.grid, tensors, rest, num_warps=_warps(walk.blocks))
    return out


@lru_cache(maxsize=1)
def _kernels() -> Any:
    return import_module("torchhalo.kernels.triton.group_norm")


def _walk(input: torch.Tensor) -> _Walk:
    return _planned(input.shape, input.stride(1) == 1, TILE, PROGRAMS)


@lru_cache(maxsize=4096)
def _planned(shape: torch.Size, last: bool, tile: int, programs: int) -> _Walk:
    samples, channels, length = shape[0], shape[1], shape[2:].numel()
    if last:
        exact = [size for size in (CHANNELS, CHANNELS // 2, CHANNELS // 4) if channels % size == 0]
        across = exact[0] if exact else min(CHANNELS, _power(channels))
        across = min(across, tile)
        along = min(tile // across, _power(length))
    else:
        along = min(tile, _power(length))
        across = min(tile // along, _power(channels))
    rows, tiles = samples * -(-channels // across), -(-length // along)
    chunk = -(-tiles // max(1, min(tiles, programs // rows))) * along
    return _Walk((samples, channels, length, chunk), -(-length // chunk), last, (along, across))


def _numbers(groups: Groups) -> tuple[int, int, int]:
    return groups.channels.start, groups.size, groups.groups


def _warps(blocks: tuple[int, int]) -> int:
    """As many as leave each thread 16 elements."""
    return max(1, min(8, blocks[0] * blocks[1] // 512))


def _wide(input: torch.Tensor) -> torch.dtype:
    return torch.float64 if _is_wide(input) else torch.float32


def _is_wide(input: torch.Tensor) -> bool:
    return input.dtype == torch.float64


def _power(size: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (size - 1).bit_length()
