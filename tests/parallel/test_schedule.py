"""Schedules of random programs, replayed over plain sets: no budget is exceeded and nothing is read that is not there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchhalo.parallel.streaming.host import Blocks
from torchhalo.parallel.streaming.overlap import BUS, measured, overlapped, quickest
from torchhalo.parallel.streaming.schedule import BudgetError, Schedule, order, plan

#: Bytes: so many that the bus takes longer than a step.
UNIT = 10**6


class Step(NamedTuple):
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    after: tuple[tuple[int, int], ...]
    workspace: int = 0
    flops: int = 0


class Case(NamedTuple):
    shards: list[list[Step]]
    forward: list[int]
    sizes: dict[int, int]
    given: set[int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Shards that run in turn while they are made, so that an order without a deadlock exists."""
    count = draw(st.integers(1, 4))
    shards: list[list[Step]] = [[] for _ in range(count)]
    known: list[list[int]] = [[] for _ in range(count)]
    sizes: dict[int, int] = {}
    given: set[int] = set()

    def new(shard: int) -> int:
        sizes[len(sizes)] = draw(st.integers(0, 9)) * UNIT
        known[shard].append(len(sizes) - 1)
        return len(sizes) - 1

    for shard in range(count):
        given.add(new(shard))

    def steps() -> None:
        for _ in range(draw(st.integers(1, 12))):
            shard = draw(st.integers(0, count - 1))
            own = draw(st.sets(st.sampled_from(known[shard]), max_size=3))
            other = draw(st.integers(0, count - 1))
            after: tuple[tuple[int, int], ...] = ()
            if other != shard and shards[other]:
                number = draw(st.integers(0, len(shards[other]) - 1))
                after = ((other, number),)
                made = [m for m in shards[other][number].makes if not any(m in step.writes for step in shards[other])]
                own |= set(made)
            mine = [m for m in own if m in known[shard] and not _read_elsewhere(shards, shard, m)]
            writes = draw(st.sets(st.sampled_from(mine))) if mine else set()
            makes = {new(shard)} if draw(st.booleans()) else set()
            workspace = draw(st.integers(0, 3)) * UNIT
            shards[shard].append(Step(frozenset(own | writes), frozenset(writes), frozenset(makes), after, workspace))

    steps()
    forward = [len(each) for each in shards]
    if draw(st.booleans()):
        steps()
    return Case(shards, forward, sizes, given)


def _read_elsewhere(shards: list[list[Step]], shard: int, memory: int) -> bool:
    return any(memory in step.reads for n, steps in enumerate(shards) if n != shard for step in steps)


def replay(case: Case, found: Schedule, budget: float) -> None:
    """Do what a schedule says over versions of memory, and look at each step at what it reads."""
    device: dict[int, int] = {}
    host: dict[int, int] = {}
    version = dict.fromkeys(case.sizes, 0)
    places = [0] * len(case.shards)
    moved = peak = most = 0
    for number, action in enumerate(found.actions):
        memory: Any = action.memory
        if action.kind == "run":
            step = case.shards[action.shard][action.number]
            assert places[action.shard] == action.number, "in order"
            assert all(done < places[other] for other, done in step.after), "nothing is used before it is there"
            assert (action.number < case.forward[action.shard]) == (number < found.forward)
            assert all(device[read] == version[read] for read in step.reads), "the latest values"
            for made in step.makes:
                device[made] = version[made]
            assert sum(case.sizes[m] for m in device) + step.workspace <= min(budget, found.peak)
            for written in step.writes:
                version[written] += 1
                device[written] = version[written]
            places[action.shard] += 1
        elif action.kind == "load":
            assert memory not in device
            assert memory in host or (memory in case.given and version[memory] == 0)
            device[memory] = host.get(memory, 0)
            moved += case.sizes[memory]
        elif action.kind == "save":
            host[memory] = device[memory]
            moved += case.sizes[memory]
            most = max(most, sum(case.sizes[m] for m in host if host[m] == version[m]))
        elif action.kind == "forget":
            assert memory in host
            del host[memory]
        else:
            del device[memory]
            if action.kind == "free":
                host.pop(memory, None)
        used = sum(case.sizes[m] for m in device)
        peak = max(peak, used)
        assert used <= budget
    assert places == [len(steps) for steps in case.shards], "all steps ran"
    assert not device, "all memory is freed"
    assert found.moved == moved and found.peak >= peak and found.host in (0, most)


