"""What is known of a call from its shapes alone: the program of each shard, and the schedule of all."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch

from torchhalo.parallel.streaming.overlap import RESERVES, quickest
from torchhalo.parallel.streaming.recompute import recomputing
from torchhalo.parallel.streaming.schedule import BudgetError, Schedule
from torchhalo.parallel.streaming.steps import Memory, Steps, all_steps, needed_instructions, workspace_bytes
from torchhalo.parallel.streaming.trace import Call, Program, Returned, trace
from torchhalo.parallel.structures import tensors_in
from torchhalo.torch_internals.recording import Instruction, View


class Prepared(NamedTuple):
    """What is known of a call from its shapes alone.

    Attributes:
        shards: How many there are along each dim.
        traced: The programs as they were traced.
        programs: Those that run: they may compute again what the traced ones keep.
        resident: Bytes that are always on the device: parameters, their gradients, buffers and constants.
    """

    shards: tuple[int, ...]
    traced: list[Program]
    programs: list[Program]
    steps: list[Steps]
    schedule: Schedule
    returned: Returned
    resident: int

    def within(self, budget: float) -> Prepared:
        """The same with a schedule for another budget.

        Raises:
            BudgetError: A step alone needs more.
        """
        programs, steps, schedule = _fitted(self.traced, budget - self.resident)
        return self._replace(programs=programs, steps=steps, schedule=schedule)

    @property
    def least(self) -> int:
        """No budget below this one can do."""
        return self.resident + max(
            step.workspace + sum(self.programs[memory.shard].sizes[memory.storage] for memory in step.reads | step.makes)
            for each in self.steps
            for step in each.steps
        )


#: With a budget and no number of shards: the most that are tried along a dim.
MOST_SHARDS = 1024


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which would look again and again at millions of steps that stay."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def search(call: Call, shards: Sequence[int] | None, dims: Sequence[int] | None, budget: float) -> Prepared:
    """The call over ``shards``, or, if there are none given, over as few as the budget allows.

    Raises:
        BudgetError: The budget allows none.
    """
    if shards is not None:
        return prepare(call, shards, dims, budget)
    cut = tuple(dims or (2,))
    counts = [1] * len(cut)
    shape = next((tuple(x.shape) for x in tensors_in((call.args, call.kwargs))), ())
    left = budget - resident_bytes(call)
    while True:
        try:
            needed = least_bytes(trace(call, counts, prod(counts) // 2, dims)[0])  # before all others are traced
            if needed > left:
                held = f"{resident_bytes(call):,} of them by parameters, their gradients and buffers"
                raise BudgetError(
                    f"{resident_bytes(call) + needed:,} bytes are needed at a time, {held}; the budget is {budget:,}"
                )
            return prepare(call, counts, dims, budget)
        except BudgetError:
            if left < 0:
                raise
            sizes = [shape[dim] / count if shape else 0 for dim, count in zip(cut, counts, strict=True)]
            longest = max(range(len(counts)), key=sizes.__getitem__)
            if sizes[longest] < 2 or counts[longest] >= MOST_SHARDS:
                raise
            counts[longest] *= 2


def resident_bytes(call: Call) -> int:
    """What always lies on the device: parameters, buffers, and, in training, gradients of parameters."""
    total = sum(x.nbytes for x in [*call.model.parameters(), *call.model.buffers()])
    return total + (sum(p.nbytes for p in call.model.parameters() if p.requires_grad) if call.backward else 0)


def least_bytes(program: Program) -> int:
    """The most that one instruction reads and makes, without what is resident."""
    resident = {view.storage for view in program.model.values()} | set(program.constants)
    needed = (program.instructions[number] for number in needed_instructions(program))
    on_gpu = program.device == "cuda"
    return max(
        (workspace_bytes(each) * on_gpu + sum(program.sizes[s] for s in _used(each) - resident) for each in needed), default=0
    )


def _used(instruction: Instruction) -> frozenset[int]:
    return instruction.reads | instruction.writes | instruction.makes


def prepare(call: Call, shards: Sequence[int], dims: Sequence[int] | None, budget: float) -> Prepared:
    """Trace all shards and plan what the device does."""
    found = [trace(call, shards, rank, dims) for rank in range(prod(shards))]
    programs, returned = [program for program, _ in found], found[0][1]
    _check_draws(programs)
    resident = resident_bytes(call) + sum(value.nbytes for program in programs for value in program.constants.values())
    return Prepared(tuple(shards), programs, *_fitted(programs, budget - resident), returned, resident)


def _check_draws(programs: Sequence[Program]) -> None:
    """Equal draws give equal numbers, so they must be of one kind on all shards.

    Raises:
        NotImplementedError: They are not.
    """
    found: dict[int, tuple[object, object]] = {}
    for program in programs:
        for each in program.instructions:
            if each.draw is None:
                continue
            drawn = [view for _, view in each.results] or [arg for arg in each.args if isinstance(arg, View)][:1]
            kind = each.op, [(view.shape, view.dtype) for view in drawn]
            if found.setdefault(each.draw, kind) != kind:
                raise NotImplementedError(
                    f"stream: {each.op} in {each.module or 'the model'} draws other numbers on each shard"
                )


def _fitted(traced: list[Program], budget: float) -> tuple[list[Program], list[Steps], Schedule]:
    """The programs within a budget: where memory has to wait on the host, they compute some of it again if that is quicker."""
    steps = all_steps(traced)
    schedule = _scheduled(traced, steps, budget, RESERVES[:1])
    if not schedule.host:
        return traced, steps, schedule
    programs = [recomputing(program) for program in traced]
    if any(program is not other for program, other in zip(programs, traced, strict=True)):
        again = all_steps(programs)
        if _scheduled(programs, again, budget, RESERVES[:1]).seconds < schedule.seconds:
            return programs, again, _scheduled(programs, again, budget, RESERVES)
    return traced, steps, _scheduled(traced, steps, budget, RESERVES)


def _scheduled(programs: Sequence[Program], steps: Sequence[Steps], budget: float, reserves: Sequence[float]) -> Schedule:
    """What the device does with ``budget`` bytes beside what is resident."""
    sizes = {Memory(n, s): size for n, program in enumerate(programs) for s, size in enumerate(program.sizes)}
    given = {
        Memory(n, piece.view.storage)
        for n, program in enumerate(programs)
        for piece in [*program.inputs.values(), *program.seeds.values()]
    }
    given |= {Memory(n, view.storage) for n, program in enumerate(programs) for view in program.model.values()}
    return quickest([each.steps for each in steps], [each.forward for each in steps], sizes, budget, given, reserves)


def key_of(call: Call) -> object:
    """All on which what a call does may depend, but for values."""

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = None if value.is_meta else value.tolist()
            return tuple(value.shape), value.stride(), value.dtype, known
        if isinstance(value, dict):
            return tuple((key, describe(item)) for key, item in value.items())
        return tuple(map(describe, value)) if isinstance(value, (list, tuple)) else repr(value)

    modes = tuple(module.training for module in call.model.modules())
    held = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in call.model.named_parameters())
    kind = call.device.type
    cast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return describe((call.args, call.kwargs)), call.device, call.backward, call.wanted, modes, held, cast
