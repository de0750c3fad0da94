"""Elements chosen by a sharded mask: selected, written, and where they are.

Each rank chooses among its own, in the order of the whole tensor, so dims that the mask covers are made one dim first. What is
chosen is then cut as `torch.chunk` cuts it::

    x       1234 | 5678          cut along its one dim
    mask    0111 | 0001
    x[mask]   23 | 48            each rank has told how many it chose, and the 4 has changed its owner
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.broadcasting import moved, shared_placements
from torchhalo.exchange.layout import has_layout, layout
from torchhalo.exchange.memory import strides
from torchhalo.exchange.relayout import relayout
from torchhalo.exchange.rows import Rows
from torchhalo.torch_internals import dtensors, handlers, process_groups, redistribution

aten = torch.ops.aten

TRAVELS = "what a flattened view sends, a count from every rank, and what changes owner to be cut evenly"
TRACED = "the shape of the result depends on values: torch.compile cannot trace it"


def flattened(tensor: DTensor, dims: int, placements: Sequence[Placement]) -> DTensor:
    """``tensor`` with its first ``dims`` dims as one, cut along that by the axes of ``placements`` that cut any of them."""
    shape = (prod(tensor.shape[:dims]), *tensor.shape[dims:])
    meta = dtensors.Meta(shape, strides(shape, torch.contiguous_format), tensor.dtype)
    return relayout(moved(tensor, placements), meta, _flat_placements(placements, dims))


def _flat_placements(placements: Sequence[Placement], dims: int) -> list[Placement]:
    return [Shard(max(0, p.dim - dims + 1)) if isinstance(p, Shard) else Replicate() for p in placements]


class _Chosen(NamedTuple):
    """What a mask over the first dims of a tensor chooses, on this rank.

    Attributes:
        flat: The tensor, with the dims of the mask as one.
        mask: This rank's part of it, flat.
        rows: How many each rank chooses.
        axes: Those that cut what is chosen from.
    """

    flat: DTensor
    placements: list[Placement]
    mask: torch.Tensor
    rows: Rows


def _chosen(name: str, input: DTensor, mask: DTensor) -> _Chosen:
    mask, dims = redistribution.reduce_partial(mask), mask.ndim
    input = redistribution.reduce_partial(input)
    placements = [p if isinstance(p, Shard) else q for p, q in zip(input.placements, mask.placements, strict=True)]
    flat = flattened(input, dims, placements)
    over = [p if isinstance(p, Shard) and p.dim < dims else Replicate() for p in placements]
    chosen = dtensors.local(flattened(mask, dims, over))
    axes = [axis for axis, p in enumerate(over) if isinstance(p, Shard)]
    return _Chosen(flat, placements, chosen, Rows.told(name, int(chosen.sum()), chosen.device, input.device_mesh, axes))


def _select(name: str, input: DTensor, mask: DTensor) -> DTensor:
    """``input[mask]``, with a mask over its first dims."""
    if process_groups.coordinate(input.device_mesh) is None:
        raise NotImplementedError(f"{name}: a rank outside of the mesh cannot know how many elements the mask chooses")
    flat, _, chosen, rows = _chosen(name, input, mask)
    out = rows.even(dtensors.local(flat)[chosen])
    shape = (rows.total, *flat.shape[1:])
    meta = dtensors.Meta(shape, strides(shape, torch.contiguous_format), input.dtype)
    return dtensors.wrap(out.contiguous(), input.device_mesh, rows.placements(flat.placements), meta)


def _write(name: str, input: DTensor, mask: DTensor, values: DTensor, accumulate: bool) -> DTensor:
    """``input`` with ``values``, the first of as many rows as the mask chooses, written where it is true, or added."""
    flat, placements, chosen, rows = _chosen(name, input, mask)
    wanted = rows.total, *flat.shape[1:]
    if values.shape[:1] != wanted[:1] and values.ndim == len(wanted) and values.shape[0] > rows.total:
        values = aten.slice(values, 0, 0, rows.total)
    if tuple(values.shape) != wanted:
        values = aten.expand(values, wanted)
    part = rows.ragged(dtensors.local(moved(values, rows.placements(flat.placements))))
    out = dtensors.local(flat).clone()
    out[chosen] = out[chosen] + part if accumulate else part.to(out.dtype)
    meta = dtensors.Meta(tuple(flat.shape), strides(flat.shape, torch.contiguous_format), input.dtype)
    whole = dtensors.wrap(out, input.device_mesh, flat.placements, meta)
    return relayout(whole, dtensors.Meta(tuple(input.shape), input.stride(), input.dtype), placements)


def _mask_of(tensor: Any, indices: Sequence[Any]) -> tuple[int, Any] | None:
    """The one mask among the indices, if there is nothing else, and the dim at which it begins."""
    found = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(found) != 1 or found[0][1].dtype not in (torch.bool, torch.uint8):
        return None
    dim, mask = found[0]
    given = [each for each in (tensor, mask) if isinstance(each, DTensor)]
    if not all(map(has_layout, given)) or not mask.ndim:
        return None
    for place, (size, wanted) in enumerate(zip_longest(mask.shape, tensor.shape[dim : dim + mask.ndim])):
        if size != wanted:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {place} does not match the shape of the indexed tensor "
                f"{list(tensor.shape)} at index {dim + place}"
            )
    return dim, mask


@handlers.wrap_handler(aten.index.Tensor)
def index(handler: handlers.Handler) -> handlers.Handler:
    """``x[mask]`` and ``x[:, mask]``."""

    def wrapper(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        found = _mask_of(*args)
        if found is None:
            return handler(op, args, kwargs)
        dim, mask = found
        mesh = dtensors.mesh_of(args[0], mask)
        input, mask = (dtensors.replicated(t, mesh) for t in (args[0], mask))
        out = _select("a mask as index", _to_front(input, dim, mask.ndim), aten.ne.Scalar(mask, 0))
        return aten.clone(aten.movedim.int(out, 0, dim), memory_format=torch.contiguous_format) if dim else out

    return wrapper


@handlers.wrap_handler(aten.index_put.default, aten.index_put_.default)
def index_put(handler: handlers.Handler) -> handlers.Handler:
    """``y[mask] = values``, and the gradient of ``x[mask]``."""

    def wrapper(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        input, indices, values, accumulate = handlers.bind(op, args, kwargs)
        found = _mask_of(input, indices)
        if found is None or (values.numel() == 1 and not accumulate):
            return handler(op, args, kwargs)
        dim, mask = found
        mesh = dtensors.mesh_of(input, mask, values)
        source, mask, values = (dtensors.replicated(t, mesh) for t in (input, mask, values))
        values = aten.movedim.int(values, dim, 0) if dim and values.ndim > dim else values
        out = _write("a mask as index", _to_front(source, dim, mask.ndim), aten.ne.Scalar(mask, 0), values, accumulate)
        out = aten.permute(out, _order(source.ndim, dim, mask.ndim, back=True)) if dim else out
        return aten.copy_(input, out) if op is aten.index_put_.default else out

    return wrapper


def _order(ndim: int, dim: int, dims: int, back: bool = False) -> list[int]:
    """The dims with those of a mask that begins at ``dim`` in front; or, back, where they were."""
    front = list(range(dim, dim + dims))
    order = front + [d for d in range(ndim) if d not in front]
    return [order.index(d) for d in range(ndim)] if back else order


def _to_front(input: DTensor, dim: int, dims: int) -> DTensor:
    return aten.permute(input, _order(input.ndim, dim, dims)) if dim else input


@handlers.register(aten.masked_select.default, traffic=TRAVELS, limits=TRACED)
def masked_select(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.masked_select``, whose tensors broadcast."""
    input, mask = _alike(op, *args)
    return _select("masked_select", input, mask)


