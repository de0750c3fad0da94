"""Writing by index: ``y[i] = v``, ``y[i] += v``, and so the gradients of reads by index.

What is added where sharded indices say is a partial sum over the whole table: no rank needs another's indices or values::

    table[i]            table replicated, i sharded     ->  the result sharded as i
    its gradient        grad and i sharded alike        ->  partial sums, as those of any other parameter
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange import addressed, gathers
from torchhalo.exchange.addressed import Addresses
from torchhalo.exchange.broadcasting import aligned, moved, own_placements, shared_placements
from torchhalo.exchange.gather_dim import padded
from torchhalo.exchange.layout import layout
from torchhalo.exchange.memory import laid_out
from torchhalo.geometry import Box
from torchhalo.geometry.subscripts import Subscript
from torchhalo.ops.indexing import along, cut_indices, filled, prepared, subscript_of
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution, simulation, tracing

aten = torch.ops.aten


@handlers.register(
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
    traffic="nothing for a mask with one value; values that are added stay where they are, the result is Partial",
    limits="plain indices and values count as replicated; values that are written, not added, are gathered along the points",
)
def index_put(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``y[mask] = value``, ``y[indices] = values``, and of the gradient of ``y[indices]``."""
    input, given, values, accumulate = handlers.bind(op, args, kwargs)[:4]
    in_place = op in (aten.index_put_.default, aten._index_put_impl_.default)
    mask = given[0] if len(given) == 1 else None
    if mask is not None and mask.dtype == torch.bool and values.numel() == 1 and not accumulate:
        mesh = dtensors.mesh_of(input, values, mask)
        input, values, mask = (dtensors.replicated(t, mesh) for t in (input, values, mask))
        while mask.ndim < input.ndim:
            mask = mask.unsqueeze(-1)
        fill = aten.masked_fill_ if in_place else aten.masked_fill
        return fill(input, mask, values.to(input.dtype).reshape(()))
    found = prepared(input, given, values)
    if found is None:
        return handlers.stock(op, args, kwargs)
    input, indices, (values,) = found
    return _write(input, indices, values, accumulate, in_place)


def _write(input: DTensor, indices: Sequence[DTensor | None], values: DTensor, accumulate: bool, in_place: bool) -> DTensor:
    (result,) = fake_tensors.plain_result(aten.index_put.default, input, list(indices), values, accumulate)
    subscript, mesh = subscript_of(input, indices), input.device_mesh
    values = values if accumulate else redistribution.reduce_partial(values)
    named = shared_placements(subscript.points, [index for index in indices if index is not None])
    given = shared_placements(subscript.result, [values])
    roles = [
        _role(subscript, *axis, accumulate, in_place)
        for axis in zip(input.placements, given, values.placements, named, strict=True)
    ]
    parts, wanted, cut = ([role[column] for role in roles] for column in range(3))
    _notice(values, wanted, subscript.result)
    shards = dtensors.local(aligned(values, wanted, subscript.result)), *cut_indices(indices, cut, subscript)
    pieces = layout(result.shape, mesh, parts)

    def kernel(into: torch.Tensor, coordinate: Sequence[int], values: torch.Tensor, *found: torch.Tensor) -> torch.Tensor:
        if not any(pieces.cuts[dim] for dim in subscript.dims):
            return aten.index_put_(into, filled(subscript, found), values, accumulate)
        return _put_own(into, pieces.owned(coordinate), values, found)

    def _put_own(into: torch.Tensor, own: Box, values: torch.Tensor, found: Sequence[torch.Tensor]) -> torch.Tensor:
        """Where indexed dims are cut: a row is added, into which goes what other ranks own."""
        cut = [dim for dim in subscript.dims if pieces.cuts[dim]]
        if not all(own.spans[dim].size for dim in cut):
            return into
        places = dict(zip(subscript.dims, found, strict=True))
        for dim in cut:
            places[dim] = _from_zero(places[dim], dim, subscript.shape[dim])
        mine = torch.stack(
            torch.broadcast_tensors(
                *((places[dim] >= own.spans[dim].start) & (places[dim] < own.spans[dim].stop) for dim in cut)
            )
        ).all(0)
        size = own.spans[cut[0]].size
        for dim in cut:
            places[dim] = torch.where(mine, places[dim] - own.spans[dim].start, size if dim == cut[0] else 0)
        room = padded(into, cut[0], size + 1)
        return aten.index_put_(room, filled(subscript, list(places.values())), values, accumulate).narrow(cut[0], 0, size)

    return _combined(input, parts, kernel, shards, in_place, result)


