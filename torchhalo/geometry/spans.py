"""Spans, boxes and grids: regions of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, pairwise, product, starmap
from math import prod
from typing import NamedTuple


class Span(NamedTuple):
    """A half-open interval ``[start, stop)`` of coordinates along one dim; with a step, every so manieth, the last included.

    >>> Span(2, 6) & Span(4, 9)
    Span(start=4, stop=6, step=1)
    >>> Span(0, 9, 2) & Span(3, 8)
    Span(start=4, stop=7, step=2)
    >>> Span(0, 9, 2).size
    5
    """

    start: int
    stop: int
    step: int = 1

    @property
    def size(self) -> int:
        return max(0, -((self.start - self.stop) // self.step))

    def __and__(self, other: Span) -> Span:
        """What lies in both; ``other`` is an interval."""
        start = self.start + max(0, -((self.start - other.start) // self.step)) * self.step
        room = max(0, min(self.stop, other.stop) - start)
        return Span(start, start + room - (room - 1) % self.step if room else start, self.step)

    def contains(self, other: Span) -> bool:
        """Whether every coordinate of ``other`` lies in this interval; an empty span lies in every one."""
        return other.size == 0 or (self.start <= other.start and other.stop <= self.stop)

    def within(self, origin: int) -> slice:
        """The slice that cuts this span out of a tensor whose first element has the coordinate ``origin``.

        >>> Span(5, 7).within(4)
        slice(1, 3, 1)
        """
        return slice(self.start - origin, self.stop - origin, self.step)


class Box(NamedTuple):
    """One span per dim.

    >>> Box((Span(0, 2), Span(3, 6))).size
    6
    """

    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        return prod(span.size for span in self.spans)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(span.size for span in self.spans)

    def __and__(self, other: Box) -> Box:
        return Box(tuple(a & b for a, b in zip(self.spans, other.spans, strict=True)))

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` lies in this box, whose spans are intervals."""
        return other.size == 0 or all(a.contains(b) for a, b in zip(self.spans, other.spans, strict=True))

    def within(self, origin: Box | Grid) -> tuple[slice, ...]:
        """The slices that cut this box out of a tensor that holds ``origin``."""
        if isinstance(origin, Grid):
            return tuple(_within_runs(span, runs) for span, runs in zip(self.spans, origin.runs, strict=True))
        return tuple(a.within(b.start) for a, b in zip(self.spans, origin.spans, strict=True))


def shell(outer: Box, inner: Box) -> tuple[Box, ...]:
    """What ``outer`` holds and ``inner``, a box in it, does not, as disjoint boxes: at most two per dim.

    >>> [box.shape for box in shell(Box((Span(0, 4), Span(0, 6))), Box((Span(1, 4), Span(2, 5))))]
    [(1, 6), (3, 2), (3, 1)]
    """
    found, spans = [], list(outer.spans)
    for dim, (whole, kept) in enumerate(zip(outer.spans, inner.spans, strict=True)):
        for side in (Span(whole.start, kept.start), Span(kept.stop, whole.stop)):
            if side.size:
                found.append(Box((*spans[:dim], side, *spans[dim + 1 :])))
        spans[dim] = kept
    return tuple(found)


class Grid(NamedTuple):
    """One tuple of disjoint runs per dim; a tensor that holds a grid has the runs of each dim one after another.

    Where a box must span what lies between its ends, a grid need not: the two ends of a ring are a grid of two short runs.

    >>> grid = Grid(((Span(0, 2), Span(8, 10)),))
    >>> grid.shape, Box((Span(9, 10),)).within(grid)
    ((4,), (slice(3, 4, 1),))
    """

    runs: tuple[tuple[Span, ...], ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(run.size for run in runs) for runs in self.runs)


def _within_runs(span: Span, runs: tuple[Span, ...]) -> slice:
    """Where ``span``, which lies in one of ``runs`` and on its steps, is in a tensor that holds them one after another."""
    if not span.size:
        return slice(0, 0)
    for run, offset in zip(runs, accumulate((run.size for run in runs), initial=0), strict=False):
        if run.contains(span) and (span.start - run.start) % run.step == 0:
            first = offset + (span.start - run.start) // run.step
            step = max(1, span.step // run.step)
            return slice(first, first + (span.size - 1) * step + 1, step)
    raise ValueError(f"{span} lies in none of {runs}")


def boxes(runs: Iterable[Iterable[Span]]) -> tuple[Box, ...]:
    """The boxes of a product of runs, one tuple of spans per dim, in row-major order."""
    return tuple(Box(spans) for spans in product(*runs))


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same coordinates as disjoint intervals in ascending order, as few as possible.

    >>> merge([Span(4, 6), Span(0, 2), Span(2, 5)])
    (Span(start=0, stop=6, step=1),)
    """
    merged: list[Span] = []
    for span in sorted(s for s in spans if s.size):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)


def hull(runs: Iterable[Span]) -> Span:
    """The smallest interval that holds all of ``runs``, none of which is empty."""
    runs = tuple(runs)
    return Span(min(run.start for run in runs), max(run.stop for run in runs)) if runs else Span(0, 0)


def chunks(size: int, counts: tuple[int, ...]) -> tuple[Span, ...]:
    """The parts of ``range(size)`` after `torch.chunk` into ``counts[0]`` parts, each of these into ``counts[1]``, and so on.

    Unlike `torch.chunk` it always gives as many parts as asked for; the last ones may be empty.

    >>> chunks(5, (4,))
    (Span(start=0, stop=2, step=1), Span(start=2, stop=4, step=1), Span(start=4, stop=5, step=1), Span(start=5, stop=5, step=1))
    """
    parts = [Span(0, size)]
    for count in counts:
        finer = []
        for start, stop, _ in parts:
            step = -(-(stop - start) // count)
            finer += [Span(min(start + i * step, stop), min(start + (i + 1) * step, stop)) for i in range(count)]
        parts = finer
    return tuple(parts)


cached_chunks = lru_cache(maxsize=256)(chunks)


def window_chunks(count: int, window: int, counts: tuple[int, ...]) -> tuple[Span, ...]:
    """The parts of ``range(count)`` windows: each goes with most of its elements, which `chunks` has cut.

    None is larger than the largest part of ``chunks(count, counts)``.

    >>> [part.size for part in window_chunks(10, 7, (4,))], [part.size for part in chunks(70, (4,))]
    ([3, 2, 3, 2], [18, 18, 18, 16])
    """
    ends = [0, *((2 * part.stop + window) // (2 * window) for part in chunks(count * window, counts))]
    return tuple(starmap(Span, pairwise(ends)))


cached_window_chunks = lru_cache(maxsize=256)(window_chunks)