def _alike(op: handlers.Op, input: torch.Tensor, mask: torch.Tensor) -> tuple[DTensor, DTensor]:
    """Two tensors that broadcast, of one shape and cut alike."""
    tensors = dtensors.as_dtensors(op.overloadpacket.__name__, self=input, mask=mask)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    tensors = tuple(t if t.shape == shape else aten.expand(t, shape) for t in map(redistribution.reduce_partial, tensors))
    placements = shared_placements(shape, tensors)
    first, second = (moved(t, placements) for t in tensors)
    return first, second


@handlers.register(aten.masked_scatter.default, aten.masked_scatter_.default, traffic=TRAVELS, limits=TRACED)
def masked_scatter(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.masked_scatter``, the gradient of ``masked_select``."""
    target = args[0]
    source = dtensors.replicated(args[2], dtensors.mesh_of(*args))
    input, mask = _alike(op, target, args[1])
    if process_groups.coordinate(input.device_mesh) is None:
        out = input
    else:
        out = _write("masked_scatter", input, mask, flattened(source, source.ndim, source.placements), accumulate=False)
    return aten.copy_(target, out) if op is aten.masked_scatter_.default else out


@handlers.register(aten.masked_scatter_backward.default, traffic=TRAVELS, limits=TRACED)
def masked_scatter_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.masked_scatter_backward``: the gradient of what was written, zeros for what was left over."""
    grad, mask, sizes = args
    found = aten.masked_select(grad, mask)
    return aten.view(aten.constant_pad_nd(found, [0, prod(sizes) - found.shape[0]]), sizes)


@handlers.register(aten.nonzero.default, traffic=TRAVELS.replace("what a", "that is not zero, what a"), limits=TRACED)
def nonzero(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.nonzero``: the coordinates of what is not zero, in the order of the whole tensor."""
    (input,) = args
    mesh, coordinate = input.device_mesh, process_groups.coordinate(input.device_mesh)
    if coordinate is None:
        raise NotImplementedError("nonzero: a rank outside of the mesh cannot know how many elements are not zero")
    input = redistribution.reduce_partial(input)
    flat = flattened(input, input.ndim, input.placements)
    start = layout(flat.shape, mesh, flat.placements).owned(coordinate).spans[0].start
    places = dtensors.local(flat).nonzero()[:, 0] + start
    axes = [axis for axis, p in enumerate(flat.placements) if isinstance(p, Shard)]
    rows = Rows.told("nonzero", len(places), places.device, mesh, axes)
    columns = []
    for size in reversed(input.shape):
        columns.append(places % size)
        places = places // size
    part = rows.even(torch.stack(columns[::-1], 1) if columns else places.new_empty(len(places), 0))
    shape = (rows.total, input.ndim)
    return dtensors.wrap(
        part, mesh, rows.placements(flat.placements), dtensors.Meta(shape, (max(1, input.ndim), 1), torch.int64)
    )
