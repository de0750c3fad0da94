"""Slices, selections and splits along a dim, sharded or not.

Along a dim that is not cut, the result is a view of each rank's shard, as plain torch's is a view of the whole. Along a cut dim
it is a piece: a copy, cut as `torch.chunk` would cut it, that knows its base, so that what is written to it reaches the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.layout import has_layout, is_cut, layout
from torchhalo.exchange.memory import laid_out
from torchhalo.exchange.task import Task
from torchhalo.exchange.windowed import adjoint, exact, fetch, forward, keep
from torchhalo.geometry import Piece, Pieces, Span, Window
from torchhalo.ops.inplace import Cut
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution, simulation, stale_views
from torchhalo.torch_internals.grid_shard import BOXES, at, has_grid

aten = torch.ops.aten


STALE = (
    "along a cut dim the result is a copy: what is written to it reaches the base; when the base is written to, it is outdated"
)


def local_view(
    input: DTensor, op: handlers.Op, args: Sequence[Any], result: dtensors.Meta, placements: Sequence[Placement]
) -> DTensor:
    """``op`` of each shard: a view of it, so that what is written to the result is written to ``input``."""
    mesh, shard = input.device_mesh, dtensors.local(input)
    inside = process_groups.coordinate(mesh) is not None
    return dtensors.wrap(op(shard, *args) if inside else shard.new_empty(0, dtype=result.dtype), mesh, placements, result)


# Slices and splits.


@handlers.register(aten.slice.Tensor, traffic="what changes owner", limits=STALE)
def slice(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.slice``: ``01234567 -> 135`` with start 1, end 6, step 2."""
    input, dim, start, end, step = handlers.bind(op, args, kwargs)
    if not has_layout(input):
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input, dim, start, end, step)
    dim %= input.ndim
    return _sliced(input, dim, _first(start, input.shape[dim]), step, result)


def _first(start: int | None, size: int) -> int:
    """Where a slice begins."""
    start = 0 if start is None else start
    return min(max(start + size if start < 0 else start, 0), size)


def _sliced(input: DTensor, dim: int, start: int, step: int, result: dtensors.Meta) -> DTensor:
    mesh, placements, size = input.device_mesh, input.placements, result.shape[dim]
    if not is_cut(mesh, placements, dim) or size == input.shape[dim]:
        cut = (dim, start, start + size * step, step) if size != input.shape[dim] else (dim,)
        return local_view(input, aten.slice.Tensor, cut, result, placements)
    (piece,) = forward(keep, input, {dim: Window(1, stride=step, before=-start)}, [result], region=exact)
    return stale_views.set_origin(piece, Cut(input, dim, start, step, size, False), input)


@handlers.register(aten.slice_backward.default, traffic="the same of the gradient, on its way back")
def slice_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.slice_backward``."""
    grad, sizes, dim, start, end, step = args
    (result,) = fake_tensors.plain_result(op, *args)
    dim %= grad.ndim

    def kernel(shard: torch.Tensor, task: Task) -> torch.Tensor:
        if dim in task.dims:
            return shard
        shape = [sizes[d] if d == dim else n for d, n in enumerate(shard.shape)]
        return aten.slice_backward(shard, shape, dim, start, end, step)

    return adjoint(kernel, grad, {dim: Window(1, stride=step, before=-_first(start, sizes[dim]))}, result, region=exact)


@handlers.register(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    traffic="what changes owner, one exchange per part",
    limits=STALE,
)
def split(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """Handler of ``aten.split`` and its kin, of which ``chunk`` and ``tensor_split`` are made."""
    input, sizes, dim = handlers.bind(op, args, kwargs)
    results = fake_tensors.plain_result(op, input, sizes, dim)
    dim %= input.ndim
    starts = accumulate((result.shape[dim] for result in results), initial=0)
    return [_sliced(input, dim, start, 1, result) for start, result in zip(starts, results, strict=False)]


@handlers.register(
    aten.narrow_copy.default, aten.slice_copy.Tensor, aten.select_copy.int, traffic="what changes owner; a slab to all ranks"
)
def copied(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of views that copy."""
    views = {
        aten.narrow_copy.default: aten.narrow.default,
        aten.slice_copy.Tensor: aten.slice.Tensor,
        aten.select_copy.int: aten.select.int,
    }
    return views[op](*args, **kwargs).clone()


handlers.register_composites(
    __name__,
    aten.narrow.default,
    aten.chunk.default,
    aten.split.sizes,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
    aten.diff.default,
    aten.take_along_dim.default,
    traffic="what changes owner",
)


# One element of a dim.


# How tensors of one shape were cut that something was selected from along a dim: their gradient is then cut likewise, which
# spares the memory of a whole one. The gradient of the slab, which is all that backward is given, no longer tells.
_cut_before: dict[tuple[object, ...], tuple[Placement, ...]] = {}


def shifted(placements: Sequence[Placement], dim: int, by: int) -> list[Placement]:
    """The placements after ``dim`` was taken out (-1) or put in (1); Replicate where it was cut."""
    moved: list[Placement] = []
    for p in placements:
        if isinstance(p, BOXES) and by < 0 and p.dim == dim:
            moved.append(Replicate())
        else:
            moved.append(at(p, p.dim + by) if isinstance(p, BOXES) and p.dim >= dim else p)
    return moved


