"""What the programs of all shards do: which memory each step needs, and for which steps of other shards it waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch

from torchhalo.geometry import Box, Span
from torchhalo.parallel.streaming.collectives import COLLECTIVES
from torchhalo.parallel.streaming.trace import Piece, Program
from torchhalo.torch_internals.recording import Instruction, View


class Memory(NamedTuple):
    """A storage of a shard's program."""

    shard: int
    storage: int


class Step(NamedTuple):
    """One thing that a shard does.

    Attributes:
        kind: "compute" runs the instruction; "send" makes what a collective sends available; "receive" takes what others sent
            to this shard; "output", "update" and "gradient" give results away.
        instruction: For the first three.
        key: Of a result: the number of the output or input, or the name of the parameter or buffer.
        piece: The result.
        reads: All memory that must be there, ``writes`` included.
        writes: Memory that is changed.
        makes: Memory that is new.
        after: Steps of other shards, as (shard, number), that must have run.
        sends: What each member of the group sends by, for "receive".
        workspace: Bytes that the kernel takes on top while it runs.
    """

    kind: str
    instruction: Instruction | None
    reads: frozenset[Memory]
    writes: frozenset[Memory] = frozenset()
    makes: frozenset[Memory] = frozenset()
    after: tuple[tuple[int, int], ...] = ()
    key: object = None
    piece: Piece | None = None
    sends: tuple[Instruction, ...] = ()
    workspace: int = 0

    @property
    def flops(self) -> int:
        return 0 if self.instruction is None or self.kind != "compute" else self.instruction.flops


class Steps(NamedTuple):
    """All steps of one shard, of which the first ``forward`` are forward."""

    steps: list[Step]
    forward: int


def all_steps(programs: Sequence[Program]) -> list[Steps]:
    """The steps of all shards."""
    drafts = [_Draft(shard, program) for shard, program in enumerate(programs)]
    for draft in drafts:
        draft.build()
    for draft in drafts:
        draft.connect(drafts)
    return [Steps(draft.steps, draft.forward) for draft in drafts]


