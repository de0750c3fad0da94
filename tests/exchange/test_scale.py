"""Plans at thousands of ranks, which need no processes: a rank looks only at its neighbours, and caches do not grow forever."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import time
from collections.abc import Iterator
from math import prod
from typing import Any

import pytest

import torchhalo
from torchhalo.exchange import plan
from torchhalo.exchange.layout import Layout
from torchhalo.exchange.plan import Exchange, exchange_between
from torchhalo.geometry import Box, Mirror, Span, Window

RANKS = 4096
#: Of this process, not of the clock, because other work runs beside the tests. Loose, because the collection of other tests'
#: garbage may fall into it: a plan takes milliseconds, but 0.44 was seen. What a plan looks at is counted below.
SECONDS = 1.5

SAME = Window(3, before=1, after=1)
HALVE = Window(3, stride=2, before=1, after=1)
DILATED = Window(3, before=4, after=4, dilation=4)
POINTS = Window(1, stride=2, before=-3)
DOUBLE = Window(4, stride=2, before=1, after=1).mirror
WINDOWS: list[Window | Mirror] = [SAME, HALVE, DILATED, POINTS, DOUBLE]


def line(window: Window | Mirror, ranks: int, rows: int = 16) -> Exchange:
    """One dim over ``ranks``, with ``rows`` on each."""
    return grid(window, (ranks,), rows)


def grid(window: Window | Mirror, mesh: tuple[int, ...], rows: int = 16) -> Exchange:
    """As many dims as the mesh has axes, with ``rows`` along each on each rank."""
    sizes = [n * rows for n in mesh]
    cuts = ((), (), *((axis,) for axis in range(len(mesh))))
    source = Layout((1, 8, *sizes), mesh, cuts)
    target = Layout((1, 8, *map(window.output_size, sizes)), mesh, cuts)
    return exchange_between(source, target, dict.fromkeys(range(2, 2 + len(mesh)), window))


def caches() -> dict[str, Any]:
    """Every function of torchhalo that keeps its results."""
    found = {}
    for info in pkgutil.walk_packages(torchhalo.__path__, "torchhalo."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == info.name:
                found[f"{info.name}.{name}"] = value
    return found


@pytest.fixture
def cold() -> Iterator[None]:
    """Empty caches, before and after."""
    for cache in caches().values():
        cache.cache_clear()
    yield
    for cache in caches().values():
        cache.cache_clear()


class Work:
    """How often a plan asks a window or intersects spans."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.counts = {"reads": 0, "touches": 0, "and": 0}
        for owner, name, key in [
            (Window, "reads", "reads"),
            (Mirror, "reads", "reads"),
            (Window, "touches", "touches"),
            (Mirror, "touches", "touches"),
            (Span, "__and__", "and"),
        ]:
            patch.setattr(owner, name, self._counting(getattr(owner, name), key))

    def _counting(self, function: Any, key: str) -> Any:
        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            self.counts[key] += 1
            return function(*args)

        return counted

    def of_plan(self, exchange: Exchange, coordinate: tuple[int, ...]) -> dict[str, int]:
        self.counts.update(dict.fromkeys(self.counts, 0))
        exchange.plan(coordinate)
        return dict(self.counts)


