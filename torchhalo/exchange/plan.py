"""Plan an exchange: what each rank needs, sends and receives.

    needs(rank)    = window.reads(owned_output(rank)), clipped to the tensor
    message q -> r = needs(r) ∩ owned_input(q)

Both sides work out the same boxes from global shapes alone, so no sizes are negotiated, and a rank looks only at the parts
that its own needs and its own shard reach.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from torchhalo.exchange.layout import Layout
from torchhalo.geometry import Box, Grid, Relation, Span, boxes, hull

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
        return Box(tuple(hull(overlap(w.reads(span), Span(0, self.source.shape[dim]))) for dim, w, span in spans))

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
        return overlap(self.window.reads(self.target[part]), Span(0, self.size))

    def lacks(self, part: int) -> bool:
        reach = self.window.reach(self.target[part]) & Span(0, self.size)
        return not self.source[part].contains(reach) and not self.source[part].contains(hull(self.needs(part)))


def _lines(exchange: Exchange) -> list[_Line]:
    source, target = exchange.source, exchange.target
    return [
        _Line(source.parts(dim), target.parts(dim), source.shape[dim], window)
        for dim, window in zip(exchange.dims, exchange.windows, strict=True)
    ]


def overlap(runs: Iterable[Span], span: Span) -> tuple[Span, ...]:
    return tuple(run & span for run in runs if (run & span).size)


def _meeting(parts: tuple[Span, ...], span: Span) -> range:
    """The indices of the parts, which are in ascending order, that may intersect ``span``."""
    first = bisect_right(parts, span.start, key=lambda part: part.stop)
    return range(first, bisect_left(parts, span.stop, key=lambda part: part.start))


@lru_cache(maxsize=1024)
def _plan(exchange: Exchange, coordinate: tuple[int, ...], places: tuple[int, ...] | None) -> Plan:
    lines = _lines(exchange)
    own = tuple(exchange.source.part(dim, coordinate) for dim in exchange.dims)
    owned = tuple(line.source[part] for line, part in zip(lines, own, strict=True))
    needs = [line.needs(part) for line, part in zip(lines, own, strict=True)]
    receives, received = _messages(
        exchange,
        places,
        own,
        [
            {q: overlap(runs, line.source[q]) for q in _meeting(line.source, hull(runs))}
            for line, runs in zip(lines, needs, strict=True)
        ],
    )
    sends, sent = _messages(
        exchange,
        places,
        own,
        [
            {q: overlap(line.needs(q), own) for q in _meeting(line.target, hull(line.window.touches(own)))}
            for line, own in zip(lines, owned, strict=True)
        ],
    )
    return Plan(Box(owned), Grid(tuple(needs)), Box(tuple(map(hull, needs))), sends, receives, sent, received)


def _messages(
    exchange: Exchange, places: tuple[int, ...] | None, own: tuple[int, ...], lines: list[dict[int, tuple[Span, ...]]]
) -> tuple[tuple[Box, ...], tuple[int, ...]]:
    """All boxes in the order of the group, and how many elements they hold for each of its members."""
    messages: dict[int, tuple[Box, ...]] = {}
    for parts in product(*lines):
        if parts != own:
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


def index(exchange: Exchange, box: Box, origin: Box | Grid) -> Index:
    """Where ``box`` lies in a tensor that holds ``origin``."""
    index = [slice(None)] * len(exchange.source.shape)
    for dim, cut in zip(exchange.dims, box.within(origin), strict=True):
        index[dim] = cut
    return tuple(index)


def exchange_between(source: Layout, target: Layout, windows: Mapping[int, Relation]) -> Exchange:
    """The exchange for an op that reads ``source`` through ``windows``, one per dim that it moves along."""
    return _exchange(source, target, tuple((dim, windows[dim]) for dim in sorted(windows) if source.cuts[dim]))


@lru_cache(maxsize=4096)
def _exchange(source: Layout, target: Layout, windows: tuple[tuple[int, Relation], ...]) -> Exchange:
    return Exchange(source, target, tuple(dim for dim, _ in windows), tuple(window for _, window in windows))
