"""Run an exchange, the one collective that brings the halos, and its fold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchhalo.exchange.assembly import as_grid, common, empty, resized
from torchhalo.exchange.plan import Exchange, Index, Order, Plan, index
from torchhalo.geometry import Box
from torchhalo.torch_internals import collectives, process_groups, simulation, watching
from torchhalo.torch_internals.tracing import depend_on


def start(shard: torch.Tensor, exchange: Exchange, mesh: DeviceMesh, order: Order = None) -> torch.Tensor | None:
    """Send every rank its halo.

    Forward: each box that another rank needs goes to it, once. Adjoint: `fold`, which also undoes `assemble`.

    Args:
        order: In which the dims lie in memory on all ranks, the outermost first; a box travels in that order.

    Returns:
        The halo as one flat buffer, for `received`, or None if no rank needs any.
    """
    if not exchange.needed():
        return None
    group, places = process_groups.submesh_group(mesh, exchange.axes)

    def pack(shard: torch.Tensor, *coordinate: int) -> tuple[Any, ...]:
        plan = exchange.plan(coordinate, places)
        counts = _counts(exchange, shard.shape, plan.sent + plan.received)
        return _packed([shard[cut] for cut in _cuts(exchange, plan)], shard, order), *counts

    packed, *counts = simulation.per_rank(pack, shard, *own_coordinate(mesh))
    return collectives.all_to_all(packed, counts[len(places) :], counts[: len(places)], group, exchange)


@lru_cache(maxsize=1024)
def _cuts(exchange: Exchange, plan: Plan) -> list[Index]:
    """Where in its shard a rank finds what it sends."""
    return [index(exchange, box, plan.owned) for box in plan.sends]


def fold(
    edge: Callable[..., tuple[list[torch.Tensor], torch.Tensor]],
    rest: Callable[..., torch.Tensor],
    exchange: Exchange,
    mesh: DeviceMesh,
    *tensors: torch.Tensor | None,
    order: Order = None,
) -> torch.Tensor:
    """The adjoint of `start` and `assemble`: what was received is sent back and added where it came from.

    What goes back is worked out first, and the rest while it travels.

    Args:
        edge: Called with a rank's plan, its coordinate and ``tensors``; it returns a value for each element that was received,
            as a tensor for each of ``plan.receives``, and one more tensor.
        rest: Called with the plan, the coordinate, that one more tensor and ``tensors``; it returns a value for each element of
            the shard, in memory that may be written to.

    Example:
        Of ``region``, a value for each element of ``plan.needs``::

            edge = lambda plan, coordinate, region: (cut_back(region, exchange, plan, exact=False), region)
            rest = lambda plan, coordinate, kept, region: cut_own(region, exchange, plan, exact=False)
            shard = fold(edge, rest, exchange, mesh, region)
    """
    coordinate = own_coordinate(mesh)

    def alone(tensors: Sequence[torch.Tensor], coordinate: tuple[int, ...]) -> torch.Tensor:
        plan = exchange.plan(coordinate)
        return rest(plan, coordinate, edge(plan, coordinate, *tensors)[1], *tensors)

    if not exchange.needed():
        return simulation.per_rank(alone, tensors, coordinate)
    group, places = process_groups.submesh_group(mesh, exchange.axes)

    def pack(tensors: Sequence[torch.Tensor], coordinate: tuple[int, ...]) -> tuple[Any, ...]:
        plan = exchange.plan(coordinate, places)
        pieces, kept = edge(plan, coordinate, *tensors)
        counts = _counts(exchange, exchange.source.owned(coordinate).shape, plan.received + plan.sent)
        return kept, _packed(pieces, tensors[0], order), *counts

    def add(
        kept: torch.Tensor, back: torch.Tensor, tensors: Sequence[torch.Tensor], coordinate: tuple[int, ...]
    ) -> torch.Tensor:
        plan = exchange.plan(coordinate, places)
        out = rest(plan, coordinate, kept, *tensors)
        back = collectives.wait(back)
        for box, values in zip(plan.sends, _unpacked(back, out, exchange, plan.sends, order), strict=True):
            out[index(exchange, box, plan.owned)].add_(values)  # `+=` also asks for a copy onto itself
        return out if back.numel() else depend_on(out, back)

    kept, packed, *counts = simulation.per_rank(pack, tensors, coordinate)
    back = collectives.all_to_all(packed, counts[len(places) :], counts[: len(places)], group)
    return simulation.per_rank(add, kept, back, tensors, coordinate)


def cut_back(region: torch.Tensor, exchange: Exchange, plan: Plan, exact: bool) -> list[torch.Tensor]:
    """Of a value for each element of ``plan.needs``, or of ``plan.exact``, those for what was received."""
    return [region[index(exchange, box, plan.exact if exact else plan.needs)] for box in plan.receives]


def cut_own(region: torch.Tensor, exchange: Exchange, plan: Plan, exact: bool) -> torch.Tensor:
    """Of the same those for the shard, zeros where it has none; a copy where something is to be added."""
    frame = plan.exact if exact else plan.needs
    if not exchange.needed() and frame in (plan.owned, as_grid(plan.owned)):
        return region
    out = empty(region, resized(region.shape, exchange.dims, plan.owned.shape))
    found = common(plan.owned, frame)
    if sum(own.size for own in found) < plan.owned.size:
        out.zero_()
    for own in found:
        out[index(exchange, own, plan.owned)] = region[index(exchange, own, frame)]
    return out


class _Counter(watching.Watcher):
    def __init__(self) -> None:
        self.bytes: list[int] = []

    def collective(self, each: watching.Collective) -> None:
        if each.kind == "all_to_all":
            self.bytes.append(sum(each.sent) * each.tensor.element_size())


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many bytes this rank sends in each exchange inside, in a list that grows.

    Example:
        >>> with counted() as sent:
        ...     pass  # train a step here, then ``sum(sent)``
    """
    counter = _Counter()
    with watching.watched_by(counter):
        yield counter.bytes


