"""Copies to and from the host beside computation: saved as soon as they can be, loaded before they are needed.

A device copies in both directions while it computes, each direction in the order in which copies were asked for. So a schedule
whose copies stand where they are due is rewritten: values are saved when they are final, not when they must go, and loaded as
early as the bus needs and the budget allows. What is on its way counts as being on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from torchhalo.parallel.streaming.schedule import Action, BudgetError, Memory, Schedule, Work, plan

#: Bytes per second between a device and its host in one direction: PCIe 5 with 16 lanes, as measured on an H200.
BUS = 55e9
#: Bytes per second that ops read and write, and operations per second of convolutions and products, on an H200 in half types.
RATE, FLOPS = 2.5e12, 4e14
#: Seconds of a launch.
LAUNCH = 5e-6
#: Which parts of the budget are tried for what is loaded before it is needed.
RESERVES = (0, 1 / 8, 1 / 4)


def quickest(
    shards: Sequence[Sequence[Work]],
    forward: Sequence[int],
    sizes: Mapping[Any, int],
    budget: float = inf,
    given: Collection[Memory] = (),
    reserves: Sequence[float] = RESERVES,
) -> Schedule:
    """As `schedule.plan`, with copies beside computation; of some with different ``reserves`` the quickest, as estimated.

    Raises:
        BudgetError: A step alone needs more.
    """
    best: Schedule | None = None
    for reserve in reserves:
        try:
            due = plan(shards, forward, sizes, budget * (1 - reserve), given)
        except BudgetError:
            if best is None:
                raise
            continue
        found = overlapped(due, shards, sizes, budget)
        if best is None or found.seconds < best.seconds:
            best = found
        if not found.host:
            break
    assert best is not None
    return best


class _Load(NamedTuple):
    """Memory that the host gives back for step ``due``, and may give back before step ``first``."""

    memory: Memory
    first: int
    due: int


def overlapped(schedule: Schedule, shards: Sequence[Sequence[Work]], sizes: Mapping[Any, int], budget: float) -> Schedule:
    """The same steps in the same order, with copies moved to where they run beside computation."""
    runs = [action for action in schedule.actions if action.kind == "run"]
    steps = [shards[run.shard][run.number] for run in runs]
    before: list[list[Action]] = [[] for _ in runs]
    after: list[list[Action]] = [[] for _ in runs]
    loads: list[_Load] = []
    dropped: dict[Memory, int] = {}
    written: dict[Memory, int] = {}
    on_host: set[Memory] = set()
    usage: list[int] = []
    used = time = 0
    turn = sum(action.kind == "run" for action in schedule.actions[: schedule.forward])
    for action in schedule.actions:
        memory = action.memory
        if action.kind == "run":
            step = steps[time]
            used += sum(sizes[made] for made in step.makes)
            usage.append(used + step.workspace)
            written |= dict.fromkeys([*step.makes, *step.writes], time)
            on_host.difference_update(step.writes)
            time += 1
        elif action.kind == "save":
            after[written[memory]].append(action)
            on_host.add(memory)
        elif action.kind == "load":
            used += sizes[memory]
            if memory in on_host:
                loads.append(_Load(memory, dropped[memory], time))
            else:
                before[time].append(action)
        elif action.kind == "drop":
            used -= sizes[memory]
            dropped[memory] = time
            before[time].append(action)
        else:
            used -= sizes[memory]
            after[time - 1].append(action)
    for load in _earlier(loads, usage, [_seconds(step, sizes) for step in steps], sizes, budget, turn):
        before[load.due].append(Action("load", memory=load.memory))
    actions: list[Action] = []
    forward = 0
    for time, run in enumerate(runs):
        forward = len(actions) if time == turn else forward
        actions += [*before[time], run, *after[time]]
    return measured(actions, forward if turn < len(runs) else len(actions), shards, sizes)


def _earlier(
    loads: Sequence[_Load], usage: list[int], seconds: Sequence[float], sizes: Mapping[Any, int], budget: float, turn: int
) -> list[_Load]:
    """The loads, each due before the step at which it is best asked for; none leaves its half."""
    clock = [0.0]
    for each in seconds:
        clock.append(clock[-1] + each)
    starts: list[float] = []  # the latest at which each still comes in time, as each waits for those before it
    free = inf
    for load in reversed(loads):
        free = min(free, clock[load.due]) - sizes[load.memory] / BUS
        starts.append(free)
    found: list[_Load] = []
    asked = 0
    for load, start in zip(loads, reversed(starts), strict=True):
        least = max(load.first, asked, turn if load.due >= turn else 0)
        time = load.due
        while time > least and clock[time] > start and usage[time - 1] + sizes[load.memory] <= budget:
            time -= 1
            usage[time] += sizes[load.memory]
        asked = time
        found.append(load._replace(due=time))
    return found


def measured(actions: Sequence[Action], forward: int, shards: Sequence[Sequence[Work]], sizes: Mapping[Any, int]) -> Schedule:
    """A schedule of these actions, with what it takes; what nothing reads again is forgotten on the host at once."""
    last = {action.memory: number for number, action in enumerate(actions) if action.kind == "load"}
    kept: list[Action] = []
    on_host: set[Memory] = set()
    ready: dict[Memory, float] = {}
    saved: dict[Memory, float] = {}
    used = peak = moved = held = host = turn = 0
    compute = inward = outward = 0.0

    def forget(memories: Collection[Memory]) -> None:
        nonlocal held
        held -= sum(sizes[memory] for memory in on_host.intersection(memories))
        on_host.difference_update(memories)

    for number, action in enumerate(actions):
        if number == forward:
            turn = len(kept)
        kept.append(action)
        memory = action.memory
        if action.kind == "run":
            step = shards[action.shard][action.number]
            used += sum(sizes[made] for made in step.makes)
            peak = max(peak, used + step.workspace)
            compute = max([compute, *(ready.pop(read) for read in step.reads if read in ready)]) + _seconds(step, sizes)
            forget(frozenset(step.writes))
            continue
        size = sizes[memory]
        if action.kind == "load":
            used += size
            moved += size
            peak = max(peak, used)
            inward = max(inward, compute, saved.get(memory, 0.0)) + size / BUS
            ready[memory] = inward
            if memory in on_host and last[memory] == number:
                kept.append(Action("forget", memory=memory))
                forget([memory])
        elif action.kind == "save":
            moved += size
            held += size
            on_host.add(memory)
            host = max(host, held)
            outward = saved[memory] = max(outward, compute) + size / BUS
        else:
            used -= size
            compute = max(compute, saved.get(memory, 0.0))
            if action.kind == "free":
                forget([memory])
    forward = turn if forward < len(actions) else len(kept)
    return Schedule(kept, forward, peak, moved, host, max(compute, inward, outward))


def _seconds(step: Work, sizes: Mapping[Any, int]) -> float:
    """What a step takes on the device, about."""
    return LAUNCH + max(sum(sizes[memory] for memory in {*step.reads, *step.makes}) / RATE, step.flops / FLOPS)
