"""Run a schedule: real tensors on the device, what waits on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from torchhalo.parallel.streaming import collectives
from torchhalo.parallel.streaming.host import Blocks, host_for
from torchhalo.parallel.streaming.schedule import Action, Schedule
from torchhalo.parallel.streaming.steps import Memory, Step
from torchhalo.parallel.streaming.trace import Piece, Program
from torchhalo.torch_internals.recording import Instruction, View, mapped

#: Gives the values of an input or a seed, by its number: a part of it, as a tensor on any device.
Read = Callable[[Piece], torch.Tensor]


class Executor:
    """Runs the actions of a schedule.

    Attributes:
        peak: The most bytes that lay on the device at a time, without what the model itself holds.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        steps: Sequence[Sequence[Step]],
        schedule: Schedule,
        model: Mapping[str, torch.Tensor],
        device: torch.device,
        inputs: Mapping[int, Read],
        result: Callable[[Step, torch.Tensor], None],
        blocks: Blocks,
    ):
        self._programs, self._steps, self._schedule = programs, steps, schedule
        self._model, self._device, self._result = model, device, result
        self._readers: dict[Memory, Callable[[torch.UntypedStorage], None]] = {}
        self._memory: dict[Memory, torch.UntypedStorage] = {}
        self._constants: dict[Memory, torch.UntypedStorage] = {}
        self._elsewhere: dict[Memory, torch.UntypedStorage | None] = {}
        self._host = host_for(device, blocks)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._draws: dict[int, Any] = {}
        self._at = 0
        self._used = self.peak = 0
        for shard, program in enumerate(programs):
            changed = {memory.storage for each in steps[shard] for memory in each.writes}
            for name, view in program.model.items():
                if view.storage in changed:
                    before = model[name].detach().clone()  # of which each shard has a copy
                    self._readers[Memory(shard, view.storage)] = partial(_fill, view, before)
                else:
                    self._constants[Memory(shard, view.storage)] = _held(model[name].detach(), view)
            for number, value in program.constants.items():
                self._constants[Memory(shard, number)] = value.untyped_storage()
        self.give(inputs, [program.inputs for program in programs])

    def give(self, readers: Mapping[int, Read], pieces: Sequence[Mapping[int, Piece]]) -> None:
        """Let memory be read from where its values are."""
        for shard, found in enumerate(pieces):
            for number, piece in found.items():
                self._readers[Memory(shard, piece.view.storage)] = _reading(readers[number], piece)

    def run(self, until: int, progress: Callable[[int], None] = lambda done: None) -> None:
        """Do all actions up to number ``until``."""
        # The ops were cast when they were traced.
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False), self._on_stream():
            for number in range(self._at, until):
                self._act(self._schedule.actions[number])
                progress(number)
        self._at = until

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Memory is lent and reused in the order of one stream, whichever the caller is on."""
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def close(self) -> None:
        """Let all memory go."""
        with self._on_stream():
            self._host.close()  # before memory that it copies
            self._memory.clear()

    def _act(self, action: Action) -> None:
        memory = action.memory
        if action.kind == "run":
            self._step(action.shard, self._steps[action.shard][action.number])
        elif action.kind == "load":
            assert isinstance(memory, Memory)
            storage = self._new(memory)
            if not self._host.load(memory, storage):
                self._readers[memory](storage)
        elif action.kind == "save":
            assert isinstance(memory, Memory)
            self._host.save(memory, self._memory[memory])
        elif action.kind == "forget":
            self._host.forget(memory)
        else:
            assert isinstance(memory, Memory)
            self._host.wait(memory)
            self._used -= self._memory.pop(memory).nbytes()
            if action.kind == "free":
                self._host.forget(memory)
                self._elsewhere.pop(memory, None)

    def _step(self, shard: int, step: Step) -> None:
        for memory in step.reads:
            self._host.wait(memory, reading=memory not in step.writes)
        for memory in step.writes:
            self._host.forget(memory)
        if step.kind == "compute":
            assert step.instruction is not None
            self._compute(shard, step.instruction)
        elif step.kind == "receive":
            assert step.instruction is not None
            self._receive(shard, step)
        elif step.kind != "send":
            assert step.piece is not None
            self._result(step, self._tensor(shard, step.piece.view))

    def _compute(self, shard: int, instruction: Instruction) -> None:
        args, kwargs = mapped(View, partial(self._tensor, shard), (instruction.args, instruction.kwargs))
        if instruction.draw is not None and instruction.draw in self._draws:
            outs = self._draws[instruction.draw]
            if instruction.writes:
                args[0].copy_(outs[0])
        else:
            found = instruction.op(*args, **kwargs)
            outs = found if isinstance(found, (tuple, list)) else (found,)
            if instruction.draw is not None:
                outs = self._draws[instruction.draw] = tuple(out.clone() for out in outs)
        for place, view in instruction.results:
            self._keep(shard, view, outs[place], instruction)

    def _keep(self, shard: int, view: View, tensor: torch.Tensor | None, instruction: Instruction) -> None:
        """Put a result where the program has it: a kernel may choose other strides, return what it was given, or nothing."""
        memory = Memory(shard, view.storage)
        if tensor is None:
            self._new(memory)
            self._elsewhere[memory] = None
            return
        storage = tensor.untyped_storage()
        if tensor.device != self._device:  # the state of an attention's generator, which its backward reads where it is
            self._new(memory)
            self._elsewhere[memory] = storage
            return
        lies = tuple(tensor.stride()), tensor.storage_offset(), storage.nbytes(), tensor.is_conj(), tensor.is_neg()
        size = self._programs[shard].sizes[view.storage]
        known = {self._memory.get(Memory(shard, read)) for read in instruction.reads}
        shared = instruction.draw is not None or any(s is not None and s._cdata == storage._cdata for s in known)
        if (
            memory not in self._memory
            and lies == (view.stride, view.offset, size, view.conjugate, view.negative)
            and not shared
        ):
            self._add(memory, storage)
        else:
            if memory not in self._memory:
                self._new(memory)
            self._tensor(shard, view).copy_(tensor)

    def _new(self, memory: Memory) -> torch.UntypedStorage:
        storage = torch.UntypedStorage(self._programs[memory.shard].sizes[memory.storage], device=self._device)
        self._add(memory, storage)
        return storage

    def _add(self, memory: Memory, storage: torch.UntypedStorage) -> None:
        self._memory[memory] = storage
        self._used += storage.nbytes()
        self.peak = max(self.peak, self._used)

    def _tensor(self, shard: int, view: View) -> Any:
        memory = Memory(shard, view.storage)
        if memory in self._elsewhere:
            storage = self._elsewhere[memory]
            return None if storage is None else view.of(storage)
        return view.of(self._memory[memory] if memory in self._memory else self._constants[memory])

    def _receive(self, shard: int, step: Step) -> None:
        """What a collective brings this shard, put together from what the members of its group sent."""
        instruction = step.instruction
        assert instruction is not None and instruction.group is not None
        ((_, view),) = instruction.results
        self._new(Memory(shard, view.storage))
        group = instruction.group
        known = {member for member, _ in step.after}
        given = [self._tensor(group[n], each.args[0]) if group[n] in known else None for n, each in enumerate(step.sends)]
        collectives.receive(collectives.Received(self._tensor(shard, view), given, instruction, step.sends, group.index(shard)))


def _fill(view: View, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
    view.of(storage).copy_(tensor)


def _held(tensor: torch.Tensor, view: View) -> torch.UntypedStorage:
    """The memory of a parameter, or, where it is part of a larger one, of a copy that lies as ``view`` does."""
    if (tensor.stride(), tensor.storage_offset()) == (view.stride, view.offset) and view.offset == 0:
        return tensor.untyped_storage()
    copied = torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device=tensor.device)
    return copied.copy_(tensor).untyped_storage()


def _reading(read: Read, piece: Piece) -> Callable[[torch.UntypedStorage], None]:
    def fill(storage: torch.UntypedStorage) -> None:
        piece.view.of(storage).copy_(read(piece))

    return fill
