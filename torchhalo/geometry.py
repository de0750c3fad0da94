"""Spans, boxes and windows: the integer arithmetic under every sharded op. Imports no torch.

A window relates the two sides of an op along one dim. Output ``o`` of a convolution reads the inputs
``o * stride - before + k * dilation`` for ``k`` in ``range(kernel)``; for a transposed convolution the same relation holds
with the sides exchanged, which is why one class and its mirror image serve both, forward and backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import NamedTuple, Protocol


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


@lru_cache(maxsize=256)
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


class Relation(Protocol):
    """What an output reads along one dim: all that an exchange wants to know of an op."""

    def reach(self, outputs: Span) -> Span:
        """The span from the first to the last input that ``outputs`` read; a window's is not clipped to the tensor."""

    def reads(self, outputs: Span) -> tuple[Span, ...]:
        """Exactly the inputs that ``outputs`` read, as disjoint spans."""

    def touches(self, inputs: Span) -> tuple[Span, ...]:
        """Outputs that read any of ``inputs``: all of them, perhaps with others in between."""


class Window(NamedTuple):
    """Kernel, stride, padding (``before`` and ``after``, may be negative) and dilation along one dim.

    >>> window = Window(kernel=3, stride=2, before=1, after=1)
    >>> window.output_size(8), window.reads(Span(2, 4))
    (4, (Span(start=3, stop=8, step=1),))
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def extent(self) -> int:
        """How many inputs one output spans, gaps included."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def mirror(self) -> Mirror:
        """The window of the adjoint op, whose input is this one's output."""
        return Mirror(self)

    def output_size(self, size: int) -> int:
        return (size + self.before + self.after - self.extent) // self.stride + 1

    def reach(self, outputs: Span) -> Span:
        """The span from the first to the last input that ``outputs`` read, not clipped to the tensor."""
        if not outputs.size:
            return Span(0, 0)
        first, last = outputs.start * self.stride - self.before, (outputs.stop - 1) * self.stride - self.before
        return Span(first, last + self.extent)

    def reads(self, outputs: Span) -> tuple[Span, ...]:
        """Exactly the inputs that ``outputs`` read, not clipped to the tensor, as disjoint spans.

        >>> Window(kernel=1, stride=2).reads(Span(3, 6))
        (Span(start=6, stop=11, step=2),)
        """
        if not outputs.size:
            return ()
        if self.dilation == 1 and self.kernel >= self.stride:
            return (self.reach(outputs),)
        # Taps that differ by a multiple of the stride read from the same comb, one from another of its teeth.
        combs: dict[int, list[Span]] = {}
        for k in range(self.kernel):
            shift, offset = divmod(k * self.dilation - self.before, self.stride)
            combs.setdefault(offset, []).append(Span(outputs.start + shift, outputs.stop + shift))
        return tuple(
            Span(teeth.start * self.stride + offset, (teeth.stop - 1) * self.stride + offset + 1, self.stride)
            for offset in sorted(combs)
            for teeth in merge(combs[offset])
        )

    def inside(self, outputs: Span, inputs: Span, size: int) -> Span:
        """Those of ``outputs`` that read nothing but ``inputs`` and what lies outside a tensor of ``size``.

        >>> Window(kernel=3, before=1, after=1).inside(Span(4, 8), Span(4, 8), size=8)
        Span(start=5, stop=8, step=1)
        """
        first = -(-(inputs.start + self.before) // self.stride) if inputs.start > 0 else outputs.start
        stop = (inputs.stop + self.before - self.extent) // self.stride + 1 if inputs.stop < size else outputs.stop
        return outputs & Span(first, stop)

    def meeting(self, tap: int, outputs: Span, inputs: Span) -> tuple[slice, slice] | None:
        """Where in ``outputs`` and ``inputs``, which are intervals, are those of them that meet in one tap of the kernel.

        >>> Window(kernel=3, before=1, after=1).meeting(2, Span(3, 4), Span(4, 8))
        (slice(0, 1, None), slice(0, 1, 1))
        """
        shift = tap * self.dilation - self.before
        first = max(outputs.start, -((shift - inputs.start) // self.stride))
        last = min(outputs.stop - 1, (inputs.stop - 1 - shift) // self.stride)
        if first > last:
            return None
        start, stop = (each * self.stride + shift - inputs.start for each in (first, last))
        return slice(first - outputs.start, last + 1 - outputs.start), slice(start, stop + 1, self.stride)

    def touches(self, inputs: Span) -> tuple[Span, ...]:
        """Exactly the outputs that read any of ``inputs``, not clipped to the tensor.

        >>> Window(kernel=3, before=1, after=1).touches(Span(4, 6))
        (Span(start=3, stop=7, step=1),)
        """
        if not inputs.size:
            return ()
        shifts = (self.before - k * self.dilation for k in range(self.kernel))
        return merge(
            Span(-(-(inputs.start + shift) // self.stride), -(-(inputs.stop + shift) // self.stride)) for shift in shifts
        )


class Mirror(NamedTuple):
    """A window seen from its other side: transposed convolution forward, convolution backward.

    >>> Window(kernel=3, stride=2, before=1, after=1).mirror.reads(Span(0, 3))
    (Span(start=0, stop=2, step=1),)
    """

    window: Window

    @property
    def mirror(self) -> Window:
        return self.window

    def output_size(self, size: int, output_padding: int = 0) -> int:
        w = self.window
        return (size - 1) * w.stride - w.before - w.after + w.extent + output_padding

    def reach(self, outputs: Span) -> Span:
        return hull(self.window.touches(outputs))

    def reads(self, outputs: Span) -> tuple[Span, ...]:
        return self.window.touches(outputs)

    def touches(self, inputs: Span) -> tuple[Span, ...]:
        return self.window.reads(inputs)

    def inside(self, outputs: Span, inputs: Span, size: int) -> Span:
        first = self.window.reach(Span(0, inputs.start)).stop if inputs.start > 0 else outputs.start
        stop = self.window.reach(Span(inputs.stop, size)).start if inputs.stop < size else outputs.stop
        return outputs & Span(first, stop)


def overhang(window: Window, source: Span, target: Span, source_is_sparse: bool) -> tuple[int, int]:
    """By how much the windows of the sparse side reach beyond the dense one, before and after it."""
    sparse, dense = (source, target) if source_is_sparse else (target, source)
    reach = window.reach(sparse)
    return dense.start - reach.start, reach.stop - dense.stop


def crop(window: Window, held: Span, own: Span, crop_sparse: bool) -> tuple[Span, int, int] | None:
    """Cut ``held`` until a kernel that pads both ends alike gives as much as ``own`` from it, right where that reads no more.

    Returns:
        None where the kernel's own padding cannot stand for what is missing.
    """
    stride = window.stride
    before, after = overhang(window, held, own, crop_sparse)
    if crop_sparse:
        first, last = max(0, (before - after) // stride), max(0, -((before - after) // stride))
        before, after = before - first * stride, after - last * stride
    else:
        first = max(0, -before, after - before)
        before += first
        last = max(0, before - after - stride + 1)
        after += last
    left = Span(held.start + first, held.stop - last)
    return (left, before, before - after) if left.size and 0 <= before < window.extent else None


class Piece(NamedTuple):
    """Outputs that read one input each: from ``first`` on forward (``sign`` 1), backward (-1), or all the same one (0)."""

    outputs: Span
    first: int
    sign: int = 1

    def image(self, outputs: Span) -> Span:
        """What those of ``outputs`` that belong to the piece read.

        >>> Piece(Span(0, 4), first=9, sign=-1).image(Span(1, 3))
        Span(start=7, stop=9, step=1)
        """
        mine = outputs & self.outputs
        if not mine.size:
            return Span(0, 0)
        a, b = (self.first + self.sign * (o - self.outputs.start) for o in (mine.start, mine.stop - 1))
        return Span(min(a, b), max(a, b) + 1)

    def preimage(self, inputs: Span) -> Span:
        """Which of the piece's outputs read any of ``inputs``."""
        mine = inputs & self.image(self.outputs)
        if not mine.size or self.sign == 0:
            return self.outputs if mine.size else Span(0, 0)
        a, b = (self.outputs.start + self.sign * (i - self.first) for i in (mine.start, mine.stop - 1))
        return Span(min(a, b), max(a, b) + 1)


class Pieces(NamedTuple):
    """A relation in which each output reads one input, made of pieces in ascending order of outputs: flip, roll, padding modes.

    >>> ring = Pieces((Piece(Span(0, 2), first=8), Piece(Span(2, 10), first=0)))  # roll by two
    >>> ring.reads(Span(0, 4))
    (Span(start=0, stop=2, step=1), Span(start=8, stop=10, step=1))
    """

    pieces: tuple[Piece, ...]

    def reach(self, outputs: Span) -> Span:
        return hull(self.reads(outputs))

    def reads(self, outputs: Span) -> tuple[Span, ...]:
        return merge(piece.image(outputs) for piece in self.pieces)

    def touches(self, inputs: Span) -> tuple[Span, ...]:
        return merge(piece.preimage(inputs) for piece in self.pieces)


@dataclass(frozen=True)
class Intervals:
    """A relation in which output ``o`` reads the inputs of ``interval(o)``, whose ends never fall as ``o`` grows.

    Subclasses, frozen dataclasses too, say what the interval is: of an adaptive pool, of an interpolation.

    Attributes:
        inputs, outputs: How many there are.
    """

    inputs: int
    outputs: int

    def interval(self, output: int) -> Span:
        raise NotImplementedError

    def reach(self, outputs: Span) -> Span:
        if not outputs.size:
            return Span(0, 0)
        return Span(self.interval(outputs.start).start, self.interval(outputs.stop - 1).stop)

    def reads(self, outputs: Span) -> tuple[Span, ...]:
        return merge(self.interval(output) for output in range(outputs.start, outputs.stop))

    def touches(self, inputs: Span) -> tuple[Span, ...]:
        everything = range(self.outputs)
        first = bisect_left(everything, True, key=lambda o: self.interval(o).stop > inputs.start)
        last = bisect_left(everything, True, key=lambda o: self.interval(o).start >= inputs.stop)
        return (Span(first, last),) if inputs.size and first < last else ()
