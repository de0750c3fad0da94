"""Mean and squared deviations of one rank's part, and how those of all are merged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from torchhalo.exchange.memory import canonical, memory_format
from torchhalo.kernels import norms
from torchhalo.torch_internals import tracing
from torchhalo.torch_internals.constants import constant

aten = torch.ops.aten


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sum in: float32 for half types, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def total(input: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The sum over ``dims``, which stay with size 1; over none of them, if there are none."""
    return input.sum(list(dims), keepdim=True, dtype=wide(input.dtype)) if dims else input.to(wide(input.dtype))


def deviations(input: torch.Tensor, dims: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one rank's part: the differences from its mean over ``dims``, that mean, and a summary for `merged`.

    The summary is the mean and the mean of squared differences, in float64: where the mean is large beside the differences,
    its rounding would be all that is left of the difference between two ranks' means. What rounding has left in the
    differences is taken out of both numbers.
    """
    count = max(1, prod(input.shape[dim] for dim in dims))
    center = input.mean(list(dims), True, dtype=wide(input.dtype)) if dims and input.numel() else total(input, dims)
    rest = input - center
    slip, variance = (products(rest, rest, None, dims).double() / count).unbind()
    return rest, center, torch.stack([center + slip, torch.addcmul(variance, slip, slip, value=-1)])


def products(first: torch.Tensor, second: torch.Tensor, center: torch.Tensor | None, dims: Sequence[int]) -> torch.Tensor:
    """The sums over ``dims``, which stay with size 1, of ``first`` and of ``first * (second - center)``.

    Of channels they are what the gradient of batch norm adds up, whose kernel on a CPU reads both tensors once and makes no
    other: of 16 channels of 512x1024 in float32 it took one core 8 ms, the sums of products 25. It takes two tensors for
    alike in memory that are not, where dims of size one have other strides, and reads beyond the end of centers that are
    expanded; so it gets both in one memory format, with that format's own strides, and dense centers.
    """
    spatial = tuple(range(2, first.ndim))
    by_channel = spatial and tuple(dims) in (spatial, (0, *spatial)) and first.dtype == second.dtype
    if not by_channel or first.device.type != "cpu" or first.numel() < norms.SMALL or tracing.is_traced(first):
        second = second if center is None else second - center
        return torch.stack([total(first, dims), total(first * second, dims)])
    format = memory_format(second.shape, second.stride())
    first, second = canonical(first, format), canonical(second, format)
    ones = first.new_ones(first.shape[1], dtype=wide(first.dtype))
    centers = torch.zeros_like(ones).expand(len(first), -1) if center is None else center.flatten(1).contiguous()

    def sums(first: torch.Tensor, second: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
        none = None, None
        _, *found = aten.native_batch_norm_backward(first, second, ones, *none, center, ones, True, 0.0, [False, True, True])
        return torch.stack(found[::-1])

    if 0 in dims:
        found = sums(first, second, centers[0]).unsqueeze(1)
    else:
        found = torch.stack([sums(*sample) for sample in zip(first.split(1), second.split(1), centers, strict=True)], 1)
    return found.view(*found.shape, *[1] * len(spatial))


def merged(parts: torch.Tensor, counts: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and mean of squared deviations of all, from those of the parts (Chan's formula).

    Args:
        parts: ``[part, 2, ...]``, the means and the means of squares.
        counts: For each part, how many elements it has: a number, or a tuple that fits the last dim of ``parts``.
    """
    means, variances = parts.unbind(1)
    if len(counts) == 1:
        return means[0], variances[0]
    share = constant(shares(counts), parts)

    def average(values: torch.Tensor) -> torch.Tensor:
        if share.ndim == 1 and not tracing.is_traced(values):  # one launch; a compiler fuses no product of matrices
            return (share @ values.reshape(len(counts), -1)).view(values.shape[1:])
        return (values * share.view(len(counts), *[1] * (values.ndim - 2), -1)).sum(0)

    # From the first part's mean on: where all means are equal, rounding leaves nothing.
    apart = means - means[0]
    center = average(apart)
    apart = apart - center
    return means[0] + center, average(torch.addcmul(variances, apart, apart))


@lru_cache(maxsize=4096)
def shares(counts: tuple[Any, ...]) -> tuple[Any, ...]:
    """What part of all elements each part has; where there are none, nothing."""
    if isinstance(counts[0], tuple):
        return tuple(zip(*map(shares, zip(*counts, strict=True)), strict=True))
    whole = max(1, sum(counts))
    return tuple(count / whole for count in counts)
