"""Results of simple ops that a backward reads, computed again instead of kept from the forward.

A normalized, activated and cast image lies three times in memory for the backward, and an image of half the size tells all of
it. What is computed again comes from the same ops on the same values, so the numbers do not change; no collective is repeated,
so each shard decides alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from torchhalo.parallel.streaming.trace import Program
from torchhalo.torch_internals.recording import Instruction, View, mapped

aten = torch.ops.aten

#: Ops that are not pointwise by their tags, yet cost little beside the bus, and give the same again.
_SIMPLE = {
    aten._to_copy,
    aten.to,
    aten.copy_,
    aten.cat,
    aten.fill_,
    aten.zero_,
    aten.zeros_like,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.constant_pad_nd,
    aten.prelu,
    aten._prelu_kernel,
    aten.batch_norm_elemt,
}
#: What it takes to compute something again may be so many times its bytes: some of what moving it over the bus takes.
MOST = 16
#: Smaller than this part of the largest storage, it is kept.
SMALL = 1 / 128


class _State(NamedTuple):
    """A storage after so many of the instructions that made or wrote it."""

    storage: int
    changes: int


class _Way(NamedTuple):
    """How a state is made: by which instructions, what they read and write, and from which large storages that are kept."""

    states: frozenset[_State]
    leaves: frozenset[int]


def recomputing(program: Program) -> Program:
    """A program that gives the same and keeps less for its backward; the same program, if there is nothing to gain."""
    found = _Recomputation(program)
    found.choose()
    return found.program_of() if found.chosen else program


class _Recomputation:
    def __init__(self, program: Program):
        self._program = program
        self._sizes = list(program.sizes)
        self._forward = program.instructions[: program.forward]
        self._backward = program.instructions[program.forward :]
        self._history: dict[int, list[int]] = defaultdict(list)
        for number, instruction in enumerate(self._forward):
            for storage in instruction.writes | instruction.makes:
                self._history[storage].append(number)
        resident = {view.storage for view in program.model.values()} | set(program.constants)
        least = max(program.sizes, default=0) * SMALL
        self._large = {s for s, size in enumerate(program.sizes) if size > least} - resident
        #: What the backward writes to, or gives away, has other values later.
        self._changed = {storage for instruction in self._backward for storage in instruction.writes}
        self._changed |= {
            piece.view.storage for each in (program.input_gradients, program.gradients) for piece in each.values()
        }
        self._kept = {s for each in self._backward for s in each.reads & self._large if self._history[s]}
        self.chosen: dict[int, _Way] = {}
        self._ways: dict[_State, _Way | None] = {}

    def choose(self) -> None:
        """Choose what is computed again: what costs little and, in sum, needs less to be kept than it takes."""
        sizes = self._program.sizes
        for storage in sorted(self._kept - self._changed, key=lambda s: self._history[s][-1]):
            way = self._replayed(_State(storage, len(self._history[storage])))
            if way is not None and self._cost(way) <= MOST * sizes[storage]:
                self.chosen[storage] = way
        losing: set[int] = {-1}
        while losing:
            gains: dict[int, float] = defaultdict(float)
            for storage, way in self.chosen.items():
                for leaf in way.leaves - self._kept:
                    gains[leaf] += sizes[storage] / len(way.leaves - self._kept)
            losing = {leaf for leaf, gain in gains.items() if gain <= sizes[leaf]}
            self.chosen = {storage: way for storage, way in self.chosen.items() if not losing & way.leaves}

    def _way(self, state: _State) -> _Way | None:
        """How to have ``state`` in the backward, kept or by simple ops; None if there is no way."""
        storage = state.storage
        there = state.changes == len(self._history[storage]) and storage not in self._changed
        kept = storage not in self._large or (storage in self._kept and storage not in self.chosen)
        if there and kept:
            return _Way(frozenset(), frozenset([storage]) & self._large)
        if state not in self._ways:
            self._ways[state] = self._replayed(state)
        found = self._ways[state]
        return _Way(frozenset(), frozenset([storage])) if found is None and there else found

    def _replayed(self, state: _State) -> _Way | None:
        numbers = self._history[state.storage][: state.changes]
        if not numbers or state.storage not in self._forward[numbers[0]].makes:
            return None
        states, leaves = {state}, set[int]()
        for number in numbers:
            instruction = self._forward[number]
            if not _is_simple(instruction) or (instruction.writes | instruction.makes) != {state.storage}:
                return None
            for read in instruction.reads - {state.storage}:
                way = self._way(self._at(read, number))
                if way is None:
                    return None
                states |= way.states
                leaves |= way.leaves
        return _Way(frozenset(states), frozenset(leaves))

    def _at(self, storage: int, number: int) -> _State:
        """A storage as an instruction of the forward finds it."""
        return _State(storage, sum(each < number for each in self._history[storage]))

    def _cost(self, way: _Way) -> int:
        numbers = (n for state in way.states for n in self._history[state.storage][: state.changes])
        used = (self._forward[number].reads | self._forward[number].makes for number in numbers)
        return sum(self._program.sizes[storage] for each in used for storage in each)

    def program_of(self) -> Program:
        """The program that computes again what was chosen."""
        instructions = list(self._forward)
        fresh: dict[_State, int] = {}

        def storage_of(storage: int, number: int | None) -> int:
            """Where the values of a storage are that an instruction of the forward, or any of the backward, reads."""
            state = _State(storage, len(self._history[storage])) if number is None else self._at(storage, number)
            return fresh.get(state, storage)

        def make(way: _Way) -> None:
            new = sorted(way.states - fresh.keys(), key=lambda s: self._history[s.storage][s.changes - 1])
            for state in new:
                numbers = self._history[state.storage][: state.changes]
                target = len(self._sizes)
                self._sizes.append(self._program.sizes[state.storage])
                for number in numbers:
                    places = {s: storage_of(s, number) for s in self._forward[number].reads}
                    instructions.append(_moved(self._forward[number], places | {state.storage: target}))
                fresh[state] = target

        for instruction in self._backward:
            for storage in sorted(instruction.reads & self.chosen.keys()):
                make(self.chosen[storage])
            places = {s: storage_of(s, None) for s in instruction.reads & self.chosen.keys()}
            instructions.append(_moved(instruction, places))
        return self._program._replace(instructions=instructions, sizes=self._sizes)


def _is_simple(instruction: Instruction) -> bool:
    if (
        instruction.group is not None
        or instruction.draw is not None
        or torch.Tag.nondeterministic_seeded in instruction.op.tags
    ):
        return False
    return torch.Tag.pointwise in instruction.op.tags or instruction.op.overloadpacket in _SIMPLE


def _moved(instruction: Instruction, places: dict[int, int]) -> Instruction:
    """The same on other storages."""

    def view(each: View) -> View:
        return each._replace(storage=places.get(each.storage, each.storage))

    def storages(each: Iterable[int]) -> frozenset[int]:
        return frozenset(places.get(storage, storage) for storage in each)

    args, kwargs = mapped(View, view, (instruction.args, instruction.kwargs))
    return instruction._replace(
        args=args,
        kwargs=kwargs,
        results=tuple((place, view(each)) for place, each in instruction.results),
        reads=storages(instruction.reads),
        writes=storages(instruction.writes),
        makes=storages(instruction.makes),
    )
