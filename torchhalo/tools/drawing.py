"""How a tensor is cut over a mesh, as rectangles to scale, whatever then paints them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from torchhalo.exchange.layout import Layout
from torchhalo.geometry import Box, Span, shell

Place = tuple[int, ...]

#: Ranks whose halos are all drawn; of more, only the chosen one's.
CROWD = 16
#: Elements that a close-up shows one by one.
FEW = 48


class Mark(NamedTuple):
    """A rectangle of a picture.

    Attributes:
        kind: ``image``, ``own`` of the chosen rank, its ``halo``, what it has ``sent``, what ``others`` need, a ``line``
            between two shards or an ``element`` between two elements; of a chart, ``kept`` or ``bytes``.
    """

    kind: str
    x: float
    y: float
    width: float
    height: float


class Area(NamedTuple):
    """Where a picture goes."""

    x: float
    y: float
    width: float
    height: float


class Cut:
    """A tensor cut over a mesh, in the two of its dims that are drawn.

    Args:
        layout: Of the tensor.
        halos: By rank and dim, the elements that it needs before and after its own; a rank between those that are given needs
            what the one in the middle needs.

    Example:
        >>> cut = Cut(Layout((1, 1, 8, 6), (2,), ((), (), (0,), ())), {(0,): {2: (0, 1)}, (1,): {2: (1, 0)}})
        >>> cut.needs((1,))
        Box(spans=(Span(start=3, stop=8, step=1), Span(start=0, stop=6, step=1)))
    """

    def __init__(self, layout: Layout, halos: Mapping[Place, Mapping[int, tuple[int, int]]]):
        self.layout, self.halos = layout, halos
        last = len(layout.shape) - 1
        cut = [dim for dim, axes in enumerate(layout.cuts) if axes]
        self.dims = (cut[-2], cut[-1]) if len(cut) > 1 else (cut[0], last) if cut and cut[0] < last else (last - 1, last)

    @property
    def whole(self) -> Box:
        return Box(tuple(Span(0, self.layout.shape[dim]) for dim in self.dims))

    def owned(self, place: Place) -> Box:
        """What the rank holds."""
        box = self.layout.owned(place)
        return Box(tuple(box.spans[dim] for dim in self.dims))

    def needs(self, place: Place) -> Box:
        """The smallest box that holds all that the rank reads."""
        halo, owned = self.halo(place), self.owned(place)
        if not owned.size:
            return owned
        sides = [halo.get(dim, (0, 0)) for dim in self.dims]
        wide = [Span(own.start - side[0], own.stop + side[1]) for own, side in zip(owned.spans, sides, strict=True)]
        return Box(tuple(wide)) & self.whole

    def halo(self, place: Place) -> Mapping[int, tuple[int, int]]:
        """By dim, the elements that the rank needs before and after its own."""
        if place not in self.halos:
            sizes = zip(self.layout.mesh_shape, place, strict=True)
            place = tuple(at if at in (0, size - 1) else size // 2 for size, at in sizes)
        return self.halos.get(place, {})

    def peers(self, place: Place) -> list[Place]:
        """The ranks that own the tensor's parts in the plane of the picture, which goes through what ``place`` owns."""
        drawn = {axis for dim in self.dims for axis in self.layout.cuts[dim]}
        sizes = enumerate(self.layout.mesh_shape)
        return list(product(*(range(size) if axis in drawn else [place[axis]] for axis, size in sizes)))

    def sent(self, place: Place) -> list[Box]:
        """What others need of what the rank owns."""
        own = self.owned(place)
        found = {self.needs(peer) & own for peer in self.peers(place) if peer != place}
        return sorted(box for box in found if box.size)

    def corner(self, place: Place) -> Box:
        """The surroundings of a corner where the rank meets others, small enough to see its halo."""
        sides = [side for each in self.halos.values() for dim in self.dims for side in each.get(dim, (0, 0))]
        reach = max(6, round(2.5 * max(sides, default=0)))
        spans = []
        for dim, own, whole in zip(self.dims, self.owned(place).spans, self.whole.spans, strict=True):
            before, after = self.halo(place).get(dim, (0, 0))
            inner = [edge for edge in (own.stop, own.start) if whole.start < edge < whole.stop]
            middle = inner[-1 if before > after else 0] if inner else (own.start + own.stop) // 2
            spans.append(Span(middle - reach, middle + reach))
        return Box(tuple(spans)) & self.whole


def height(cut: Cut, width: float) -> float:
    """Of a picture of the whole so wide: in proportion, unless that would be hardly visible or larger than a screen."""
    return min(max(_proportional(cut, width), width / 6), width * 1.25)


def in_proportion(cut: Cut) -> bool:
    """Whether a picture of the whole has one scale for both dims."""
    return height(cut, 1) == _proportional(cut, 1)


def square(field: Box, side: float) -> tuple[float, float]:
    """Width and height of a picture of ``field``, at most ``side``, in which elements are squares."""
    rows, columns = field.shape
    return side * columns / max(rows, columns), side * rows / max(rows, columns)


def draw(cut: Cut, place: Place, field: Box, area: Area) -> list[Mark]:
    """The part of the tensor in ``field``, to scale, as the rank at ``place`` sees it."""
    peers = cut.peers(place)
    marks = [_mark("image", cut.whole, field, area)]
    if len(peers) <= CROWD:
        others = [box for peer in peers if peer != place for box in shell(cut.needs(peer), cut.owned(peer))]
        marks += [_mark("others", box, field, area) for box in others]
    marks.append(_mark("own", cut.owned(place), field, area))
    marks += [_mark("sent", box, field, area) for box in cut.sent(place)]
    marks += [_mark("halo", box, field, area) for box in shell(cut.needs(place), cut.owned(place))]
    if max(field.shape) <= FEW:
        marks += _lines("element", [range(span.start + 1, span.stop) for span in field.spans], cut, field, area)
    edges = [[span.start for span in cut.layout.parts(dim)[1:] if span.size] for dim in cut.dims]
    return [mark for mark in marks + _lines("line", edges, cut, field, area) if mark.width and mark.height]


def _proportional(cut: Cut, width: float) -> float:
    tall, wide = cut.whole.shape
    return width * tall / wide


def _mark(kind: str, box: Box, field: Box, area: Area) -> Mark:
    """Where ``box`` lies in a picture that shows ``field`` in ``area``."""
    rows, columns = (box & field).spans
    down, right = area.height / field.spans[0].size, area.width / field.spans[1].size
    x, y = area.x + (columns.start - field.spans[1].start) * right, area.y + (rows.start - field.spans[0].start) * down
    return Mark(kind, x, y, columns.size * right if rows.size else 0, rows.size * down)


def _lines(kind: str, edges: Sequence[Sequence[int]], cut: Cut, field: Box, area: Area) -> list[Mark]:
    """Lines of one pixel above the rows and left of the columns that ``edges`` name, as long as the tensor."""
    found = []
    whole = _mark(kind, cut.whole, field, area)
    for row in edges[0]:
        if field.spans[0].start < row < field.spans[0].stop:
            y = area.y + (row - field.spans[0].start) * area.height / field.spans[0].size
            found.append(Mark(kind, whole.x, y - 0.5, whole.width, 1))
    for column in edges[1]:
        if field.spans[1].start < column < field.spans[1].stop:
            x = area.x + (column - field.spans[1].start) * area.width / field.spans[1].size
            found.append(Mark(kind, x - 0.5, whole.y, 1, whole.height))
    return found
