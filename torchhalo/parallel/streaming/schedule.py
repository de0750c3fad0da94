"""In which order the steps of all shards run on one device, and what is moved to the host and back meanwhile.

Plain Python over sizes: the whole future is known, so what is used last is evicted first, and peak and traffic are known
before anything runs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

Memory = Hashable


class Work(Protocol):
    """What is asked of a step; `steps.Step` is one.

    Attributes:
        reads: Memory that must be on the device, ``writes`` included.
        makes: Memory that is new.
        after: Steps of other shards, as (shard, number), that must have run.
        workspace: Bytes that its kernel takes on top while it runs.
        flops: Of matrix products and convolutions.
    """

    @property
    def reads(self) -> Collection[Memory]: ...
    @property
    def writes(self) -> Collection[Memory]: ...
    @property
    def makes(self) -> Collection[Memory]: ...
    @property
    def after(self) -> Sequence[tuple[int, int]]: ...
    @property
    def workspace(self) -> int: ...
    @property
    def flops(self) -> int: ...


class Action(NamedTuple):
    """One thing that the device does: "run" step ``number`` of ``shard``, or something with ``memory``.

    It may "load" or "save" it. After "drop" it is loaded again later, from where it came or where it was saved; after "free" it
    is not. "forget" lets its copy on the host go.
    """

    kind: str
    shard: int = 0
    number: int = 0
    memory: Any = None


class Schedule(NamedTuple):
    """What the device does, and what that takes.

    Attributes:
        forward: How many of the actions are forward.
        peak: The most bytes on the device at a time, workspaces included.
        moved: Bytes that are loaded and saved.
        host: The most bytes that wait on the host at a time.
        seconds: An estimate, on an H200.
    """

    actions: list[Action]
    forward: int
    peak: int
    moved: int
    host: int = 0
    seconds: float = 0.0


class BudgetError(ValueError):
    """What one step needs at a time is more than the budget."""


def order(shards: Sequence[Sequence[Work]], starts: Sequence[int], stops: Sequence[int]) -> list[tuple[int, int]]:
    """The steps from ``starts`` to ``stops`` of each shard, as (shard, number), in an order in which none waits.

    A shard runs until it needs what another has not sent. Then the nearest one that can run goes on, as what it shares with
    its neighbours is still on the device; so a norm, for which all wait, turns the direction.

    Raises:
        RuntimeError: They wait for each other.
    """
    places = list(starts)
    found: list[tuple[int, int]] = []

    def ready(shard: int) -> bool:
        if places[shard] >= stops[shard]:
            return False
        return all(number < places[other] for other, number in shards[shard][places[shard]].after)

    current = 0
    while True:
        while ready(current):
            found.append((current, places[current]))
            places[current] += 1
        able = [shard for shard in range(len(shards)) if ready(shard)]
        if not able:
            break
        current = min(able, key=lambda shard: (abs(shard - current), shard))
    if any(place < stop for place, stop in zip(places, stops, strict=True)):
        raise RuntimeError(f"the shards wait for each other at steps {places} of {list(stops)}")
    return found


def plan(
    shards: Sequence[Sequence[Work]],
    forward: Sequence[int],
    sizes: Mapping[Any, int],
    budget: float = inf,
    given: Collection[Memory] = (),
) -> Schedule:
    """The actions that run all steps, forward ones first, with at most ``budget`` bytes on the device.

    Args:
        shards: The steps of each.
        forward: How many of them are forward.
        sizes: Of all memory, in bytes.
        given: Memory that can be read again from where it came, as long as it is not written to.

    Raises:
        BudgetError: A step alone needs more.
    """
    ends = [len(steps) for steps in shards]
    first = order(shards, [0] * len(shards), forward)
    steps = [*first, *order(shards, forward, ends)]
    uses: dict[Memory, list[int]] = defaultdict(list)
    for time, (shard, number) in enumerate(steps):
        step = shards[shard][number]
        for memory in {*step.reads, *step.makes}:
            uses[memory].append(time)
    for times in uses.values():
        times.reverse()  # the next one is the last of the list

    actions: list[Action] = []
    on_device: dict[Memory, int] = {}
    saved: set[Memory] = set(given)
    latest: list[tuple[float, int, Memory]] = []  # a heap by next use, the last first, with entries that are out of date
    used = peak = moved = count = turn = 0

    def room(wanted: int, kept: Collection[Memory]) -> None:
        nonlocal used, moved
        aside = []
        while used + wanted > budget:
            if not latest:
                raise BudgetError(f"{used + wanted:,} bytes are needed at a time, the budget is {int(budget):,}")
            when, tie, memory = heapq.heappop(latest)
            if memory not in on_device or -when != uses[memory][-1]:
                continue
            if memory in kept:
                aside.append((when, tie, memory))
                continue
            if memory not in saved:
                actions.append(Action("save", memory=memory))
                saved.add(memory)
                moved += sizes[memory]
            actions.append(Action("drop", memory=memory))
            used -= on_device.pop(memory)
        for entry in aside:
            heapq.heappush(latest, entry)

    for time, (shard, number) in enumerate(steps):
        if time == len(first):
            turn = len(actions)
        step = shards[shard][number]
        kept = {*step.reads, *step.makes}
        incoming = [memory for memory in kept if memory not in on_device]
        room(sum(sizes[memory] for memory in incoming) + step.workspace, kept)
        for memory in incoming:
            if memory not in step.makes:
                actions.append(Action("load", memory=memory))
                moved += sizes[memory]
            on_device[memory] = sizes[memory]
            used += sizes[memory]
        peak = max(peak, used + step.workspace)
        actions.append(Action("run", shard, number))
        saved.difference_update(step.writes)
        for memory in kept:
            uses[memory].pop()
            if uses[memory]:
                count += 1
                heapq.heappush(latest, (-uses[memory][-1], count, memory))
            else:
                actions.append(Action("free", memory=memory))
                used -= on_device.pop(memory)
                saved.discard(memory)
    return Schedule(actions, turn if len(first) < len(steps) else len(actions), peak, moved)