@handlers.register(aten.select.int, traffic="the slab, to all ranks along the axes that cut the dim", limits=STALE)
def select(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.select``."""
    input, dim, index = args
    if not has_layout(input):
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, *args)
    dim, mesh, size = dim % input.ndim, input.device_mesh, input.shape[dim]
    if not -size <= index < size:  # not every release's fake tensors say so
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(input.shape)} at dimension {dim}")
    index %= size
    placements = shifted(input.placements, dim, -1)
    if not is_cut(mesh, input.placements, dim):
        return local_view(input, op, (dim, index), result, placements)
    if len(_cut_before) >= 4096:
        _cut_before.clear()
    _cut_before[mesh, tuple(input.shape), dim] = input.placements
    parts = prod(mesh.size(axis) for axis, p in enumerate(input.placements) if p == Shard(dim))
    shape = [parts if d == dim else n for d, n in enumerate(input.shape)]
    slab = fetch(input, {dim: Pieces((Piece(Span(0, parts), index, 0),))}, shape, exact)
    slab = slab if process_groups.coordinate(mesh) is None else slab.squeeze(dim)
    piece = dtensors.wrap(slab, mesh, redistribution.reduced_placements(placements), result)
    return stale_views.set_origin(piece, Cut(input, dim, index, 1, 1, True), input)


@handlers.register(
    aten.select_backward.default,
    traffic="nothing",
    limits="the gradient is cut as the last tensor of that shape was from which anything was selected along a cut dim",
)
def select_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.select_backward``: the rank that owns the element takes it from the gradient."""
    grad, sizes, dim, index = args
    if not has_layout(grad):
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, *args)
    dim, mesh, grad = dim % len(sizes), grad.device_mesh, redistribution.reduce_partial(grad)
    index %= sizes[dim]
    before = _cut_before.get((mesh, tuple(sizes), dim), grad.placements)
    pairs = zip(shifted(grad.placements, dim, 1), before, strict=True)
    placements = [q if p == Replicate() and q == Shard(dim) else p for p, q in pairs]
    coordinate = process_groups.coordinate(mesh)
    if coordinate is None:
        return dtensors.wrap(dtensors.local(grad).new_empty(0), mesh, placements, result)
    target = layout(sizes, mesh, placements)

    def kernel(shard: torch.Tensor, *coordinate: int) -> torch.Tensor:
        own = target.owned(coordinate)
        out = shard.new_zeros(own.shape)
        if own.spans[dim].start <= index < own.spans[dim].stop:
            out.select(dim, index - own.spans[dim].start).copy_(shard)
        return out

    shard = simulation.per_rank(kernel, dtensors.local(grad), *coordinate)
    return dtensors.wrap(laid_out(shard, result), mesh, placements, result)


@handlers.register(
    aten.unbind.int,
    traffic="nothing; along a cut dim, what changes owner when the tensor is cut along its largest other dim instead",
    limits=STALE,
)
def unbind(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.unbind``."""
    input, dim = handlers.bind(op, args, kwargs)
    if not has_layout(input):
        return handlers.stock(op, args, kwargs)
    results = fake_tensors.plain_result(op, input, dim)
    dim, mesh, moved = dim % input.ndim, input.device_mesh, input
    cut = is_cut(mesh, input.placements, dim)
    if cut:
        free = [d for d in range(input.ndim) if d != dim and Shard(d) not in input.placements]
        other = max(free, key=lambda d: input.shape[d], default=None)
        instead = Replicate() if other is None else Shard(other)
        moved = redistribution.redistribute(
            input, [instead if p == Shard(dim) else p for p in redistribution.reduced_placements(input.placements)], op
        )
    placements = shifted(moved.placements, dim, -1)
    inside = process_groups.coordinate(mesh) is not None
    shards = dtensors.local(moved).unbind(dim) if inside else [dtensors.local(moved)] * len(results)
    parts = [dtensors.wrap(shard, mesh, placements, result) for shard, result in zip(shards, results, strict=True)]
    if cut:
        for index, part in enumerate(parts):
            stale_views.set_origin(part, Cut(input, dim, index, 1, 1, True), input)
    return parts


@handlers.register(aten.expand.default, traffic="nothing; of a cut dim of size 1, the slab, to all ranks along it")
def expand(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.expand``: a cut dim of size 1 that grows is cut afterwards too."""
    input, size = args[:2]
    mesh, more = input.device_mesh, len(size) - input.ndim
    grows = [d for d in range(input.ndim) if input.shape[d] == 1 and size[d + more] not in (1, -1)]
    if not has_layout(input) or not (has_grid(input.placements) or any(is_cut(mesh, input.placements, dim) for dim in grows)):
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input, size)
    same = {dim: Pieces((Piece(Span(0, size[dim + more]), 0, 0),)) for dim in grows}
    shard = fetch(input, dict(same), result.shape[more:], exact)
    placements = [
        at(p, p.dim + more) if isinstance(p, BOXES) else p for p in redistribution.reduced_placements(input.placements)
    ]
    coordinate, target = process_groups.coordinate(mesh), layout(result.shape, mesh, placements)
    if coordinate is not None:
        shard = simulation.per_rank(lambda slab, *place: slab.expand(target.owned(place).shape), shard, *coordinate)
    return dtensors.wrap(shard, mesh, placements, result)


@handlers.register(
    aten.diagonal_backward.default, traffic="DTensor's own; on torch 2.11, which has no rule, the gradient to all ranks"
)
def diagonal_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.diagonal_backward``."""
    try:
        return handlers.stock(op, args, kwargs)
    except NotImplementedError:
        (result,) = fake_tensors.plain_result(op, *args, **kwargs)
        grad = redistribution.redistribute(args[0], whole := [Replicate()] * args[0].device_mesh.ndim, op)
        return dtensors.wrap(op(dtensors.local(grad), *args[1:], **kwargs), grad.device_mesh, whole, result)
