"""Schedules of random programs, replayed over plain sets: no budget is exceeded and nothing is read that is not there."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchhalo.parallel.streaming.schedule import BudgetError, Schedule, order, plan


class Step(NamedTuple):
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    after: tuple[tuple[int, int], ...]


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
        sizes[len(sizes)] = draw(st.integers(0, 9))
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
            shards[shard].append(Step(frozenset(own | writes), frozenset(writes), frozenset(makes), after))

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
    moved = peak = 0
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
        else:
            del device[memory]
        used = sum(case.sizes[m] for m in device)
        peak = max(peak, used)
        assert used <= budget
    assert places == [len(steps) for steps in case.shards], "all steps ran"
    assert not device, "all memory is freed"
    assert found.moved == moved and found.peak >= peak


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(0, 40))
def test_a_schedule_keeps_to_the_budget(case: Case, more: int) -> None:
    least = max((sum(case.sizes[m] for m in step.reads | step.makes) for steps in case.shards for step in steps), default=0)
    budget = least + more
    replay(case, plan(case.shards, case.forward, case.sizes, budget, case.given), budget)
    if least:
        with pytest.raises(BudgetError, match="bytes are needed at a time, the budget is"):
            plan(case.shards, case.forward, case.sizes, least - 1, case.given)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_without_a_budget_only_what_is_given_moves_and_once(case: Case) -> None:
    found = plan(case.shards, case.forward, case.sizes, math.inf, case.given)
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
