"""Elements chosen by indices or a mask: ``table[i]``, ``x[:, [0, 2]]``, ``x[mask]``.

A rank reads for its own part of the indices, or its own part of the dims that are not indexed::

    table[i]    table replicated, i sharded     ->  the result sharded as i
    x[:, i]     x sharded along another dim     ->  the result sharded along that
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.broadcasting import aligned, shared_placements
from torchhalo.exchange.layout import has_layout
from torchhalo.exchange.memory import laid_out
from torchhalo.geometry.subscripts import Subscript
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution, simulation

aten = torch.ops.aten


def prepared(input: Any, given: Sequence[Any], *others: Any) -> tuple[DTensor, list[DTensor | None], list[DTensor]] | None:
    """The tensors of a call as DTensors, masks as indices; None where one is sharded in a way that torchhalo does not know."""
    mesh = dtensors.mesh_of(input, *given, *others)
    if not all(has_layout(t) for t in (input, *given, *others) if isinstance(t, DTensor)):
        return None
    indices: list[DTensor | None] = []
    for each in given:
        if each is None:
            indices.append(None)
            continue
        index = redistribution.reduce_partial(dtensors.replicated(each, mesh))
        if index.dtype not in (torch.bool, torch.uint8):
            indices.append(index)
            continue
        dim, shape = len(indices), list(input.shape)
        if list(index.shape) != shape[dim : dim + index.ndim]:
            place = next((d for d, size in enumerate(index.shape) if [size] != shape[dim + d : dim + d + 1]), 0)
            raise IndexError(
                f"The shape of the mask {list(index.shape)} at index {place} does not match the shape of the indexed tensor "
                f"{shape} at index {dim + place}"
            )
        indices += _places(index)
    if any(index is not None and index.ndim for index in indices):  # fake tensors forget the others behind one without dims
        indices = [aten.unsqueeze.default(t, 0) if t is not None and not t.ndim else t for t in indices]
    return dtensors.replicated(input, mesh), indices, [dtensors.replicated(t, mesh) for t in others]


def _places(mask: DTensor) -> list[DTensor]:
    """Where a mask is true, an index for each of its dims: how many there are is known only from all of it."""
    mesh, whole = mask.device_mesh, [Replicate()] * mask.device_mesh.ndim
    shard = dtensors.local(redistribution.redistribute(mask, whole, aten.nonzero.default))
    if process_groups.coordinate(mesh) is None:
        raise NotImplementedError("a mask as index: a rank outside of the mesh cannot know the shape of the result")
    found = simulation.per_rank(lambda shard: shard.nonzero().unbind(1), shard)
    return [dtensors.wrap(index, mesh, whole, dtensors.meta(index)) for index in found]


@handlers.register(
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    traffic="nothing along dims that are not indexed, and for a table that is whole; the result is sharded as the indices",
    limits="plain indices are taken as replicated; an indexed dim that is cut is gathered, and so is a mask",
)
def index(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.index``, ``x[:, [0, 2]]`` and ``table[i]``."""
    found = prepared(*args)
    if found is None:
        return handlers.stock(op, args, kwargs)
    input, indices, _ = found
    return _read(input, indices)


def _read(input: DTensor, indices: Sequence[DTensor | None]) -> DTensor:
    (result,) = fake_tensors.plain_result(aten.index.Tensor, input, list(indices))
    subscript = subscript_of(input, indices)

    def kernel(shard: torch.Tensor, *found: torch.Tensor) -> torch.Tensor:
        return aten.index.Tensor(shard, filled(subscript, found))

    return read(aten.index.Tensor, input, indices, result, kernel)