def _role(
    subscript: Subscript,
    held: Placement,
    value: Placement,
    given: Placement,
    name: Placement,
    accumulate: bool,
    in_place: bool,
) -> tuple[Placement, Placement, Placement]:
    """Along one axis: how what is written is cut, as a tensor of the input's shape; the values for that; the points.

    Args:
        held: How the input is cut.
        value: How the values are cut, in the shape of what would be read; ``given``: in their own shape.
        name: How the points are cut.
    """
    whole = Replicate()
    kept = subscript.in_input(value.dim) if isinstance(value, Shard) else None
    if accumulate and isinstance(value, Shard):
        return (Partial(), value, Shard(value.dim - subscript.start)) if kept is None else (Shard(kept), value, whole)
    if accumulate and given.is_partial():
        return given, given, whole
    if accumulate and isinstance(name, Shard):
        return Partial(), Shard(name.dim + subscript.start), name
    if isinstance(held, Shard):
        return held, whole if held.dim in subscript.dims else Shard(subscript.in_result(held.dim)), whole
    if kept is not None and not in_place:
        return Shard(kept), value, whole
    return whole, whole, whole


def _notice(tensor: DTensor, placements: Sequence[Placement], shape: Sequence[int]) -> None:
    """Tell of a gather of ``tensor``, if to cut it as ``placements`` cut ``shape`` is one."""
    mesh, target = tensor.device_mesh, own_placements(tensor, placements, shape)
    op = aten.index_put.default
    gathers.notice(gathers.Redistribution(op, tensor.shape, tensor.dtype, mesh, tensor.placements, target))


