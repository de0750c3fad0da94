"""Reshapes: how the dims of two shapes with the same elements in the same order correspond."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from torchhalo.geometry.spans import Span


class Group(NamedTuple):
    """Dims of two shapes with one product: the shortest runs of dims that a view does not mix with others."""

    source: tuple[int, ...]
    target: tuple[int, ...]


@lru_cache(maxsize=4096)
def groups(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Group, ...]:
    """The groups of a view between two shapes that hold one number of elements, which is not zero.

    >>> groups((2, 3, 4, 5), (6, 2, 2, 5))
    (Group(source=(0, 1), target=(0,)), Group(source=(2,), target=(1, 2)), Group(source=(3,), target=(3,)))
    """
    found: list[Group] = []
    i = j = 0
    while i < len(source) and j < len(target):
        first, other = i, j
        product_a, product_b, i, j = source[i], target[j], i + 1, j + 1
        while product_a != product_b:
            if product_a < product_b:
                product_a, i = product_a * source[i], i + 1
            else:
                product_b, j = product_b * target[j], j + 1
        found.append(Group(tuple(range(first, i)), tuple(range(other, j))))
    rest = Group(tuple(range(i, len(source))), tuple(range(j, len(target))))  # dims of size one
    last = found.pop() if found else Group((), ())
    return (*found, Group(last.source + rest.source, last.target + rest.target))


@lru_cache(maxsize=4096)
def factors(shape: tuple[int, ...], other: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """For each dim of ``shape`` the factors it is cut into, so that those of ``other`` are the same; None if there are none.

    >>> factors((4, 6), (8, 3)), factors((8, 3), (4, 6)), factors((2, 6), (3, 4))
    (((4,), (2, 3)), ((4, 2), (3,)), None)
    """
    marks = sorted({mark for sizes in (shape, other) for mark in accumulate(reversed(sizes), int.__mul__, initial=1)})
    if any(b % a for a, b in pairwise(marks)):
        return None
    ends = [*accumulate(reversed(shape), int.__mul__, initial=1)][::-1]
    cuts = ([mark for mark in reversed(marks) if low <= mark <= high] for high, low in pairwise(ends))
    return tuple(tuple(a // b for a, b in pairwise(cut)) for cut in cuts)


def tiles(span: Span, sizes: tuple[int, ...]) -> Iterator[tuple[Span, ...]]:
    """The boxes over ``sizes`` that hold, one after another and each in row-major order, the elements of ``span``.

    >>> [tuple(span.size for span in tile) for tile in tiles(Span(10, 21), (4, 6))]
    [(1, 2), (1, 6), (1, 3)]
    """
    if len(sizes) < 2:
        if span.size:
            yield (span,) if sizes else ()
        return
    inner = prod(sizes[1:])
    first, last = -(-span.start // inner), span.stop // inner  # the whole rows

    def in_row(row: int, start: int, stop: int) -> Iterator[tuple[Span, ...]]:
        for rest in tiles(Span(start - row * inner, stop - row * inner), sizes[1:]):
            yield Span(row, row + 1), *rest

    if first > last:
        yield from in_row(last, span.start, span.stop)
        return
    yield from in_row(first - 1, span.start, first * inner)
    if first < last:
        yield Span(first, last), *(Span(0, size) for size in sizes[1:])
    yield from in_row(last, last * inner, span.stop)


def run_of(spans: Sequence[Span], shape: Sequence[int]) -> Span | None:
    """The span of row-major indices that a box covers, or None if it covers no one span.

    >>> run_of((Span(1, 2), Span(2, 4)), (3, 6)), run_of((Span(0, 2), Span(2, 4)), (3, 6))
    (Span(start=8, stop=10, step=1), None)
    """
    if not all(span.size for span in spans):
        return Span(0, 0)
    start, size = 0, 1
    for span, whole in zip(spans, shape, strict=True):
        if size > 1 and span.size < whole:
            return None
        start, size = start * whole + span.start, size * span.size
    return Span(start, start + size)


def between(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that has common factors with both: that of the target, but flat where there are none.

    >>> between((2, 6, 7), (3, 4, 7))
    (12, 7)
    """
    shape: tuple[int, ...] = ()
    for group in groups(source, target):
        before, after = tuple(source[dim] for dim in group.source), tuple(target[dim] for dim in group.target)
        shape += (prod(after),) if factors(before, after) is None else after
    return shape