def least(case: Case) -> int:
    needed = (sum(case.sizes[m] for m in step.reads | step.makes) + step.workspace for steps in case.shards for step in steps)
    return max(needed, default=0)


@pytest.mark.parametrize("planned", [plan, quickest])
@settings(max_examples=200, deadline=None)
@given(case=cases(), more=st.integers(0, 40))
def test_a_schedule_keeps_to_the_budget(planned: Callable[..., Schedule], case: Case, more: int) -> None:
    budget = least(case) + more * UNIT
    found = planned(case.shards, case.forward, case.sizes, budget, case.given)
    replay(case, found, budget)
    if least(case):
        with pytest.raises(BudgetError, match="bytes are needed at a time, the budget is"):
            planned(case.shards, case.forward, case.sizes, least(case) - 1, case.given)


@pytest.mark.parametrize("planned", [plan, quickest])
@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_without_a_budget_only_what_is_given_moves_and_once(planned: Callable[..., Schedule], case: Case) -> None:
    found = planned(case.shards, case.forward, case.sizes, math.inf, case.given)
    replay(case, found, math.inf)
    used = {m for steps in case.shards for step in steps for m in step.reads}
    assert found.moved == sum(case.sizes[m] for m in case.given & used)


def step(reads: set[int], makes: set[int], *after: tuple[int, int]) -> Step:
    return Step(frozenset(reads), frozenset(), frozenset(makes), after)


def test_what_is_used_last_is_evicted_first() -> None:
    steps = [step(set(), {0}), step(set(), {1}), step(set(), {2}), step({1}, set()), step({2}, set()), step({0}, set())]
    found = plan([steps], [len(steps)], dict.fromkeys(range(3), 4), budget=8)
    assert [action.memory for action in found.actions if action.kind == "save"] == [0]
    assert found.moved == 8 and found.peak == 8


def test_where_all_wait_the_direction_turns() -> None:
    """Three shards that each wait for all: after it, the last one goes on first."""
    shards = [[step(set(), {n}), step(set(), set(), *[(other, 0) for other in range(3)])] for n in range(3)]
    assert order(shards, [0] * 3, [2] * 3) == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]


def test_shards_that_wait_for_each_other() -> None:
    shards = [[step(set(), set(), (1, 0))], [step(set(), set(), (0, 0))]]
    with pytest.raises(RuntimeError, match="wait for each other at steps"):
        order(shards, [0, 0], [1, 1])


def test_copies_run_beside_computation() -> None:
    """What leaves is saved when it is made, not when it must go; it is asked for before it is needed, and forgotten then."""
    size = 10**9
    long = Step(frozenset(), frozenset(), frozenset(), (), 0, int(1e13))
    steps = [step(set(), {0}), long, step(set(), {1}), long, long, step({1}, set()), long, step({0}, set())]
    due = plan([steps], [len(steps)], dict.fromkeys(range(2), size), budget=size)
    found = overlapped(due, [steps], dict.fromkeys(range(2), size), size)
    kinds = [(action.kind, action.number if action.kind == "run" else action.memory) for action in found.actions]
    assert kinds.index(("save", 0)) == kinds.index(("run", 0)) + 1 < kinds.index(("drop", 0))
    assert kinds.index(("load", 0)) + 2 == kinds.index(("forget", 0)) + 1 == kinds.index(("run", 6))
    copied = measured(due.actions, due.forward, [steps], dict.fromkeys(range(2), size))
    assert found.moved == due.moved and found.host == size and found.peak == size
    assert found.seconds < copied.seconds - 0.9 * 2 * size / BUS


@given(st.lists(st.integers(0, 3 * Blocks.LARGE), max_size=8), st.randoms())
@settings(max_examples=20, deadline=None)
def test_blocks_are_lent_again(sizes: list[int], random: Any) -> None:
    """No two hold the same bytes, and a second round takes nothing from the system."""
    blocks = Blocks(pinned=False)
    held = []
    for _ in range(2):
        lent = [blocks.take(size) for size in sizes]
        held.append(blocks.held)
        places = sorted((b.bytes.data_ptr(), b.bytes.data_ptr() + len(b.bytes)) for each in lent for b in each)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))
        assert all(size <= sum(len(b.bytes) for b in each) for size, each in zip(sizes, lent, strict=True))
        random.shuffle(lent)
        for each in lent:
            blocks.give(each)
    assert held[0] == held[1] <= 2 * sum(sizes) + Blocks.CHUNK
