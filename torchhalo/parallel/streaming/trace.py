"""The program of one shard: the ops that its rank would run, written down on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchhalo.exchange import gathers, relayout
from torchhalo.exchange.debug import modules
from torchhalo.exchange.layout import layout
from torchhalo.geometry import Box, Span
from torchhalo.parallel.arrays import first_copy, placements_for
from torchhalo.parallel.edges import replace_tensors
from torchhalo.parallel.plain import plain_as_replicated
from torchhalo.parallel.start import without_values
from torchhalo.parallel.structures import mapped, tensors_in, without_grids
from torchhalo.torch_internals import dtensors, fake_tensors, redistribution, simulation, switch
from torchhalo.torch_internals.recording import Instruction, Recorder, View

#: The methods of a model that are streamed, where it has them.
METHODS = ("forward", "encode", "decode")


class Piece(NamedTuple):
    """A shard of a tensor in the memory of its program, and which box of the whole it is."""

    view: View
    box: Box


class Program(NamedTuple):
    """What one shard computes.

    Attributes:
        instructions: Forward, then backward.
        forward: How many of them are forward.
        sizes: Of its storages, in bytes.
        device: The kind of device.
        constants: Bytes of storages that hold what the model made before.
        model: Where parameters and buffers lie, by name.
        inputs: By number, of those that are read from the call's arguments.
        outputs: By number; of a tensor that several ranks hold, the first has it.
        seeds: Gradients of the outputs, by number.
        input_gradients: By number.
        gradients: Summands of the gradients of parameters, by name.
    """

    instructions: list[Instruction]
    forward: int
    sizes: list[int]
    device: str
    constants: dict[int, torch.Tensor]
    model: dict[str, View]
    inputs: dict[int, Piece]
    outputs: dict[int, Piece]
    seeds: dict[int, Piece]
    input_gradients: dict[int, Piece]
    gradients: dict[str, Piece]


class Call(NamedTuple):
    """What to trace: a call of a method of a model, of which tensors are on the meta device.

    Attributes:
        backward: With a backward from all outputs that have gradients.
        wanted: The numbers of the input tensors whose gradient is wanted.
    """

    model: nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    backward: bool
    wanted: frozenset[int]


class Returned(NamedTuple):
    """What a call returns: its structure with empty tensors, and their shapes and dtypes."""

    structure: Any
    tensors: list[dtensors.Meta]
    differentiable: list[bool]


def trace(call: Call, mesh_shape: Sequence[int], rank: int, dims: Sequence[int] | None) -> tuple[Program, Returned]:
    """The program of the shard at ``rank``, and what the call returns."""
    with switch.enable(), simulation.fake_world(math.prod(mesh_shape), rank):
        mesh = init_device_mesh(call.device.type, tuple(mesh_shape))
        model = without_values(call.model)
        for method in METHODS:
            model.__dict__.pop(method, None)  # which would stream again
        with fake_tensors.fake_tensor_mode():
            return _Tracer(call, model, mesh, dims).run()


class _Tracer:
    def __init__(self, call: Call, model: nn.Module, mesh: DeviceMesh, dims: Sequence[int] | None):
        self._call, self._model, self._mesh, self._dims = call, model, mesh, dims
        self._recorder = Recorder(modules.path)
        self._inputs: dict[int, Piece] = {}
        self._leaves: list[torch.Tensor] = []

    def run(self) -> tuple[Program, Returned]:
        call, recorder = self._call, self._recorder
        replace_tensors(self._model, lambda tensor: dtensors.replicated(self._fake(tensor), self._mesh))
        held = dict([*self._model.named_parameters(), *self._model.named_buffers()])
        views = {name: self._piece(tensor).view for name, tensor in held.items()}
        first = next((tensor.ndim for tensor in tensors_in((call.args, call.kwargs))), 0)
        args, kwargs = mapped(lambda tensor: self._input(tensor, first), (call.args, call.kwargs))
        with ExitStack() as scope:
            for context in (
                modules.watched(),
                gathers.watch(lambda gather: None),  # of a few elements; nobody waits for a wire here
                plain_as_replicated(),
                torch.set_grad_enabled(call.backward),
                recorder,
            ):
                scope.enter_context(context)
            try:
                return self._traced(views, args, kwargs)
            except Exception as error:
                op, module = recorder.failed or ("", "")
                where = f"{op} in {module or 'the model'}: " if op else ""
                raise RuntimeError(
                    f"stream: the model cannot be traced on shapes alone; {where}{type(error).__name__}: {error}"
                ) from error

    def _traced(self, views: dict[str, View], args: Any, kwargs: Any) -> tuple[Program, Returned]:
        call, recorder = self._call, self._recorder
        returned = without_grids(getattr(self._model, call.method)(*args, **kwargs))
        tensors = tensors_in(returned, objects=True)
        outputs = {number: piece for number, x in enumerate(tensors) if (piece := self._owned(x)) is not None}
        forward = len(recorder.instructions)
        seeds: dict[int, Piece] = {}
        input_gradients: dict[int, Piece] = {}
        gradients: dict[str, Piece] = {}
        if call.backward:
            started = {number: x for number, x in enumerate(tensors) if x.requires_grad}
            given = {number: self._seed(x) for number, x in started.items()}
            seeds = {number: self._piece(seed) for number, seed in given.items()}
            del recorder.instructions[forward:]  # which made these; their values are given
            # On this thread, where the op's module is known, and without autocast, as a user calls it.
            with torch.autograd.set_multithreading_enabled(False), torch.autocast(call.device.type, enabled=False):
                torch.autograd.backward(list(started.values()), list(given.values()))
            for number, x in enumerate(self._leaves):
                if x.grad is not None and (piece := self._owned(x.grad)) is not None:
                    input_gradients[number] = piece
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None and (piece := self._summand(parameter.grad)) is not None:
                    gradients[name] = piece
        program = Program(
            recorder.instructions,
            forward,
            recorder.sizes,
            call.device.type,
            recorder.constants,
            views,
            self._inputs,
            outputs,
            seeds,
            input_gradients,
            gradients,
        )
        structure = mapped(lambda tensor: tensor.new_empty(0, device="meta"), returned, objects=True)
        metas = [dtensors.meta(x) for x in tensors]
        return program, Returned(structure, metas, [bool(x.requires_grad) for x in tensors])

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=self._call.device)

    def _input(self, tensor: torch.Tensor, first: int) -> torch.Tensor:
        """A shard, or the whole, of an argument; one integer has its value, of which `item` then tells."""
        number = len(self._leaves)
        if not tensor.is_meta:
            whole = torch.tensor(tensor.tolist(), dtype=tensor.dtype, device=tensor.device)
            self._leaves.append(whole)
            self._inputs[number] = self._piece(whole)
            return whole
        placements: list[Placement] = [Replicate()] * self._mesh.ndim
        if tensor.ndim == first >= 3:
            placements = placements_for(tensor.shape, self._mesh.ndim, self._dims)
        box = layout(tensor.shape, self._mesh, placements).owned(self._place)
        stride = torch.empty_like(tensor).stride()
        shape = [span.size for span in box.spans]
        order = sorted(range(tensor.ndim), key=lambda dim: (-stride[dim], dim))
        local = torch.empty([shape[dim] for dim in order], dtype=tensor.dtype, device=self._call.device)
        local = local.permute([order.index(dim) for dim in range(tensor.ndim)])
        meta = dtensors.Meta(tuple(tensor.shape), stride, tensor.dtype)
        x = dtensors.wrap(local, self._mesh, placements, meta)
        if number in self._call.wanted:
            x.requires_grad_()
        self._leaves.append(x)
        self._inputs[number] = self._piece(x)
        return x

    @property
    def _place(self) -> tuple[int, ...]:
        found = self._mesh.get_coordinate()
        assert found is not None
        return tuple(found)

    def _piece(self, tensor: torch.Tensor) -> Piece:
        if not isinstance(tensor, DTensor):
            return Piece(self._recorder.view(tensor), Box(tuple(Span(0, size) for size in tensor.shape)))
        view = self._recorder.view(dtensors.local(tensor))
        return Piece(view, layout(tensor.shape, tensor.device_mesh, tensor.placements).owned(self._place))

    def _owned(self, tensor: torch.Tensor) -> Piece | None:
        """What this rank has of the whole, if it is the first of those that have it."""
        if not isinstance(tensor, DTensor):
            return None if any(self._place) else self._piece(tensor)
        with torch.no_grad():
            owned = first_copy(tensor.detach())
        return None if owned is None else Piece(self._recorder.view(owned[0]), owned[1])

    def _seed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A gradient of ``tensor``, sharded as it is."""
        if not isinstance(tensor, DTensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        placements = redistribution.reduced_placements(tensor.placements)
        shape = [span.size for span in layout(tensor.shape, self._mesh, placements).owned(self._place).spans]
        local = torch.empty(shape, dtype=tensor.dtype, device=self._call.device)
        return dtensors.wrap(local, self._mesh, placements, dtensors.meta(tensor))

    def _summand(self, gradient: torch.Tensor) -> Piece | None:
        """What this rank adds to the gradient of a parameter."""
        assert isinstance(gradient, DTensor)
        gradient = relayout.without_grids(gradient)
        kinds = zip(gradient.placements, self._place, strict=True)
        if any(at and not isinstance(p, Shard) and not p.is_partial("sum") for p, at in kinds):
            return None
        return self._piece(gradient)