def group_places(exchange: Exchange, mesh: DeviceMesh) -> tuple[int, ...] | None:
    """What `Exchange.plan` wants to know of the process group; None where nothing travels."""
    return process_groups.submesh_positions(mesh, exchange.axes) if exchange.needed() else None


def _packed(pieces: list[torch.Tensor], cause: torch.Tensor, order: Order) -> torch.Tensor:
    """The pieces one behind another in a flat buffer, each in the order of memory; made of ``cause``."""
    if not pieces:
        return depend_on(cause.new_empty(0), cause)
    if order is not None:
        pieces = [piece.permute(order) for piece in pieces]
    if any(piece.shape[1:] != pieces[0].shape[1:] for piece in pieces):
        pieces = [piece.reshape(-1) for piece in pieces]
    return depend_on(torch.cat(pieces).reshape(-1), cause)


def received(
    halo: torch.Tensor | None, shard: torch.Tensor, exchange: Exchange, plan: Plan, order: Order = None
) -> list[torch.Tensor]:
    """What `start` brought, when it has come: one tensor for each of ``plan.receives``."""
    return [] if halo is None else _unpacked(collectives.wait(halo), shard, exchange, plan.receives, order)


def _unpacked(
    flat: torch.Tensor, like: torch.Tensor, exchange: Exchange, boxes: tuple[Box, ...], order: Order
) -> list[torch.Tensor]:
    """The boxes in a flat buffer, as views of it."""
    if not boxes:
        return []
    sizes, shapes, back = _shapes(tuple(map(int, like.shape)), exchange.dims, boxes, order)
    views = [piece.view(shape) for piece, shape in zip(flat.split_with_sizes(sizes), shapes, strict=True)]
    return views if order is None else [view.permute(back) for view in views]


@lru_cache(maxsize=1024)
def _shapes(
    shape: tuple[int, ...], dims: tuple[int, ...], boxes: tuple[Box, ...], order: Order
) -> tuple[list[int], list[list[int]], list[int]]:
    """The sizes of boxes in a flat buffer, their shapes in the order of memory, and the way back from that."""
    inner = order or tuple(range(len(shape)))
    shapes = [resized(shape, dims, box.shape) for box in boxes]
    return (
        list(map(prod, shapes)),
        [[each[dim] for dim in inner] for each in shapes],
        [inner.index(d) for d in range(len(shape))],
    )


def own_coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    coordinate = process_groups.coordinate(mesh)
    assert coordinate is not None, "a rank outside the mesh has no part in an exchange"
    return coordinate


def _counts(exchange: Exchange, shape: Sequence[int], boxes: Iterable[int]) -> list[int]:
    """How many elements of a tensor boxes of so many coordinates along the exchange's dims are."""
    each = prod(size for dim, size in enumerate(shape) if dim not in exchange.dims)
    return [each * count for count in boxes]