def read(
    op: handlers.Op,
    input: DTensor,
    indices: Sequence[DTensor | None],
    result: dtensors.Meta,
    kernel: Callable[..., torch.Tensor],
) -> DTensor:
    """What ``kernel`` reads, of the rank's part of ``input`` and of each of the indices."""
    subscript, mesh = subscript_of(input, indices), input.device_mesh
    named = shared_placements(subscript.points, [index for index in indices if index is not None])
    wanted: list[Placement] = []
    cut: list[Placement] = []
    placements: list[Placement] = []
    for held, name in zip(input.placements, named, strict=True):
        stays = held.is_partial() or (isinstance(held, Shard) and held.dim not in subscript.dims)
        wanted.append(held if stays else Replicate())
        cut.append(Replicate() if stays else name)
        if isinstance(held, Shard) and stays:
            placements.append(Shard(subscript.in_result(held.dim)))
        else:
            placements.append(held if stays else Shard(name.dim + subscript.start) if isinstance(name, Shard) else name)
    if done := dtensors.non_member_result(input, [result], [placements]):
        return done[0]
    shard = dtensors.local(redistribution.redistribute(input, wanted, op))
    out = simulation.per_rank(kernel, shard, *cut_indices(indices, cut, subscript))
    return dtensors.wrap(laid_out(out, result), mesh, placements, result)


def cut_indices(indices: Sequence[DTensor | None], placements: Sequence[Placement], subscript: Subscript) -> list[torch.Tensor]:
    """This rank's part of each index, if the points are cut by ``placements``."""
    return [dtensors.local(aligned(index, placements, subscript.points)) for index in indices if index is not None]


def filled(subscript: Subscript, found: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The indices as torch takes them, with None for each dim that is not indexed."""
    each = iter(found)
    return [next(each) if dim in subscript.dims else None for dim in range(subscript.dims[-1] + 1)]


def subscript_of(input: DTensor, indices: Sequence[DTensor | None]) -> Subscript:
    """Which dims of ``input`` the indices index."""
    return Subscript.of(input.shape, [None if index is None else index.shape for index in indices])


@handlers.register(aten.index_select.default, traffic="as index")
def index_select(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.index_select``: ``x[:, i]``."""
    input, dim, given = handlers.bind(op, args, kwargs)
    found = prepared(input, [given]) if input.ndim else None
    if found is None:
        return handlers.stock(op, args, kwargs)
    fake_tensors.plain_result(op, found[0], dim, found[1][0])
    return _read(found[0], along(found[0], dim, found[1][0]))


def along(input: DTensor, dim: int, index: DTensor | None) -> list[DTensor | None]:
    """Indices that index ``dim`` alone."""
    assert index is not None
    return [*[None] * (dim % input.ndim), index if index.ndim else aten.unsqueeze.default(index, 0)]


@handlers.register(aten.take.default, traffic="that of a view with one dim, then as index")
def take(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.take``: ``x.flatten()[i]``."""
    return aten.index.Tensor(aten.reshape.default(args[0], [-1]), [args[1]])


# Masks.


@handlers.register(
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    traffic="nothing, or the mask, where it is sharded otherwise",
)
def masked_fill(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.masked_fill`` and ``aten.masked_fill_``."""
    input, mask, value = args
    # Zeros may be filled into summands: label smoothing drops what is ignored so.
    summands = isinstance(input, DTensor) and redistribution.is_partial(input)
    if (
        not isinstance(input, DTensor)
        or not has_layout(input)
        or (summands and (isinstance(value, torch.Tensor) or value != 0))
    ):
        return handlers.stock(op, args, kwargs)
    mask, given = dtensors.as_dtensors("masked_fill", self=input, mask=mask, value=_number(value, input))[1:]
    (result,) = fake_tensors.plain_result(op, input, mask, value if given is None else given)
    if result.shape != tuple(input.shape):
        return handlers.stock(op, args, kwargs)
    shards = [dtensors.local(input), dtensors.local(aligned(mask, input.placements, result.shape))]
    if process_groups.coordinate(input.device_mesh) is not None:
        shards[0] = op(*shards, value if given is None else dtensors.local(redistribution.whole(given)))
    in_place = op in (aten.masked_fill_.Scalar, aten.masked_fill_.Tensor)
    return input if in_place else dtensors.wrap(shards[0], input.device_mesh, input.placements, result)


def _number(value: Any, input: DTensor) -> DTensor | None:
    """A value that is a tensor, which has one element and so may be a plain one."""
    return dtensors.replicated(value, input.device_mesh) if isinstance(value, torch.Tensor) else None
