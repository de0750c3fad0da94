"""Slices, selections, splits and joins along a sharded dim, and what moves elements without changing them: flip, roll, unfold.

Along a dim that is not cut, the result is a view of each rank's shard, as plain torch's is a view of the whole. Along a cut dim
it is a piece: a copy, cut as `torch.chunk` would cut it, that knows its base, so that what is written to it reaches the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.layout import layout
from torchhalo.exchange.memory import laid_out, strides
from torchhalo.exchange.pieces import gather_pieces
from torchhalo.exchange.task import Task
from torchhalo.exchange.windowed import Region, adjoint, exact, forward, hull
from torchhalo.geometry import Piece, Pieces, Relation, Span, Window
from torchhalo.ops.inplace import Cut, known
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution, simulation, stale_views

aten = torch.ops.aten

STALE = (
    "along a cut dim the result is a copy: what is written to it reaches the base; when the base is written to, it is outdated"
)


def is_cut(mesh: DeviceMesh, placements: Sequence[Placement], dim: int) -> bool:
    """Whether different ranks hold different parts of ``dim``."""
    return any(isinstance(p, Shard) and p.dim == dim and mesh.size(axis) > 1 for axis, p in enumerate(placements))


def _kept(region: torch.Tensor, task: Task) -> torch.Tensor:
    return region


def local_view(
    input: DTensor, op: handlers.Op, args: Sequence[Any], result: dtensors.Meta, placements: Sequence[Placement]
) -> DTensor:
    """``op`` of each shard: a view of it, so that what is written to the result is written to ``input``."""
    mesh, shard = input.device_mesh, dtensors.local(input)
    inside = process_groups.coordinate(mesh) is not None
    return dtensors.wrap(op(shard, *args) if inside else shard.new_empty(0, dtype=result.dtype), mesh, placements, result)


def _fetched(input: DTensor, relations: dict[int, Relation], shape: Sequence[int], region: Region) -> torch.Tensor:
    """What each rank's part of a result of ``shape`` reads of ``input``, as it is."""
    meta = dtensors.Meta(tuple(shape), strides(shape, torch.contiguous_format), input.dtype)
    return dtensors.local(forward(_kept, input, relations, [meta], region=region)[0])


# Slices and splits.


@handlers.register(aten.slice.Tensor, traffic="what changes owner", limits=STALE)
def slice(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.slice``: ``01234567 -> 135`` with start 1, end 6, step 2."""
    input, dim, start, end, step = handlers.bind(op, args, kwargs)
    if not known(input):
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
    (piece,) = forward(_kept, input, {dim: Window(1, stride=step, before=-start)}, [result], region=exact)
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


def _shifted(placements: Sequence[Placement], dim: int, by: int) -> list[Placement]:
    """The placements after ``dim`` was taken out (-1) or put in (1); Replicate where it was cut."""
    moved: list[Placement] = []
    for p in placements:
        if isinstance(p, Shard) and by < 0 and p.dim == dim:
            moved.append(Replicate())
        else:
            moved.append(Shard(p.dim + by) if isinstance(p, Shard) and p.dim >= dim else p)
    return moved


@handlers.register(aten.select.int, traffic="the slab, to all ranks along the axes that cut the dim", limits=STALE)
def select(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.select``."""
    input, dim, index = args
    if not known(input):
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, *args)
    dim, mesh, size = dim % input.ndim, input.device_mesh, input.shape[dim]
    if not -size <= index < size:  # not every release's fake tensors say so
        raise IndexError(f"select(): index {index} out of range for tensor of size {list(input.shape)} at dimension {dim}")
    index %= size
    placements = _shifted(input.placements, dim, -1)
    if not is_cut(mesh, input.placements, dim):
        return local_view(input, op, (dim, index), result, placements)
    if len(_cut_before) >= 4096:
        _cut_before.clear()
    _cut_before[mesh, tuple(input.shape), dim] = input.placements
    parts = prod(mesh.size(axis) for axis, p in enumerate(input.placements) if p == Shard(dim))
    shape = [parts if d == dim else n for d, n in enumerate(input.shape)]
    slab = _fetched(input, {dim: Pieces((Piece(Span(0, parts), index, 0),))}, shape, exact)
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
    if not known(grad):
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, *args)
    dim, mesh, grad = dim % len(sizes), grad.device_mesh, redistribution.reduce_partial(grad)
    index %= sizes[dim]
    before = _cut_before.get((mesh, tuple(sizes), dim), grad.placements)
    shifted = _shifted(grad.placements, dim, 1)
    placements = [q if p == Replicate() and q == Shard(dim) else p for p, q in zip(shifted, before, strict=True)]
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
    if not known(input):
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
    placements = _shifted(moved.placements, dim, -1)
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
    if not known(input) or not any(is_cut(mesh, input.placements, dim) for dim in grows):
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input, size)
    same = {dim: Pieces((Piece(Span(0, size[dim + more]), 0, 0),)) for dim in grows}
    shard = _fetched(input, dict(same), result.shape[more:], exact)
    placements = [
        Shard(p.dim + more) if isinstance(p, Shard) else p for p in redistribution.reduced_placements(input.placements)
    ]
    coordinate, target = process_groups.coordinate(mesh), layout(result.shape, mesh, placements)
    if coordinate is not None:
        shard = simulation.per_rank(lambda slab, *place: slab.expand(target.owned(place).shape), shard, *coordinate)
    return dtensors.wrap(shard, mesh, placements, result)


