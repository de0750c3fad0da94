"""Relations beyond windows: flips, rolls and padding modes, adaptive pools and interpolation."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torchhalo.geometry.spans import Span, hull, merge


class Relation(Protocol):
    """What an output reads along one dim: all that an exchange wants to know of an op."""

    def reach(self, outputs: Span) -> Span:
        """The span from the first to the last input that ``outputs`` read; a window's is not clipped to the tensor."""

    def reads(self, outputs: Span) -> tuple[Span, ...]:
        """Exactly the inputs that ``outputs`` read, as disjoint spans."""

    def touches(self, inputs: Span) -> tuple[Span, ...]:
        """Outputs that read any of ``inputs``: all of them, perhaps with others in between."""


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