def _from_zero(index: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """An index without negative numbers, which count from the end; out of range raises, if the values are at hand."""
    if index.device.type == "cpu" and tracing.has_values(index) and index.numel():
        for end in index.aminmax():
            if not -size <= end < size:
                raise IndexError(f"index {int(end)} is out of bounds for dimension {dim} with size {size}")
    return torch.where(index < 0, index + size, index)


def _combined(
    target: DTensor,
    parts: Sequence[Placement],
    kernel: Callable[..., torch.Tensor],
    shards: Sequence[torch.Tensor],
    in_place: bool,
    result: dtensors.Meta,
) -> DTensor:
    """``target`` with what ``kernel`` writes to it, or adds to it.

    Args:
        parts: The placements for which the kernel does so. Other than those of ``target`` only where it adds.
        kernel: Called with a tensor that it may write to, the coordinate and ``shards``; it returns the tensor that results.
    """
    mesh, coordinate = target.device_mesh, process_groups.coordinate(target.device_mesh)
    target = target if in_place else redistribution.reduce_partial(target)
    final = [held if in_place or isinstance(held, Shard) else part for held, part in zip(target.placements, parts, strict=True)]
    if coordinate is None:
        return target if in_place else dtensors.wrap(dtensors.local(target).new_empty(0), mesh, final, result)
    into = dtensors.local(redistribution.redistribute(target, final))
    into = into if in_place else into.clone()
    if final == list(parts):
        out = simulation.per_rank(kernel, into, coordinate, *shards)
    else:
        pieces = layout(result.shape, mesh, parts)

        def alone(into: torch.Tensor, coordinate: Sequence[int], *shards: torch.Tensor) -> torch.Tensor:
            return kernel(into.new_zeros(pieces.owned(coordinate).shape), coordinate, *shards)

        added = dtensors.wrap(simulation.per_rank(alone, into, coordinate, *shards), mesh, parts, result)
        _notice(added, final, result.shape)
        out = into + dtensors.local(moved(added, final))
    if not in_place:
        return dtensors.wrap(laid_out(out, result), mesh, final, result)
    if out is not into:
        into.copy_(out)
    return target


# One dim, of an index with one dim.


@handlers.register(
    aten.index_add.default,
    aten.index_add_.default,
    aten.index_copy.default,
    aten.index_copy_.default,
    traffic="as index_put",
)
def index_add(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.index_add``, ``y[:, i] += v``, and ``aten.index_copy``, ``y[:, i] = v``."""
    input, dim, given, source, *alpha = handlers.bind(op, args, kwargs)
    found = prepared(input, [given], source) if input.ndim else None
    if found is None:
        return handlers.stock(op, args, kwargs)
    input, indices, (source,) = found
    functional = aten.index_add.default if alpha else aten.index_copy.default
    fake_tensors.plain_result(functional, input, dim, indices[0], source, **({"alpha": alpha[0]} if alpha else {}))
    source = source if alpha in ([], [1]) else source * alpha[0]
    in_place = op in (aten.index_add_.default, aten.index_copy_.default)
    return _write(input, along(input, dim, indices[0]), source, bool(alpha), in_place)


# One element for each index.


@handlers.register(
    aten.scatter_add.default,
    aten.scatter_add_.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_.src,
    aten.scatter_.value,
    traffic="nothing for what is added: the result is Partial if the indices are sharded along the dim that they name; "
    "what is written goes to the owners of its places",
    limits="what is written, not added, along the dim that the indices name, if that is sharded: the host waits for the "
    "indices, and of values with one index any is kept; in place, or under torch.compile, it is gathered",
)
def scatter(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.scatter_add``, the gradient of `gather`, where each rank adds what it has, and of ``aten.scatter``."""
    input, dim, given, source = handlers.bind(op, args, kwargs)
    values = [source] if isinstance(source, torch.Tensor) else []
    found = prepared(input, [given], *values) if input.ndim and given.ndim else None
    if found is None:
        return handlers.stock(op, args, kwargs)
    input, (index,), tensors = found
    assert index is not None
    add = op in (aten.scatter_add.default, aten.scatter_add_.default)
    functional = aten.scatter_add.default if add else aten.scatter.src if tensors else aten.scatter.value
    (result,) = fake_tensors.plain_result(functional, input, dim, index, *(tensors or [source]))
    dim, mesh = dim % input.ndim, input.device_mesh
    in_place = op in (aten.scatter_add_.default, aten.scatter_.src, aten.scatter_.value)
    tensors = [_cropped(each if add else redistribution.reduce_partial(each), index.shape) for each in tensors]
    fits = [other != dim and index.shape[other] == size for other, size in enumerate(input.shape)]
    named = shared_placements(index.shape, [index, *tensors])
    home = [Shard(dim) if name == Shard(dim) else held for held, name in zip(input.placements, named, strict=True)]
    kept = all(not isinstance(held, Shard) or held == p for held, p in zip(input.placements, home, strict=True))
    writes = bool(tensors) and not add and not in_place and not tracing.is_tracing()
    if writes and kept and Shard(dim) in named and all(fits[:dim] + fits[dim + 1 :]):
        return _sent_home(input, dim, index, tensors[0], home, result)
    summands = tensors[0].placements if tensors else named
    cut: list[Placement] = []
    parts: list[Placement] = []
    for held, name, summand in zip(input.placements, named, summands, strict=True):
        if isinstance(name, Shard) and (add or (fits[name.dim] and not in_place and not isinstance(held, Shard))):
            cut.append(name)
            parts.append(name if fits[name.dim] else Partial())
        elif add and summand.is_partial():
            cut.append(summand)
            parts.append(summand)
        else:
            cut.append(held if isinstance(held, Shard) and fits[held.dim] else Replicate())
            parts.append(held if isinstance(held, Shard) else Replicate())
    points = redistribution.reduced_placements(cut)
    for each in tensors:
        _notice(each, cut, index.shape)
    shards = [dtensors.local(aligned(each, cut, index.shape)) for each in tensors]
    pieces, told = layout(result.shape, mesh, parts), layout(index.shape, mesh, points)

    def kernel(into: torch.Tensor, coordinate: Sequence[int], index: torch.Tensor, *source: torch.Tensor) -> torch.Tensor:
        own, has = pieces.owned(coordinate), told.owned(coordinate)
        common = {other: own.spans[other] & has.spans[other] for other in range(input.ndim) if other != dim}
        if not all(span.size for span in common.values()):
            return into
        room = into
        if pieces.cuts[dim]:  # what other ranks own goes into a row that is added
            place, size = _from_zero(index, dim, result.shape[dim]), own.spans[dim].size
            mine = (place >= own.spans[dim].start) & (place < own.spans[dim].stop)
            index, room = torch.where(mine, place - own.spans[dim].start, size), padded(into, dim, size + 1)
        part, taken = room, [index, *source]
        for other, span in common.items():
            part = part.narrow(other, span.start - own.spans[other].start, span.size)
            taken = [each.narrow(other, span.start - has.spans[other].start, span.size) for each in taken]
        (aten.scatter_add_ if add else aten.scatter_)(part, dim, *taken, *values)
        return room.narrow(dim, 0, into.shape[dim]) if room is not into else into

    values = [] if tensors else [source]
    return _combined(input, parts, kernel, [dtensors.local(aligned(index, points, index.shape)), *shards], in_place, result)


def _sent_home(
    input: DTensor, dim: int, index: DTensor, source: DTensor, placements: Sequence[Placement], result: dtensors.Meta
) -> DTensor:
    """A scatter of what is cut along ``dim``, such as the gradient of `sort`: each value goes to the owner of its place."""
    mesh = input.device_mesh
    if done := dtensors.non_member_result(input, [result], [placements]):
        return done[0]
    into, values, indices = (
        dtensors.local(redistribution.redistribute(each, placements))
        for each in (redistribution.reduce_partial(input), source, index)
    )
    wrong = f"index {{}} is out of bounds for dimension {dim} with size {result.shape[dim]}"
    addresses = Addresses(layout(result.shape, mesh, placements), (dim,))
    out = addressed.scatter(values, indices, addresses, mesh, wrong, into)
    return dtensors.wrap(laid_out(out, result), mesh, placements, result)


def _cropped(source: DTensor, shape: Sequence[int]) -> DTensor:
    for dim, size in enumerate(shape):
        source = source if source.shape[dim] == size else aten.slice.Tensor(source, dim, 0, size)
    return source


# Flat.


@handlers.register(aten.put.default, traffic="that of views with one dim, and as index_put")
def put(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.put``, the gradient of `take`."""
    input, given, source, accumulate = handlers.bind(op, args, kwargs)
    flat = aten.index_put.default(
        aten.reshape.default(input, [-1]), [aten.reshape.default(given, [-1])], aten.reshape.default(source, [-1]), accumulate
    )
    return aten.reshape.default(flat, list(input.shape))


@handlers.register(
    aten.index_fill.int_Scalar, traffic="DTensor's own; on torch 2.11, which has no rule, nothing but the indices"
)
def index_fill(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.index_fill``."""
    try:
        return handlers.stock(op, args, kwargs)
    except NotImplementedError:
        input, dim, index, value = args
        fake_tensors.plain_result(op, input, dim, index, value)
        rows = dtensors.local(redistribution.whole(index)) if isinstance(index, DTensor) else index
        mask = torch.zeros(input.shape[dim], dtype=torch.bool, device=rows.device).index_fill_(0, rows, True)
        mask = mask.view([-1 if each == dim % input.ndim else 1 for each in range(input.ndim)])
        return aten.masked_fill.Scalar(input, dtensors.replicated(mask, input.device_mesh), value)