class _Draft:
    """The steps of one shard, while they are made."""

    def __init__(self, shard: int, program: Program):
        self._shard, self._program = shard, program
        self.steps: list[Step] = []
        self.forward = 0
        #: Where each collective is sent, by its group and its number among those of the group.
        self.sent: dict[tuple[tuple[int, ...], int], tuple[int, Instruction]] = {}
        self._received: dict[int, tuple[tuple[int, ...], int]] = {}
        # The model's own memory is always there, but for what is written, of which each shard has a copy.
        written = {storage for instruction in program.instructions for storage in instruction.writes}
        self._updated = {name: view for name, view in program.model.items() if view.storage in written}
        resident = {view.storage for view in program.model.values()} | set(program.constants)
        self._resident = resident - {view.storage for view in self._updated.values()}

    def build(self) -> None:
        program = self._program
        needed = needed_instructions(program)
        last_write = {s: n for n, i in enumerate(program.instructions) for s in (*i.writes, *i.makes)}
        counts: Counter[tuple[int, ...]] = Counter()
        waiting: dict[int, tuple[Instruction, tuple[tuple[int, ...], int]]] = {}
        gradients: dict[int, list[tuple[object, Piece]]] = {}
        for key, piece in [*program.gradients.items(), *program.input_gradients.items()]:
            gradients.setdefault(last_write.get(piece.view.storage, -1), []).append((key, piece))

        def receive(storages: frozenset[int]) -> None:
            for storage in sorted(storages & waiting.keys()):
                instruction, call = waiting.pop(storage)
                self._received[len(self.steps)] = call
                self.steps.append(Step("receive", instruction, frozenset(), makes=self._memory(instruction.makes)))

        for number, instruction in enumerate(program.instructions):
            if number == program.forward:
                self._finish_forward(receive, written_before=number)
            if number in needed:
                receive(instruction.reads)
                if instruction.group is None:
                    self._compute(instruction)
                else:
                    call = instruction.group, counts[instruction.group]
                    counts[instruction.group] += 1
                    self._send(instruction, call, changed=last_write.get(_sent(instruction).storage, -1) > number)
                    for storage in instruction.makes:
                        waiting[storage] = instruction, call
            for key, piece in gradients.get(number, ()):
                receive(frozenset([piece.view.storage]))
                self.steps.append(Step("gradient", None, self._memory([piece.view.storage]), key=key, piece=piece))
        if program.forward == len(program.instructions):
            self._finish_forward(receive, written_before=program.forward)
        for key, piece in gradients.get(-1, ()):
            self.steps.append(Step("gradient", None, self._memory([piece.view.storage]), key=key, piece=piece))
        if program.forward < len(program.instructions):
            self._update(range(program.forward, len(program.instructions)))

    def _finish_forward(self, receive: Callable[[frozenset[int]], None], written_before: int) -> None:
        for number, piece in self._program.outputs.items():
            receive(frozenset([piece.view.storage]))
            self.steps.append(Step("output", None, self._memory([piece.view.storage]), key=number, piece=piece))
        self._update(range(written_before))
        self.forward = len(self.steps)

    def _update(self, numbers: range) -> None:
        """The first shard gives the model what was written to its parameters and buffers; all have written the same."""
        written = {storage for number in numbers for storage in self._program.instructions[number].writes}
        for name, view in self._updated.items():
            if self._shard == 0 and view.storage in written:
                piece = Piece(view, Box(tuple(Span(0, size) for size in view.shape)))
                self.steps.append(Step("update", None, self._memory([view.storage]), key=name, piece=piece))

    def _compute(self, instruction: Instruction) -> None:
        writes, makes = self._memory(instruction.writes), self._memory(instruction.makes)
        workspace = workspace_bytes(instruction) if self._program.device == "cuda" else 0
        reads = self._memory(instruction.reads) | writes
        self.steps.append(Step("compute", instruction, reads, writes, makes, workspace=workspace))

    def _send(self, instruction: Instruction, call: tuple[tuple[int, ...], int], changed: bool) -> None:
        """Others read it later; where it is written to meanwhile, a copy of it."""
        if changed:
            copied = self._copied(_sent(instruction))
            self._compute(copied)
            instruction = instruction._replace(args=(copied.results[0][1], *instruction.args[1:]))
        self.sent[call] = len(self.steps), instruction
        self.steps.append(Step("send", instruction, self._memory([_sent(instruction).storage])))

    def _copied(self, view: View) -> Instruction:
        sizes = self._program.sizes
        storage, stride = len(sizes), torch.empty(view.shape, device="meta").stride()
        sizes.append(view.dtype.itemsize * prod(view.shape))
        target = View(storage, view.dtype, view.shape, stride, 0)
        contiguous = {"memory_format": torch.contiguous_format}
        memory = frozenset([view.storage]), frozenset[int](), frozenset([storage])
        return Instruction(torch.ops.aten.clone.default, (view,), contiguous, ((0, target),), *memory, None, None, "")

    def connect(self, drafts: Sequence[_Draft]) -> None:
        """Let each step that receives know what it takes from whom."""
        for number, (group, count) in self._received.items():
            instruction = self.steps[number].instruction
            assert instruction is not None
            sends = [drafts[member].sent[group, count] for member in group]
            takes = [place for place in range(len(group)) if _takes(instruction, place)]
            reads = [drafts[group[place]]._memory([_sent(sends[place][1]).storage]) for place in takes]
            self.steps[number] = self.steps[number]._replace(
                reads=frozenset().union(*reads),
                after=tuple((group[place], sends[place][0]) for place in takes),
                sends=tuple(each for _, each in sends),
            )

    def _memory(self, storages: Iterable[int]) -> frozenset[Memory]:
        return frozenset(Memory(self._shard, storage) for storage in storages if storage not in self._resident)


def _sent(instruction: Instruction) -> View:
    view = instruction.args[0]
    if instruction.op._schema.name.split("::")[1] not in COLLECTIVES or not isinstance(view, View):
        raise NotImplementedError(f"stream: no rule for the collective {instruction.op} in {instruction.module or 'the model'}")
    return view


def _takes(instruction: Instruction, place: int) -> bool:
    """Whether a collective brings anything from the member at ``place`` of its group."""
    return "all_to_all_single" not in instruction.op._schema.name or bool(instruction.args[1][place])


def workspace_bytes(instruction: Instruction) -> int:
    """What a kernel takes for itself on a GPU: cuDNN turns contiguous images around to channels-last, and results back."""
    if instruction.op is torch.ops.aten.convolution.default:
        images = [instruction.args[0], *(view for _, view in instruction.results)]
    elif instruction.op is torch.ops.aten.convolution_backward.default:
        images = list(instruction.args[:2])  # the gradient, and the input or its gradient
    else:
        return 0
    around = [view for view in images if len(view.shape) > 3 and view.stride[1] != 1]
    return sum(prod(view.shape) * view.dtype.itemsize for view in around)


def needed_instructions(program: Program) -> set[int]:
    """The instructions on which a result depends; collectives are all needed, as other shards may depend on them."""
    results = (program.outputs, program.input_gradients, program.gradients)
    wanted = {piece.view.storage for pieces in results for piece in pieces.values()} | {
        view.storage for view in program.model.values()
    }
    needed: set[int] = set()
    for number in reversed(range(len(program.instructions))):
        instruction = program.instructions[number]
        if instruction.group is not None or not wanted.isdisjoint(instruction.makes | instruction.writes):
            needed.add(number)
            wanted |= instruction.reads
    return needed
