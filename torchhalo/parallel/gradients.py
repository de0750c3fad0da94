"""Gradients of replicated parameters: summed over the ranks once, many in one collective, while backward goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import unserializable_hook

from torchhalo.torch_internals import autograd, collectives, dtensors

#: How many bytes of gradients are summed by one collective: few enough that the first leave while backward goes on.
BUCKET = 8 * 2**20
MARK = "_torchhalo_watched"  # of a parameter that has hooks


class Reducer:
    """Sums the gradients of parameters that are replicated over a mesh, each once per backward.

    A gradient that arrives as partial sums joins a bucket; a full bucket is sent at once, the rest when backward ends, and then
    all are waited for. When ``backward()`` returns, each ``grad`` is placed as its parameter is, and has been added to what was
    there before. The order of arrival, and so that of the collectives, is that of the autograd graph, the same on all ranks.

    Attributes:
        on: Whether gradients are summed; if not, they gather as partial sums.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.on = mesh, True
        self._model: Callable[[], nn.Module | None] = lambda: None
        # One for each backward that is running: its callback holds it, and lets go of it also where backward fails.
        self._passes: WeakValueDictionary[int, _Pass] = WeakValueDictionary()

    def watch(self, model: nn.Module) -> None:
        """Sum the gradients of the model's parameters that are replicated over the mesh; may be called again."""
        self._model = ref(model)
        new = [p for p in _parameters(model) if isinstance(p, DTensor) and not _watched(p) and p.requires_grad]
        if not new:
            return
        others = {id(p) for module in model.modules() if isinstance(module, FSDPModule) for p in module.parameters()}
        for parameter in new:
            if parameter.device_mesh == self.mesh and id(parameter) not in others and not _watched(parameter):
                setattr(parameter, MARK, _Mark(id(parameter)))
                parameter.register_hook(self._arrive)
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    @unserializable_hook  # type: ignore[untyped-decorator]
    def _arrive(self, grad: torch.Tensor) -> None:
        if self.on:
            self._pass()

    def _accumulated(self, parameter: DTensor) -> None:
        if self.on:
            self._pass().add(parameter)

    def _pass(self) -> _Pass:
        number = autograd.graph_task_id()
        running = self._passes.get(number)
        if running is None:
            model = self._model()
            running = self._passes[number] = _Pass(self.mesh, () if model is None else filter(_watched, _parameters(model)))
            autograd.after_backward(running.finish)
        return running


def _parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The model's parameters, shared ones more than once; in half the time that it takes to leave them out."""
    modules = [model]
    while modules:
        module = modules.pop()
        modules += [child for child in module._modules.values() if child is not None]
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter


class _Mark:
    """The mark of the parameter with this id; copies and files have none.

    A weak reference to the parameter would keep torch from moving it.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return type(None), ()


def _watched(parameter: nn.Parameter) -> bool:
    """Whether a parameter has hooks."""
    mark = getattr(parameter, MARK, None)
    return mark is not None and mark.number == id(parameter)


class _Piece(NamedTuple):
    """A gradient in a bucket, which it enters in the memory order of its parameter."""

    parameter: DTensor
    order: tuple[int, ...]

    def flat(self) -> torch.Tensor:
        grad = self.parameter.grad
        assert isinstance(grad, DTensor)
        return dtensors.local(grad).permute(self.order).reshape(-1)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The gradient in ``flat``, with the strides of its parameter, as the foreach ops of optimizers want them."""
        shape, strides, step = self.parameter.shape, self.parameter.stride(), 1
        for dim in reversed(self.order):
            if shape[dim] != 1 and strides[dim] != step:
                back = sorted(range(len(self.order)), key=self.order.__getitem__)
                return flat.view([shape[dim] for dim in self.order]).permute(back)
            step *= shape[dim]
        return flat.as_strided(shape, strides, flat.storage_offset())


class _Pass:
    """The gradients of one backward, which parameters get when it ends.

    Those that are summed already are put aside meanwhile: what is added to them would have to be summed alone.
    """

    def __init__(self, mesh: DeviceMesh, parameters: Iterable[Any]) -> None:
        self._mesh = mesh
        self._before: dict[DTensor, DTensor] = {}
        self._filling: dict[tuple[torch.dtype, tuple[int, ...]], list[_Piece]] = {}
        self._bytes: Counter[tuple[torch.dtype, tuple[int, ...]]] = Counter()
        self._sent: list[tuple[list[_Piece], torch.Tensor]] = []
        self._done: list[tuple[DTensor, DTensor]] = []
        for parameter in parameters:
            if isinstance(parameter.grad, DTensor) and parameter.grad.placements == parameter.placements:
                self._before[parameter], parameter.grad = parameter.grad, None

    def add(self, parameter: DTensor) -> None:
        grad = parameter.grad
        if not isinstance(grad, DTensor):
            return
        axes = tuple(axis for axis, placement in enumerate(grad.placements) if placement.is_partial("sum"))
        others = [p for axis, p in enumerate(grad.placements) if axis not in axes]
        if not axes or grad.requires_grad or others != [p for axis, p in enumerate(parameter.placements) if axis not in axes]:
            # Summed by the op itself, or to be differentiated again, or placed so that a sum does not suffice.
            if grad.placements != parameter.placements:
                grad = grad.redistribute(placements=parameter.placements)
            elif parameter not in self._before:
                return
            self._done.append((parameter, grad))
            parameter.grad = None
            return
        key = grad.dtype, axes
        pieces = self._filling.setdefault(key, [])
        strides = parameter.stride()
        pieces.append(_Piece(parameter, tuple(sorted(range(grad.ndim), key=lambda dim: -strides[dim]))))
        self._bytes[key] += parameter.numel() * grad.dtype.itemsize
        if self._bytes[key] >= BUCKET:
            self._send(key)

    def _send(self, key: tuple[torch.dtype, tuple[int, ...]]) -> None:
        pieces = self._filling.pop(key)
        del self._bytes[key]
        with torch.no_grad():
            flat = torch.cat([piece.flat() for piece in pieces])
            self._sent.append((pieces, collectives.start_all_reduce(flat, self._mesh, key[1], in_place=True)))
        for piece in pieces:
            piece.parameter.grad = None

    def finish(self) -> None:
        """Wait for all sums and give each parameter its own."""
        for key in list(self._filling):
            self._send(key)
        for pieces, flat in self._sent:
            values = collectives.wait(flat).split([prod(piece.parameter.shape) for piece in pieces])
            for piece, value in zip(pieces, values, strict=True):
                meta = dtensors.Meta(tuple(piece.parameter.shape), piece.parameter.stride(), value.dtype)
                grad = dtensors.wrap(piece.view(value), self._mesh, piece.parameter.placements, meta)
                self._done.append((piece.parameter, grad))
        self._sent.clear()
        for parameter, grad in self._done:
            self._place(parameter, grad)
        self._restore()

    def __del__(self) -> None:
        """Where backward has failed, all gradients are what they were before it."""
        for piece in [piece for pieces in self._filling.values() for piece in pieces]:
            piece.parameter.grad = None
        self._restore()

    def _restore(self) -> None:
        """Give back the gradients to which this backward has added nothing."""
        for parameter, grad in self._before.items():
            parameter.grad = grad
        self._before.clear()

    def _place(self, parameter: DTensor, grad: DTensor) -> None:
        before = self._before.pop(parameter, None)
        if before is None:
            parameter.grad = grad
        elif grad.requires_grad or before.requires_grad:
            parameter.grad = before + grad
        else:
            parameter.grad = before.add_(grad)