# Joins.


def _on_one_mesh(op: handlers.Op, tensors: Sequence[torch.Tensor]) -> list[DTensor]:
    """The tensors of a list as DTensors.

    A plain one is taken as replicated: autograd makes zeros for the unused parts of a split without asking DTensor, and beside
    DTensors a plain tensor can be nothing else.
    """
    mesh = next(t.device_mesh for t in tensors if isinstance(t, DTensor))
    found = [dtensors.replicated(t, mesh) for t in tensors]
    return list(dtensors.as_dtensors(op.overloadpacket.__name__, **{f"tensors[{i}]": t for i, t in enumerate(found)}))


def _together(op: handlers.Op, tensors: Sequence[DTensor]) -> list[DTensor]:
    """The tensors with the same placements: those of the largest one that is sharded."""
    if all(t.placements == tensors[0].placements for t in tensors):
        return list(tensors)
    sharded = [t for t in tensors if any(isinstance(p, Shard) for p in t.placements)]
    placements = redistribution.reduced_placements(max(sharded or tensors, key=DTensor.numel).placements)
    return [redistribution.redistribute(t, placements, op) for t in tensors]


@handlers.register(
    aten.cat.default,
    traffic="what changes owner, one exchange per tensor; nothing along a dim that is not cut",
    limits="plain tensors in the list are taken as replicated",
)
def cat(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.cat``."""
    tensors, dim = handlers.bind(op, args, kwargs)
    tensors = _on_one_mesh(op, tensors)
    if not all(map(known, tensors)):
        return handlers.stock(op, (tensors, dim), {})
    (result,) = fake_tensors.plain_result(op, tensors, dim)
    dim, mesh = dim % len(result.shape), tensors[0].device_mesh
    nothing = dtensors.local(tensors[0]).new_empty(0, dtype=result.dtype)
    tensors = _together(op, [t for t in tensors if t.ndim == len(result.shape)])  # torch skips legacy empty ones
    placements = tensors[0].placements
    if process_groups.coordinate(mesh) is None:
        return dtensors.wrap(nothing, mesh, placements, result)
    shards = [dtensors.local(t) for t in tensors]
    if is_cut(mesh, placements, dim):
        placements = tuple(redistribution.reduced_placements(placements))
        starts = accumulate((t.shape[dim] for t in tensors), initial=0)
        moves = [Window(1, before=start) for start in starts]
        shards = [_fetched(t, {dim: move}, result.shape, hull) for t, move in zip(tensors, moves, strict=False)]
    return dtensors.wrap(laid_out(torch.cat(shards, dim), result), mesh, placements, result)


@handlers.register(aten.stack.default, traffic="nothing", limits="plain tensors in the list are taken as replicated")
def stack(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.stack``."""
    tensors, dim = handlers.bind(op, args, kwargs)
    tensors = _on_one_mesh(op, tensors)
    if not all(map(known, tensors)):
        return handlers.stock(op, (tensors, dim), {})
    (result,) = fake_tensors.plain_result(op, tensors, dim)
    dim, tensors, mesh = dim % len(result.shape), _together(op, tensors), tensors[0].device_mesh
    placements = _shifted(tensors[0].placements, dim, 1)
    shards = [dtensors.local(t) for t in tensors]
    shard = shards[0] if process_groups.coordinate(mesh) is None else torch.stack(shards, dim)
    return dtensors.wrap(laid_out(shard, result), mesh, placements, result)


@handlers.register(
    aten.index.Tensor,
    traffic="what DTensor makes of it: nothing along dims that are not cut",
    limits="plain indices are taken as replicated; indices along a cut dim gather",
)
def index(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.index``, ``x[:, [0, 2]]``: DTensor's own, with plain indices."""
    input, indices = args
    mesh = next(t.device_mesh for t in (input, *indices) if isinstance(t, DTensor))
    found = [None if t is None else dtensors.replicated(t, mesh) for t in indices]
    return handlers.stock(op, (input, found), kwargs)


# What moves elements along their dims.


def _moved(input: DTensor, relations: dict[int, Pieces], result: dtensors.Meta) -> DTensor:
    (out,) = forward(lambda r, task: gather_pieces(r, task, relations), input, dict(relations), [result], region=exact)
    return out


@handlers.register(aten.flip.default, traffic="what changes owner")
def flip(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.flip``: ``1234 -> 4321``."""
    input, dims = args
    (result,) = fake_tensors.plain_result(op, input, dims)
    sizes = {dim % input.ndim: input.shape[dim] for dim in dims}
    relations = {dim: Pieces((Piece(Span(0, size), size - 1, -1),)) for dim, size in sizes.items()}
    return _moved(input, relations, result)


@handlers.register(aten.rot90.default, traffic="what changes owner")
def rot90(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.rot90``, by flips and a transposition."""
    input, times, (first, second) = handlers.bind(op, args, kwargs)
    fake_tensors.plain_result(op, input, times, [first, second])
    times %= 4
    if times in (0, 2):
        return aten.flip(input, [first, second]) if times else aten.clone(input)
    return aten.transpose(aten.flip(input, [second if times == 1 else first]), first, second)


@handlers.register(aten.roll.default, traffic="what changes owner")
def roll(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.roll``: ``1234 -> 3412`` with shift 2."""
    input, shifts, dims = handlers.bind(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input, shifts, dims)
    if not dims:
        return _rolled_flat(input, shifts[0] % max(1, input.numel()), input.ndim - 1)
    relations = {}
    for dim in {dim % input.ndim for dim in dims}:
        size = input.shape[dim]
        shift = sum(s for s, d in zip(shifts, dims, strict=True) if d % input.ndim == dim) % max(1, size)
        relations[dim] = Pieces((Piece(Span(0, shift), size - shift), Piece(Span(shift, size), 0)))
    return _moved(input, relations, result)


def _rolled_flat(input: DTensor, shift: int, dim: int) -> DTensor:
    """Roll the elements as if the dims up to ``dim`` were one: what leaves a row at its end enters the next one."""
    if not input.numel():
        return aten.clone(input)
    size = input.shape[dim]
    rows, shift = divmod(shift, size)
    if dim == 0:
        return aten.roll(input, [shift], [0])
    ahead = _rolled_flat(input, rows, dim - 1)
    if not shift:
        return ahead
    over = _rolled_flat(input, rows + 1, dim - 1)
    return aten.cat([over.narrow(dim, size - shift, shift), ahead.narrow(dim, 0, size - shift)], dim)


@handlers.register(aten.repeat.default, traffic="what a rank's part of the result reads and it does not own")
def repeat(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.repeat``: ``12 -> 121212``."""
    input, repeats = args
    (result,) = fake_tensors.plain_result(op, input, repeats)
    while input.ndim < len(repeats):
        input = input.unsqueeze(0)
    relations = {
        dim: Pieces(tuple(Piece(Span(k * size, (k + 1) * size), 0) for k in range(count)))
        for dim, (size, count) in enumerate(zip(input.shape, repeats, strict=True))
        if is_cut(input.device_mesh, input.placements, dim)
    }
    rest = [1 if dim in relations else count for dim, count in enumerate(repeats)]
    return forward(
        lambda r, task: gather_pieces(r, task, relations).repeat(rest), input, dict(relations), [result], region=exact
    )[0]


@handlers.register(aten.unfold.default, traffic="the halo of the input", limits=f"in place: not reached; {STALE}")
def unfold(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.unfold``, `Tensor.unfold`: ``1234 -> 12 23 34`` with size 2, step 1."""
    input, dim, size, step = args
    (result,) = fake_tensors.plain_result(op, *args)
    if not input.ndim or not is_cut(input.device_mesh, input.placements, dim % input.ndim):
        return local_view(input, op, args[1:], result, input.placements)
    dim, mesh = dim % input.ndim, input.device_mesh
    placements = redistribution.reduced_placements(input.placements)
    region = _fetched(input, {dim: Window(size, step)}, result.shape, hull)

    def kernel(region: torch.Tensor) -> torch.Tensor:
        if region.shape[dim]:
            return region.unfold(dim, size, step)
        return region.unsqueeze(-1).expand(*region.shape, size)

    inside = process_groups.coordinate(mesh) is not None
    return dtensors.wrap(simulation.per_rank(kernel, region) if inside else region, mesh, placements, result)


@handlers.register(aten.unfold_backward.default, traffic="the halo of the gradient, on its way back")
def unfold_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.unfold_backward``."""
    grad, sizes, dim, size, step = args
    (result,) = fake_tensors.plain_result(op, *args)
    dim %= max(1, len(sizes))
    last = Shard(len(sizes))
    placements = [Replicate() if p == last else p for p in redistribution.reduced_placements(grad.placements)]

    def kernel(shard: torch.Tensor, task: Task) -> torch.Tensor:
        shape = list(task.owned.shape)
        if dim in task.dims:
            shape[dim] = task.held(dim).size
        return aten.unfold_backward(shard, shape, dim, size, step) if shard.numel() else shard.new_zeros(shape)

    return adjoint(kernel, redistribution.redistribute(grad, placements, op), {dim: Window(size, step)}, result)


@handlers.register(aten.tril.default, aten.triu.default, traffic="nothing")
def triangle(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.tril`` and ``aten.triu``."""
    input, diagonal = handlers.bind(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input, diagonal)

    def kernel(region: torch.Tensor, task: Task) -> torch.Tensor:
        rows, columns = task.owned.spans[-2:]
        return op(region, diagonal + rows.start - columns.start)

    return forward(kernel, input, {}, [result])[0]


# New tensors.


@handlers.register(
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    traffic="nothing",
)
def new(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.new_empty`` and its kin: cut as the given tensor, along dims that it has and that are longer than 1.

    Autograd copies a gradient into ``new_empty_strided`` if its strides are not the parameter's. A compiler chooses the strides
    of each rank's partial sums, so only some ranks may copy: they must remain partial sums, or only some would reduce them.
    """
    input, size = args[:2]
    if not known(input):
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, *args)
    result = result._replace(dtype=kwargs.get("dtype") or result.dtype)
    mesh, coordinate = input.device_mesh, process_groups.coordinate(input.device_mesh)
    same, like = tuple(size) == tuple(input.shape), len(size) == input.ndim
    kept = same and op is aten.new_empty_strided.default
    placements = [
        p if (isinstance(p, Shard) and (same or (like and size[p.dim] > 1))) or (kept and p.is_partial()) else Replicate()
        for p in input.placements
    ]
    target = layout(size, mesh, placements)
    order = sorted(range(len(size)), key=lambda dim: -result.stride[dim])

    def kernel(shard: torch.Tensor, *coordinate: int) -> torch.Tensor:
        shape = target.owned(coordinate).shape
        if op is not aten.new_empty_strided.default:
            return op(shard, shape, *args[2:], **kwargs)
        dense = shard.new_empty([shape[dim] for dim in order], **kwargs)
        return dense.permute([order.index(dim) for dim in range(len(shape))])

    shard = dtensors.local(input)
    shard = shard.new_empty(0, **kwargs) if coordinate is None else simulation.per_rank(kernel, shard, *coordinate)
    return dtensors.wrap(shard, mesh, placements, result)