def peers(counts: tuple[int, ...]) -> list[int]:
    return [peer for peer, count in enumerate(counts) if count]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_line_of_ranks_meets_its_two_neighbours(window: Window | Mirror) -> None:
    exchange = line(window, RANKS)
    heard = 0
    for rank in (0, 1, RANKS // 2, RANKS - 2, RANKS - 1):
        plan = exchange.plan((rank,))
        assert set(peers(plan.received)) | set(peers(plan.sent)) <= {rank - 1, rank + 1}
        heard += len(plan.receives)
    assert heard and exchange.needed()


def test_shards_that_drift_apart_meet_a_few_ranks_far_away() -> None:
    """17 rows a rank and stride 2: `torch.chunk` gives 9 outputs to each rank but the last, so what a rank needs moves away."""
    plan = line(HALVE, RANKS, rows=17).plan((RANKS // 2,))
    first, stop = RANKS // 2 * 9 * 2 - 1, (RANKS // 2 + 1) * 9 * 2
    assert peers(plan.received) == list(range(first // 17, -(-stop // 17))) and len(plan.receives) <= 3
    assert 0 < len(plan.sends) <= 3


def test_a_grid_of_ranks_meets_its_eight_neighbours() -> None:
    exchange = grid(SAME, (64, 64))
    assert len(exchange.plan((0, 0)).sent) == RANKS
    around = {(r, c): 64 * r + c for r in range(64) for c in range(64)}
    for at, expected in {(31, 17): 8, (0, 5): 5, (63, 0): 3}.items():
        plan = exchange.plan(at)
        neighbours = {
            around[at[0] + r, at[1] + c]
            for r in (-1, 0, 1)
            for c in (-1, 0, 1)
            if (r or c) and (at[0] + r, at[1] + c) in around
        }
        assert set(peers(plan.received)) == set(peers(plan.sent)) == neighbours and len(neighbours) == expected
        assert len(plan.receives) == expected


def test_one_dim_over_two_axes_meets_its_two_neighbours() -> None:
    """4,096 parts of one dim: the last of one row of the mesh is the neighbour of the first of the next row."""
    shape, cuts = (1, 8, 16 * RANKS), ((), (), (0, 1))
    layout = Layout(shape, (64, 64), cuts)
    plan = exchange_between(layout, layout, {2: SAME}).plan((10, 63))
    assert peers(plan.received) == peers(plan.sent) == [10 * 64 + 62, 11 * 64]


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("mesh, rows", [((RANKS,), 16), ((RANKS,), 128), ((64, 64), 512), ((16, 16, 16), 128)], ids=str)
def test_planning_is_quick(mesh: tuple[int, ...], rows: int, window: Window | Mirror) -> None:
    """Shards of a usual size: the first time, and with nothing in the caches."""
    assert prod(mesh) == RANKS
    exchange = grid(window, mesh, rows)
    begun = time.process_time()
    assert exchange.needed()
    asked = time.process_time()
    plan = exchange.plan(tuple(n // 2 for n in mesh))
    planned = time.process_time()
    print(f"{mesh} x {rows} rows, {window}: needed {1e3 * (asked - begun):.1f} ms, plan {1e3 * (planned - asked):.1f} ms")
    assert plan.receives or plan.sends
    assert asked - begun < SECONDS and planned - asked < SECONDS


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_boxes_of_a_plan_do_not_grow_with_the_shard(window: Window | Mirror) -> None:
    """Each box is a slice to cut and one to write, on the device, at every step: there may be a few, not one per element."""
    counts = []
    for rows in (32, 128, 512):
        plan = grid(window, (3, 3), rows).plan((1, 1))
        counts.append(len(plan.sends) + len(plan.receives))
    assert counts[0] and max(counts) <= 2 * 8, counts


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_work_of_a_plan_does_not_grow_with_the_ranks(window: Window | Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank in the middle asks the windows as often among 8 ranks a side as among 4,096."""
    work = Work(monkeypatch)
    lines = [work.of_plan(line(window, ranks), (ranks // 2,)) for ranks in (8, 64, 512, RANKS)]
    grids = [work.of_plan(grid(window, (side, side)), (side // 2, side // 2)) for side in (8, 16, 64)]
    assert all(count == lines[0] for count in lines), lines
    assert all(count == grids[0] for count in grids), grids
    # What it needs, what each rank needs that may need its own, and once the reverse; a mirror's answer asks its window too.
    for count, dims in ((lines[0], 1), (grids[0], 2)):
        assert 0 < count["reads"] + count["touches"] <= dims * 2 * (1 + 3 + 1)


@pytest.mark.usefixtures("cold")
def test_the_work_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    first, again = line(SAME, RANKS), line(SAME, RANKS)
    assert work.of_plan(first, (7,))["reads"] > 0
    assert work.of_plan(again, (7,)) == {"reads": 0, "touches": 0, "and": 0}
    assert first.plan((7,)) is again.plan((7,))


def test_caches_are_bounded() -> None:
    found = caches()
    assert {
        "torchhalo.exchange.plan._plan",
        "torchhalo.exchange.plan._exchange",
        "torchhalo.geometry.spans.cached_chunks",
    } <= set(found)
    for name, cache in found.items():
        assert cache.cache_info().maxsize is not None, f"{name} would grow forever"


@pytest.mark.usefixtures("cold")
def test_a_cache_lets_go() -> None:
    """More different shapes than it may keep."""
    cache = plan._plan
    bound = cache.cache_info().maxsize
    for rows in range(1, bound + 100):
        line(SAME, 2, rows).plan((0,))
    assert cache.cache_info().currsize == bound
    assert line(SAME, 2, 1).plan((0,)).needs == Box((Span(0, 2),)), "and plans again what it let go"
