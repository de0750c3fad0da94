"""Plan and run an exchange, the one collective that brings the halos, and its fold.

    needs(rank)    = window.reads(owned_output(rank)), clipped to the tensor
    message q -> r = needs(r) ∩ owned_input(q)

Both sides work out the same boxes from global shapes alone, so no sizes are negotiated, and a rank looks only at the parts
that its own needs and its own shard reach.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchhalo import dispatch
from torchhalo.geometry import Box, Grid, Relation, Span, boxes, hull
from torchhalo.layout import Layout

Order = tuple[int, ...] | None
Index = tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class Exchange:
    """What every rank knows: how source and target are cut, and what a span of the target reads along each of ``dims``.

    Attributes:
        source: Layout of the tensor that the ranks hold.
        target: Layout of the tensor that they compute from it; cut by the same axes along each of ``dims``.
        dims: The dims along which halos may travel.
        windows: One per dim of ``dims``.
    """

    source: Layout
    target: Layout
    dims: tuple[int, ...]
    windows: tuple[Relation, ...]

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes over which the halos travel, flattened into one."""
        return tuple(sorted(axis for dim in self.dims for axis in self.source.cuts[dim]))

    def needed(self) -> bool:
        """Whether any rank needs what it does not own; where none does, nothing is sent."""
        return self._needed

    @cached_property
    def _needed(self) -> bool:
        lines = _lines(self)
        everyone = [range(len(line.target)) for line in lines]
        wanting = all(any(line.needs(part) for part in parts) for line, parts in zip(lines, everyone, strict=True))
        return wanting and any(line.lacks(part) for line, parts in zip(lines, everyone, strict=True) for part in parts)

    def needs(self, part: Box) -> Box:
        """The smallest box over ``dims`` that holds all that ``part`` of the target reads."""
        spans = zip(self.dims, self.windows, part.spans, strict=True)
        return Box(tuple(hull(_overlap(w.reads(span), Span(0, self.source.shape[dim]))) for dim, w, span in spans))

    def plan(self, coordinate: Sequence[int], places: tuple[int, ...] | None = None) -> Plan:
        """What the rank at ``coordinate`` sends and receives.

        Args:
            coordinate: The rank's place in the mesh.
            places: The position in the process group of each row-major index over ``axes``; the index itself if not given.
        """
        return _plan(self, tuple(coordinate), places)


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank sends and receives, as boxes over the exchange's dims, in the order of the buffers.

    Attributes:
        owned: What the rank holds.
        exact: All it needs and nothing else.
        needs: The smallest box that holds that.
        sends, receives: The boxes on the wire.
        sent, received: How many elements go to, and come from, each member of the group.
        recipes: Those that were asked for so far.
    """

    owned: Box
    exact: Grid
    needs: Box
    sends: tuple[Box, ...]
    receives: tuple[Box, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    recipes: dict[Box | Grid, Recipe] = field(default_factory=dict)


class _Line(NamedTuple):
    """One dim of an exchange."""

    source: tuple[Span, ...]
    target: tuple[Span, ...]
    size: int
    window: Relation

    def needs(self, part: int) -> tuple[Span, ...]:
        return _overlap(self.window.reads(self.target[part]), Span(0, self.size))

    def lacks(self, part: int) -> bool:
        reach = self.window.reach(self.target[part]) & Span(0, self.size)
        return not self.source[part].contains(reach) and not self.source[part].contains(hull(self.needs(part)))


def _lines(exchange: Exchange) -> list[_Line]:
    source, target = exchange.source, exchange.target
    return [
        _Line(source.parts(dim), target.parts(dim), source.shape[dim], window)
        for dim, window in zip(exchange.dims, exchange.windows, strict=True)
    ]


def _overlap(runs: Iterable[Span], span: Span) -> tuple[Span, ...]:
    return tuple(run & span for run in runs if (run & span).size)


def _meeting(parts: tuple[Span, ...], span: Span) -> range:
    """The indices of the parts, which are in ascending order, that may intersect ``span``."""
    first = bisect_right(parts, span.start, key=lambda part: part.stop)
    return range(first, bisect_left(parts, span.stop, key=lambda part: part.start))


@lru_cache(maxsize=1024)
def _plan(exchange: Exchange, coordinate: tuple[int, ...], places: tuple[int, ...] | None) -> Plan:
    lines = _lines(exchange)
    here = tuple(exchange.source.part(dim, coordinate) for dim in exchange.dims)
    owned = tuple(line.source[part] for line, part in zip(lines, here, strict=True))
    needs = [line.needs(part) for line, part in zip(lines, here, strict=True)]
    receives, received = _messages(
        exchange,
        places,
        here,
        [
            {q: _overlap(runs, line.source[q]) for q in _meeting(line.source, hull(runs))}
            for line, runs in zip(lines, needs, strict=True)
        ],
    )
    sends, sent = _messages(
        exchange,
        places,
        here,
        [
            {q: _overlap(line.needs(q), own) for q in _meeting(line.target, hull(line.window.touches(own)))}
            for line, own in zip(lines, owned, strict=True)
        ],
    )
    return Plan(Box(owned), Grid(tuple(needs)), Box(tuple(map(hull, needs))), sends, receives, sent, received)


def _messages(
    exchange: Exchange, places: tuple[int, ...] | None, here: tuple[int, ...], lines: list[dict[int, tuple[Span, ...]]]
) -> tuple[tuple[Box, ...], tuple[int, ...]]:
    """All boxes in the order of the group, and how many elements they hold for each of its members."""
    messages: dict[int, tuple[Box, ...]] = {}
    for parts in product(*lines):
        if parts != here:
            peer = _peer(exchange, parts)
            place = peer if places is None else places[peer]
            messages[place] = boxes(line[part] for line, part in zip(lines, parts, strict=True))
    counts = [0] * prod(exchange.source.mesh_shape[axis] for axis in exchange.axes)
    for place, pieces in messages.items():
        counts[place] = sum(box.size for box in pieces)
    return tuple(box for place in sorted(messages) for box in messages[place]), tuple(counts)


def _peer(exchange: Exchange, parts: tuple[int, ...]) -> int:
    """The row-major index over ``exchange.axes`` of the rank that owns ``parts``."""
    source, place = exchange.source, {}
    for dim, part in zip(exchange.dims, parts, strict=True):
        for axis in reversed(source.cuts[dim]):
            part, place[axis] = divmod(part, source.mesh_shape[axis])
    index = 0
    for axis in exchange.axes:
        index = index * source.mesh_shape[axis] + place[axis]
    return index


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
    group, places = dispatch.fiber_group(mesh, exchange.axes)

    def pack(shard: torch.Tensor, *coordinate: int) -> tuple[Any, ...]:
        plan = exchange.plan(coordinate, places)
        counts = _counts(exchange, shard.shape, plan.sent + plan.received)
        return _packed([shard[cut] for cut in _cuts(exchange, plan)], shard, order), *counts

    packed, *counts = dispatch.per_rank(pack, shard, *_here(mesh))
    return dispatch.all_to_all(packed, counts[len(places) :], counts[: len(places)], group, exchange)


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
    here = _here(mesh)

    def alone(tensors: Sequence[torch.Tensor], coordinate: tuple[int, ...]) -> torch.Tensor:
        plan = exchange.plan(coordinate)
        return rest(plan, coordinate, edge(plan, coordinate, *tensors)[1], *tensors)

    if not exchange.needed():
        return dispatch.per_rank(alone, tensors, here)
    group, places = dispatch.fiber_group(mesh, exchange.axes)

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
        back = dispatch.wait(back)
        for box, values in zip(plan.sends, _unpacked(back, out, exchange, plan.sends, order), strict=True):
            out[index(exchange, box, plan.owned)] += values
        return out if back.numel() else anchor(out, back)

    kept, packed, *counts = dispatch.per_rank(pack, tensors, here)
    back = dispatch.all_to_all(packed, counts[len(places) :], counts[: len(places)], group)
    return dispatch.per_rank(add, kept, back, tensors, here)


def cut_back(region: torch.Tensor, exchange: Exchange, plan: Plan, exact: bool) -> list[torch.Tensor]:
    """Of a value for each element of ``plan.needs``, or of ``plan.exact``, those for what was received."""
    return [region[index(exchange, box, plan.exact if exact else plan.needs)] for box in plan.receives]


def cut_own(region: torch.Tensor, exchange: Exchange, plan: Plan, exact: bool) -> torch.Tensor:
    """Of the same those for the shard, zeros where it has none; a copy where something is to be added."""
    frame = plan.exact if exact else plan.needs
    if not exchange.needed() and frame in (plan.owned, _grid(plan.owned)):
        return region
    out = empty(region, resized(region.shape, exchange.dims, plan.owned.shape)).zero_()
    for own in _common(plan.owned, frame):
        out[index(exchange, own, plan.owned)] = region[index(exchange, own, frame)]
    return out


class _Counter(dispatch.Watcher):
    def __init__(self) -> None:
        self.bytes: list[int] = []

    def collective(self, each: dispatch.Collective) -> None:
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
    with dispatch.watched_by(counter):
        yield counter.bytes


def group_places(exchange: Exchange, mesh: DeviceMesh) -> tuple[int, ...] | None:
    """What `Exchange.plan` wants to know of the process group; None where nothing travels."""
    return dispatch.fiber_places(mesh, exchange.axes) if exchange.needed() else None


def _packed(pieces: list[torch.Tensor], cause: torch.Tensor, order: Order) -> torch.Tensor:
    """The pieces one behind another in a flat buffer, each in the order of memory; made of ``cause``."""
    if not pieces:
        return anchor(cause.new_empty(0), cause)
    if order is not None:
        pieces = [piece.permute(order) for piece in pieces]
    if any(piece.shape[1:] != pieces[0].shape[1:] for piece in pieces):
        pieces = [piece.reshape(-1) for piece in pieces]
    return anchor(torch.cat(pieces).reshape(-1), cause)


class Recipe(NamedTuple):
    """How a region is put together from a shard and the pieces that a rank received.

    Attributes:
        region: The sizes along the exchange's dims.
        own: Where in the region, and where in the shard, what the rank has itself.
        landed: For each piece that meets the region, where in the region, its number, and which part of it.
        untouched: Whether the region is the shard.
        whole: Whether the parts are all of the region.
        line: The dim along which the parts, all of them whole, stand one behind another, if they do: own ones as their place in
            the shard, others as the number of the piece.
    """

    region: tuple[int, ...]
    own: tuple[tuple[Index, Index], ...]
    landed: tuple[tuple[Index, int, Index | None], ...]
    untouched: bool
    whole: bool
    line: tuple[int, tuple[Index | int, ...]] | None


def recipe(exchange: Exchange, plan: Plan, region: Box | Grid) -> Recipe:
    """How to put together ``region``: ``plan.exact``, or a box, which may reach beyond the tensor."""
    if region not in plan.recipes:
        plan.recipes[region] = _recipe(exchange, plan, region)
    return plan.recipes[region]


def _recipe(exchange: Exchange, plan: Plan, region: Box | Grid) -> Recipe:
    kept = _common(plan.owned, region)
    landed = [(number, box, _shared(box, region)) for number, box in enumerate(plan.receives)]
    landed = [(number, box, part) for number, box, part in landed if part.size]
    parts = [*kept, *(part for _, _, part in landed)]
    whole = sum(box.size for box in parts) == region.size
    return Recipe(
        region.shape,
        tuple((index(exchange, box, region), index(exchange, box, plan.owned)) for box in kept),
        tuple(
            (index(exchange, part, region), number, None if part == box else index(exchange, part, _grid(box)))
            for number, box, part in landed
        ),
        region == plan.owned and not landed,
        whole,
        _line(exchange, plan, region, kept, landed) if whole and isinstance(region, Box) else None,
    )


def _line(
    exchange: Exchange, plan: Plan, region: Box, kept: Sequence[Box], landed: Sequence[tuple[int, Box, Box]]
) -> tuple[int, tuple[Index | int, ...]] | None:
    parts: list[tuple[Box, Index | int]] = [(box, index(exchange, box, plan.owned)) for box in kept]
    parts += [(part, number) for number, box, part in landed if part == box]
    if not parts or len(parts) < len(kept) + len(landed):
        return None
    for at, dim in enumerate(exchange.dims):
        if any(box.spans[at].step > 1 for box, _ in parts):
            continue
        if all(box.spans[:at] + box.spans[at + 1 :] == region.spans[:at] + region.spans[at + 1 :] for box, _ in parts):
            return dim, tuple(part for _, part in sorted(parts, key=lambda part: part[0].spans[at].start))
    return None


def assemble(
    shard: torch.Tensor,
    pieces: Sequence[torch.Tensor],
    dims: Sequence[int],
    recipe: Recipe,
    fill: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A region, from the shard and what `received` gave, on one rank.

    Args:
        dims: The exchange's.
        fill: The value of what lies outside the tensor, or is not needed.
        out: Where to put it; if not given, in a new tensor, or, where the region is the shard, nowhere.
    """
    if recipe.untouched and out is None:
        return shard
    if recipe.line is not None:
        dim, parts = recipe.line
        return torch.cat([part_of(shard, pieces, part) for part in parts], dim, out=out)
    if out is None:
        out = empty(shard, resized(shard.shape, dims, recipe.region))
    if not recipe.whole:
        out.fill_(fill)
    for target, source in recipe.own:
        out[target].copy_(shard[source])
    for target, number, cut in recipe.landed:
        out[target].copy_(pieces[number] if cut is None else pieces[number][cut])
    return out


