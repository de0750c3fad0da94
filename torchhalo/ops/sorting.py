"""Sort and topk along a sharded dim: each rank sorts its own part, and the ranks merge what they have.

Neighbours merge their parts in turn, as often as there are ranks: the lower one keeps the first half, the other one the rest.
No rank ever holds more than two parts, and equal elements never overtake each other::

    3 1 | 2 0 | 1 1   ->   1 3 | 0 2 | 1 1   ->   0 1 | 2 3 | 1 1   ->   0 1 | 1 1 | 2 3   ->   0 1 | 1 1 | 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan, prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchhalo.exchange.layout import layout
from torchhalo.exchange.memory import laid_out
from torchhalo.geometry import Span
from torchhalo.torch_internals import collectives, dtensors, fake_tensors, handlers, process_groups, redistribution, simulation

aten = torch.ops.aten


@handlers.register(
    aten.sort.default,
    aten.sort.stable,
    traffic="nothing along a dim that is not sharded; else a part and its indices to a neighbour, as often as there are ranks",
    limits="a dim that several axes cut unevenly is gathered",
)
def sort(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.sort``, which is stable along a sharded dim; the result is sharded as the input."""
    results = fake_tensors.plain_result(op, *args, **kwargs)
    given = handlers.named(op, args, kwargs)
    input, descending = given["self"], given.get("descending", False)
    if not isinstance(input, DTensor) or not input.ndim:
        return handlers.stock(op, args, kwargs)
    dim = given.get("dim", -1) % input.ndim
    input = redistribution.reduce_partial(input)
    whole = layout(input.shape, input.device_mesh, input.placements)
    parts = whole.parts(dim)
    if not whole.cuts[dim] or list(parts) != _chunks(input.shape[dim], len(parts)):
        return handlers.stock(op, args, kwargs)
    mesh, coordinate = input.device_mesh, process_groups.coordinate(input.device_mesh)
    if done := dtensors.non_member_result(input, results, [input.placements] * 2):
        return done
    block, filled = parts[0].size, sum(part.size > 0 for part in parts)
    group, places = process_groups.submesh_group(mesh, whole.cuts[dim])

    def ordered(values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, order = values.sort(dim=dim, descending=descending, stable=True)
        return values, indices.gather(dim, order)

    def first(shard: torch.Tensor, coordinate: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        part = parts[whole.part(dim, coordinate)]
        line = torch.arange(part.start, part.start + block, device=shard.device)
        indices = line.view([-1 if each == dim else 1 for each in range(shard.ndim)])
        missing = [block - part.size if each == dim else size for each, size in enumerate(shard.shape)]
        values = torch.cat([shard, shard.new_full(missing, _last(shard.dtype, descending))], dim)
        return ordered(values, indices.expand(values.shape).contiguous())

    def pack(values: torch.Tensor, indices: torch.Tensor, coordinate: tuple[int, ...], turn: int) -> tuple[Any, ...]:
        neighbour = _neighbour(whole.part(dim, coordinate), turn, filled)
        counts = [0] * len(places)
        if neighbour is None:
            return values.new_empty(0, dtype=torch.uint8), *counts
        # The wider dtype first, as it must be aligned.
        packed = torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in (indices, values)])
        counts[places[neighbour]] = packed.numel()
        return packed, *counts

    def merge(
        values: torch.Tensor, indices: torch.Tensor, arrived: torch.Tensor, coordinate: tuple[int, ...], turn: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, arrived = whole.part(dim, coordinate), collectives.wait(arrived)
        neighbour = _neighbour(own, turn, filled)
        if neighbour is None:
            return values, indices
        pieces = arrived.split([indices.numel() * 8, values.numel() * values.element_size()])
        theirs = pieces[1].clone().view(values.dtype).view(values.shape), pieces[0].view(torch.int64).view(indices.shape)
        pairs = zip((values, indices), theirs, strict=True)
        both = ordered(*(torch.cat(pair if own < neighbour else pair[::-1], dim) for pair in pairs))
        values, indices = (each.narrow(dim, 0 if own < neighbour else block, block) for each in both)
        return values, indices

    def crop(values: torch.Tensor, indices: torch.Tensor, coordinate: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        size = parts[whole.part(dim, coordinate)].size
        pairs = zip((values, indices), results, strict=True)
        return tuple(laid_out(each.narrow(dim, 0, size), result) for each, result in pairs)

    found = simulation.per_rank(first, dtensors.local(input), coordinate)
    for turn in range(filled if filled > 2 else filled - 1):
        packed, *counts = simulation.per_rank(pack, *found, coordinate, turn)
        arrived = collectives.all_to_all(packed, counts, counts, group)
        found = simulation.per_rank(merge, *found, arrived, coordinate, turn)
    shards = simulation.per_rank(crop, *found, coordinate)
    return tuple(dtensors.wrap(shard, mesh, input.placements, result) for shard, result in zip(shards, results, strict=True))


def _chunks(size: int, count: int) -> list[Span]:
    each = -(-size // count)
    return [Span(min(size, each * place), min(size, each * (place + 1))) for place in range(count)]


def _neighbour(own: int, turn: int, count: int) -> int | None:
    """The part that one of ``count`` parts is merged with.

    >>> [_neighbour(own, turn=1, count=4) for own in range(4)]
    [None, 2, 1, None]
    """
    other = own + 1 if own % 2 == turn % 2 else own - 1
    return other if own < count and 0 <= other < count else None


def _last(dtype: torch.dtype, descending: bool) -> float | bool:
    """What no element comes after; equal ones that are there already stay before it."""
    if dtype.is_floating_point:
        return -inf if descending else nan
    if dtype == torch.bool:
        return not descending
    return torch.iinfo(dtype).min if descending else torch.iinfo(dtype).max


@handlers.register(
    aten.topk.default,
    traffic="nothing along a dim that is not sharded; else at most `k` candidates of every rank, with their indices, to all",
)
def topk(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.topk``: of each rank's own, and then of these; along a sharded dim all ranks have the result."""
    results = fake_tensors.plain_result(op, *args, **kwargs)
    input, k, dim, largest, in_order = handlers.bind(op, args, kwargs)
    if not isinstance(input, DTensor) or not input.ndim:
        return handlers.stock(op, args, kwargs)
    dim, mesh = dim % input.ndim, input.device_mesh
    input = redistribution.reduce_partial(input)
    whole = layout(input.shape, mesh, input.placements)
    placements = [Replicate() if axis in whole.cuts[dim] else p for axis, p in enumerate(input.placements)]
    if done := dtensors.non_member_result(input, results, [placements] * 2):
        return done
    parts, coordinate = whole.parts(dim), process_groups.coordinate(mesh)
    counts = [min(k, part.size) for part in parts]
    most = max(counts)

    def candidates(shard: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
        place = whole.part(dim, coordinate)
        values, indices = shard.topk(counts[place], dim, largest, False)
        missing = [most - counts[place] if each == dim else size for each, size in enumerate(shard.shape)]
        columns = indices + parts[place].start, values
        filled = [torch.cat([column, column.new_zeros(missing)], dim) for column in columns]
        return torch.cat([column.contiguous().view(-1).view(torch.uint8) for column in filled])

    def alone(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = shard.topk(k, dim, largest, in_order)
        return tuple(laid_out(each, result) for each, result in zip(found, results, strict=True))

    def best(rows: torch.Tensor, shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shape = [most if each == dim else size for each, size in enumerate(shard.shape)]
        columns = rows.split([prod(shape) * 8, prod(shape) * shard.element_size()], 1)
        indices, values = (
            _joined(column.contiguous().view(-1).view(dtype).view(len(rows), *shape), counts, dim)
            for column, dtype in zip(columns, (torch.int64, shard.dtype), strict=True)
        )
        values, order = values.topk(k, dim, largest, in_order)
        found = zip((values, indices.gather(dim, order)), results, strict=True)
        return tuple(laid_out(each, result) for each, result in found)

    shard = dtensors.local(input)
    if whole.cuts[dim]:
        rows = collectives.all_gather(simulation.per_rank(candidates, shard, coordinate), mesh, whole.cuts[dim])
        found = simulation.per_rank(best, rows, shard)
    else:
        found = simulation.per_rank(alone, shard)
    return tuple(dtensors.wrap(each, mesh, placements, result) for each, result in zip(found, results, strict=True))


def _joined(rows: torch.Tensor, counts: Sequence[int], dim: int) -> torch.Tensor:
    """The first ``counts`` of each row, one after the other."""
    return torch.cat([row.narrow(dim, 0, count) for row, count in zip(rows, counts, strict=True)], dim)
