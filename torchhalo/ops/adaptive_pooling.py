"""Adaptive average and maximum pooling, 2-d and 3-d (1-d arrives as 2-d), forward and backward.

Bins depend on the size of the whole tensor, so that torch's adaptive kernels cannot be run on a part of it: the bins of a rank
are brought to one width, which makes them the windows of a plain pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.addressed import reindexed
from torchhalo.exchange.memory import memory_format
from torchhalo.exchange.task import Task
from torchhalo.exchange.windowed import adjoint, forward
from torchhalo.geometry import Intervals, Span
from torchhalo.ops.pooling import as_pooled, divided, into_region, nothing, raise_dtype_errors, spatial, summed, unread
from torchhalo.torch_internals import dtensors, fake_tensors, handlers

aten = torch.ops.aten

MAXIMUM = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}
AVERAGE = {2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
AVERAGE_BACKWARD = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}


@dataclass(frozen=True)
class Bins(Intervals):
    """The bins of an adaptive pool: output ``o`` reads ``[floor(o * inputs / outputs), ceil((o + 1) * inputs / outputs))``.

    >>> bins = Bins(inputs=7, outputs=3)
    >>> [(bins.interval(o).start, bins.interval(o).stop) for o in range(3)], bins.width
    ([(0, 3), (2, 5), (4, 7)], 3)
    """

    def interval(self, output: int) -> Span:
        return Span(output * self.inputs // self.outputs, -(-(output + 1) * self.inputs // self.outputs))

    def reads(self, outputs: Span) -> tuple[Span, ...]:
        return (self.reach(outputs),) if outputs.size else ()  # no gaps between bins

    @property
    def even(self) -> bool:
        """Whether the bins are equal and do not overlap."""
        return self.inputs % self.outputs == 0

    @property
    def width(self) -> int:
        """That of the widest bin: a bin starts at a fraction of at most ``1 - gcd / outputs``."""
        rest = self.outputs - gcd(self.inputs, self.outputs) + self.inputs % self.outputs
        return self.inputs // self.outputs - (-rest // self.outputs)

    def ends(self, outputs: Span, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the last input of each of the bins."""
        bins = torch.arange(outputs.start, outputs.stop, device=device)
        return bins * self.inputs // self.outputs, ((bins + 1) * self.inputs - 1) // self.outputs

    def counts(self, outputs: Span, device: torch.device) -> torch.Tensor:
        first, last = self.ends(outputs, device)
        return last - first + 1

    def taps(self, outputs: Span, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of the bins, one bin after another, the last one repeated up to the width; and which are such repeats."""
        first, last = (end.unsqueeze(1) for end in self.ends(outputs, device))
        taps = first + torch.arange(self.width, device=device)
        return torch.minimum(taps, last).flatten(), (taps > last).flatten()


def _bins(input: DTensor, output: Sequence[int], ndim: int) -> dict[int, Bins]:
    """The bins of each spatial dim."""
    return {dim: Bins(int(input.shape[dim]), int(output[dim])) for dim in range(input.ndim - ndim, input.ndim)}


def _widened(
    region: torch.Tensor, task: Task, bins: Mapping[int, Bins], repeat: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The region with all bins of a dim equally wide and one after another: up to two elements per bin more.

    Args:
        repeat: What to fill bins up with, the last element of each or zeros.

    Returns:
        That, and for each dim the coordinate in the whole tensor of each of its elements.
    """
    coordinates = []
    for dim, each in bins.items():
        taps, repeats = each.taps(task.outputs.spans[dim], region.device)
        coordinates.append(taps)
        if not each.even:
            region = region.index_select(dim, taps - task.held(dim).start)
            if not repeat:
                region = region.masked_fill(repeats.view(-1, *[1] * (region.ndim - 1 - dim)), 0)
    return region, coordinates


@handlers.register(
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default, traffic="the part of the bins on other ranks"
)
def adaptive_avg_pool(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten._adaptive_avg_pool2d`` and its like."""
    input, output_size = args
    raise_dtype_errors(op, input)
    (result,) = fake_tensors.plain_result(op, input, output_size)
    ndim = spatial(op)
    bins = _bins(input, result.shape, ndim)

    def kernel(region: torch.Tensor, task: Task) -> torch.Tensor:
        if not region.numel() or 0 in task.outputs.shape:
            return region.new_empty(task.outputs.shape)
        wide, _ = _widened(region.to(summed(region.dtype)), task, bins, repeat=False)
        widths = [each.width for each in bins.values()]
        sums = AVERAGE[ndim](wide, widths, widths, [0] * ndim, False, True, 1)
        return divided(sums, _sizes_of(bins, task, region.device)).to(region.dtype)

    return forward(kernel, input, bins, [result])[0]


@handlers.register(
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    traffic="the gradient of the part of the bins on other ranks",
)
def adaptive_avg_pool_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten._adaptive_avg_pool2d_backward`` and its like: the steps of the forward op backwards."""
    grad, input = dtensors.as_dtensors(str(op), grad_output=args[0], self=args[1])
    (result,) = fake_tensors.plain_result(op, grad, input)
    ndim = spatial(op)
    bins = _bins(input, grad.shape, ndim)
    format = memory_format(result.shape, result.stride)

    def kernel(grad: torch.Tensor, task: Task) -> torch.Tensor:
        held = {dim: task.held(dim) for dim in bins}
        if not grad.numel():
            return nothing(grad, list(held.values()))
        share = divided(grad.to(summed(grad.dtype)), _sizes_of(bins, task, grad.device))
        widths = [each.width for each in bins.values()]
        wide = unread(share, [task.outputs.spans[dim].size * each.width for dim, each in bins.items()], format)
        out = AVERAGE_BACKWARD[ndim](share, wide, widths, widths, [0] * ndim, False, True, 1)
        for dim, each in bins.items():
            if not each.even:
                taps, repeats = each.taps(task.outputs.spans[dim], grad.device)
                out = out.masked_fill(repeats.view(-1, *[1] * (out.ndim - 1 - dim)), 0)
                shape = *out.shape[:dim], held[dim].size, *out.shape[dim + 1 :]
                out = out.new_zeros(shape).index_add_(dim, taps - held[dim].start, out)
        return out.to(grad.dtype)

    return adjoint(kernel, as_pooled(grad, input), bins, result)


def _sizes_of(bins: Mapping[int, Bins], task: Task, device: torch.device) -> dict[int, torch.Tensor]:
    return {dim: each.counts(task.outputs.spans[dim], device) for dim, each in bins.items()}


@handlers.register(
    aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default, traffic="the part of the bins on other ranks"
)
def adaptive_max_pool(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Handler of ``aten.adaptive_max_pool2d`` and its like; the indices are those into the whole tensor."""
    input, output_size = args
    raise_dtype_errors(op, input)
    results = fake_tensors.plain_result(op, input, output_size)
    ndim = spatial(op)
    bins = _bins(input, results[0].shape, ndim)
    sizes = [input.shape[dim] for dim in bins]

    def kernel(region: torch.Tensor, task: Task) -> tuple[torch.Tensor, ...]:
        if not region.numel() or 0 in task.outputs.shape:
            return tuple(region.new_empty(task.outputs.shape, dtype=result.dtype) for result in results)
        wide, coordinates = _widened(region, task, bins, repeat=True)
        widths = [each.width for each in bins.values()]
        values, indices = MAXIMUM[ndim](wide, widths, widths)
        return values, reindexed(indices, wide.shape[-ndim:], sizes, lambda dim, at: coordinates[dim][at])

    return forward(kernel, input, bins, results)


@handlers.register(
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    traffic="the gradient of the part of the bins on other ranks",
)
def adaptive_max_pool_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.adaptive_max_pool2d_backward`` and its like."""
    grad, input, indices = dtensors.as_dtensors(str(op), grad_output=args[0], self=args[1], indices=args[2])
    (result,) = fake_tensors.plain_result(op, grad, input, indices)
    bins = _bins(input, grad.shape, spatial(op))
    sizes, lead = [input.shape[dim] for dim in bins], input.ndim - len(bins)

    def kernel(grad: torch.Tensor, task: Task, indices: torch.Tensor) -> torch.Tensor:
        held = [task.held(dim) for dim in bins]
        if not grad.numel():
            return nothing(grad, held)
        indices = into_region(indices, sizes, held)
        out = grad.new_zeros(*grad.shape[:lead], *(span.size for span in held), dtype=summed(grad.dtype))
        out.flatten(lead).scatter_add_(-1, indices.flatten(lead), grad.flatten(lead).to(out.dtype))
        return out.to(grad.dtype)

    return adjoint(kernel, as_pooled(grad, input), bins, result, as_pooled(indices, input))