def part_of(shard: torch.Tensor, pieces: Sequence[torch.Tensor], part: Index | int) -> torch.Tensor:
    """A part that `Recipe.line` names."""
    return pieces[part] if isinstance(part, int) else shard[part]


def resized(shape: Sequence[int], dims: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """``shape`` with other sizes along ``dims``."""
    out = list(shape)
    for dim, size in zip(dims, sizes, strict=True):
        out[dim] = size
    return out


def received(
    halo: torch.Tensor | None, shard: torch.Tensor, exchange: Exchange, plan: Plan, order: Order = None
) -> list[torch.Tensor]:
    """What `start` brought, when it has come: one tensor for each of ``plan.receives``."""
    return [] if halo is None else _unpacked(dispatch.wait(halo), shard, exchange, plan.receives, order)


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


def _common(owned: Box, region: Box | Grid) -> tuple[Box, ...]:
    """What a rank has itself of a region."""
    if isinstance(region, Grid):
        return boxes(_overlap(runs, span) for runs, span in zip(region.runs, owned.spans, strict=True))
    own = owned & region
    return (own,) if own.size else ()


def _grid(box: Box) -> Grid:
    return Grid(tuple((span,) for span in box.spans))


def _shared(box: Box, region: Box | Grid) -> Box:
    """What of ``box`` lies in the region; a grid holds all that a rank receives."""
    return box if isinstance(region, Grid) else box & region


def _here(mesh: DeviceMesh) -> tuple[int, ...]:
    coordinate = dispatch.coordinate(mesh)
    assert coordinate is not None, "a rank outside the mesh has no part in an exchange"
    return coordinate


def _counts(exchange: Exchange, shape: Sequence[int], boxes: Iterable[int]) -> list[int]:
    """How many elements of a tensor boxes of so many coordinates along the exchange's dims are."""
    each = prod(size for dim, size in enumerate(shape) if dim not in exchange.dims)
    return [each * count for count in boxes]


def index(exchange: Exchange, box: Box, origin: Box | Grid) -> Index:
    """Where ``box`` lies in a tensor that holds ``origin``."""
    index = [slice(None)] * len(exchange.source.shape)
    for dim, cut in zip(exchange.dims, box.within(origin), strict=True):
        index[dim] = cut
    return tuple(index)


def empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """An uninitialised tensor of ``shape`` whose dims lie in memory as those of ``like``."""
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    dense = like.new_empty([shape[dim] for dim in order])
    return dense.permute([order.index(dim) for dim in range(like.ndim)])


@torch.library.custom_op("torchhalo::after", mutates_args=())
def _after(tensor: torch.Tensor, cause: torch.Tensor, call: int) -> torch.Tensor:
    return tensor.clone()


@_after.register_fake
def _(tensor: torch.Tensor, cause: torch.Tensor, call: int) -> torch.Tensor:
    return torch.empty_like(tensor)


_calls = count()


def anchor(tensor: torch.Tensor, cause: torch.Tensor) -> torch.Tensor:
    """``tensor``, made to depend on ``cause`` in a compiled graph by an op that the compiler cannot look into.

    Every rank compiles its own graph, and the graphs must hold the same collectives. On a rank that receives nothing the
    halo is unused, and the exchange would be dropped there; on one that sends nothing the buffer to send depends on
    nothing, and an exchange of the backward graph would be moved to the forward one. And of two equal exchanges one would be
    dropped where the compiler sees that they are equal, which depends on the shard; so each call gets a number. Else the other
    ranks would wait forever.
    """
    return _after(tensor, cause, next(_calls)) if dispatch.traced(tensor) else tensor
