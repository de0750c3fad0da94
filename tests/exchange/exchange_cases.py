"""Random exchanges, and what each rank needs, owns and sends in them, counted element by element."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from torchhalo.exchange.layout import Layout
from torchhalo.exchange.plan import Exchange, exchange_between
from torchhalo.geometry import Box, Mirror, Window

Coordinate = tuple[int, ...]
Integer = Callable[[int, int], int]


class Case(NamedTuple):
    """One random exchange.

    Attributes:
        ranks: The mesh, as nested lists.
        shape: Of the source: batch, channels, then one or two spatial sizes.
        homes: For each axis, the dim that it cuts, or -1.
        windows: One for each spatial dim.
        sizes: The target's, one for each spatial dim.
    """

    ranks: list[Any]
    shape: tuple[int, ...]
    homes: tuple[int, ...]
    windows: tuple[Window | Mirror, ...]
    sizes: tuple[int, ...]
    channels_last: bool

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        shape, level = [], self.ranks
        while isinstance(level, list):
            shape.append(len(level))
            level = level[0]
        return tuple(shape)

    @property
    def exchange(self) -> Exchange:
        cuts = tuple(tuple(axis for axis, home in enumerate(self.homes) if home == dim) for dim in range(len(self.shape)))
        source = Layout(self.shape, self.mesh_shape, cuts)
        target = Layout((*self.shape[:2], *self.sizes), self.mesh_shape, cuts)
        return exchange_between(source, target, dict(enumerate(self.windows, start=2)))

    @property
    def coordinates(self) -> list[Coordinate]:
        return list(product(*map(range, self.mesh_shape)))


def mesh_of(*shape: int) -> list[Any]:
    return torch.arange(math.prod(shape)).reshape(shape).tolist()


def random_case(integer: Integer, meshes: list[list[Any]]) -> Case:
    """A case from random integers, which hypothesis or `random` may supply."""
    ranks = meshes[integer(0, len(meshes) - 1)]
    ndim = 2 if integer(0, 2) else 1
    windows: list[Window | Mirror] = []
    sizes, source = [], []
    for _ in range(ndim):
        window = Window(integer(1, 5), integer(1, 3), integer(-2, 6), integer(-2, 6), integer(1, 3))
        enough = max(0, window.extent - window.before - window.after)  # for one output
        size = enough + integer(0, 9) if integer(0, 3) else integer(0, 5)
        if integer(0, 2):
            windows.append(window)
            sizes.append(max(0, window.output_size(size)))
        else:
            windows.append(window.mirror)
            sizes.append(max(0, window.mirror.output_size(size, integer(0, window.stride - 1))))
        source.append(size)
    dims = [*[2, ndim + 1] * 4, 0, -1]
    depth = len(Case(ranks, (), (), (), (), False).mesh_shape)
    homes = tuple(dims[integer(0, len(dims) - 1)] for _ in range(depth))
    shape = (integer(1, 2), integer(1, 2), *source)
    return Case(ranks, shape, homes, tuple(windows), tuple(sizes), bool(integer(0, 1)))


def cases(meshes: list[list[Any]]) -> st.SearchStrategy[Case]:
    @st.composite
    def build(draw: st.DrawFn) -> Case:
        return random_case(lambda low, high: draw(st.integers(low, high)), meshes)

    return build()


def seeded_cases(seed: int, count: int, meshes: list[list[Any]]) -> list[Case]:
    return [random_case(random.Random(seed * 1000 + i).randint, meshes) for i in range(count)]


# What should be, by brute force.


def related(window: Window | Mirror, output: int, input: int) -> bool:
    """Whether ``output`` reads ``input``."""
    if isinstance(window, Mirror):
        return related(window.window, input, output)
    taps, rest = divmod(input + window.before - output * window.stride, window.dilation)
    return rest == 0 and 0 <= taps < window.kernel


def wanted(exchange: Exchange, coordinate: Coordinate) -> torch.Tensor:
    """Which elements of the source, along the exchange's dims, the target's part at ``coordinate`` reads."""
    grid = torch.ones([exchange.source.shape[dim] for dim in exchange.dims], dtype=torch.bool)
    outputs = exchange.target.owned(coordinate)
    for place, (dim, window) in enumerate(zip(exchange.dims, exchange.windows, strict=True)):
        line = [any(related(window, o, i) for o in range(*outputs.spans[dim])) for i in range(exchange.source.shape[dim])]
        grid &= torch.tensor(line, dtype=torch.bool).reshape([-1 if d == place else 1 for d in range(grid.ndim)])
    return grid


def owned(exchange: Exchange, coordinate: Coordinate) -> torch.Tensor:
    box = exchange.source.owned(coordinate)
    return counted(exchange, [Box(tuple(box.spans[dim] for dim in exchange.dims))]) > 0


def counted(exchange: Exchange, boxes: list[Box] | tuple[Box, ...]) -> torch.Tensor:
    """How many of ``boxes`` hold each element; a box beyond the tensor raises."""
    sizes = [exchange.source.shape[dim] for dim in exchange.dims]
    grid = torch.zeros(sizes, dtype=torch.int64)
    for box in boxes:
        assert all(0 <= span.start <= span.stop <= size for span, size in zip(box.spans, sizes, strict=True))
        grid[tuple(slice(*span) for span in box.spans)] += 1
    return grid


def inside(grid: torch.Tensor) -> torch.Tensor:
    """The elements of the smallest box around those that are set, set too."""
    out = torch.zeros_like(grid)
    if grid.any():
        found = grid.nonzero()
        out[tuple(slice(int(a), int(b) + 1) for a, b in zip(found.amin(0), found.amax(0), strict=True))] = True
    return out


@lru_cache(maxsize=64)
def delivered(exchange: Exchange, coordinate: Coordinate) -> torch.Tensor:
    """Which elements `assemble` over ``plan.needs`` gives: all that are read, and those in between that the rank has anyway."""
    reads = wanted(exchange, coordinate)
    return reads | (inside(reads) & owned(exchange, coordinate))


def fiber(case: Case, coordinate: Coordinate) -> list[Coordinate]:
    """The ranks that take part in one exchange with ``coordinate``, in row-major order of the exchange's axes."""
    axes = case.exchange.axes
    return [c for c in case.coordinates if all(c[a] == coordinate[a] for a in range(len(c)) if a not in axes)]


def messages(boxes: tuple[Box, ...], counts: tuple[int, ...]) -> list[list[Box]]:
    """A plan's boxes by peer: they lie in the order of the group, and the counts say how many elements go to each."""
    queue, by_peer = list(boxes), []
    for count in counts:
        mine: list[Box] = []
        while sum(box.size for box in mine) < count:
            mine.append(queue.pop(0))
        assert sum(box.size for box in mine) == count
        by_peer.append(mine)
    assert not queue
    return by_peer


# Plans, on paper.


def holds(outer: Box, inner: Box) -> bool:
    return inner & outer == inner
