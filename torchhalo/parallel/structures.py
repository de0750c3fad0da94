"""What goes into a model and comes out of it: tensors in tuples, lists, dicts, dataclasses and distributions."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchhalo.exchange.memory import laid_out
from torchhalo.exchange.relayout import chunked
from torchhalo.torch_internals import dtensors, redistribution, stand_ins
from torchhalo.torch_internals.grid_shard import is_grid


def mapped(function: Callable[[Any], Any], value: Any, objects: bool = False) -> Any:
    """``value`` with ``function`` of every tensor in it: of nested tuples, lists and dicts.

    Args:
        objects: Also of what other objects have as attributes, such as dataclasses and distributions: of their copies.
    """
    return _mapped(function, value, objects, ())


def _mapped(function: Callable[[Any], Any], value: Any, objects: bool, around: tuple[int, ...]) -> Any:
    def each(item: Any) -> Any:
        return _mapped(function, item, objects, around)

    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is dict:
        return {key: each(item) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = each(item)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(each, value))
    if isinstance(value, (tuple, list)):
        return type(value)(map(each, value))
    # Modules, functions and classes are callable; results are not.
    if not objects or callable(value) or id(value) in around:
        return value
    around = (*around, id(value))
    held = {name: item for name, item in _attributes(value).items() if _tensors(item, around)}
    if held:
        value = copy.copy(value)
        for name, item in held.items():
            object.__setattr__(value, name, each(item))  # also of a frozen dataclass
    return value


def _attributes(value: Any) -> dict[str, Any]:
    slots = {name: getattr(value, name) for name in getattr(value, "__dataclass_fields__", {}) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def tensors_in(value: Any, objects: bool = False) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in their order; ``objects`` as in `mapped`."""
    return _tensors(value, () if objects else None)


def _tensors(value: Any, around: tuple[int, ...] | None) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(note, value, around is not None, around or ())
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor with all of a DTensor; any other as it is."""
    tensor = stand_ins.value_of(tensor)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """As `whole`, a tensor like those that a plain model returns: with memory of its own, the strides of the whole, no view."""
    tensor = stand_ins.value_of(tensor)
    if not isinstance(tensor, DTensor) or torch.compiler.is_compiling():
        return whole(tensor)
    return _Ordinary.apply(tensor)


class _Ordinary(torch.autograd.Function):
    """All of a DTensor, on every rank. Adjoint: each rank's part of the gradient, which all ranks have whole."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, [Replicate() if p.is_partial() else p for p in tensor.placements]
        full = laid_out(dtensors.local(redistribution.whole(tensor)), tensor)
        return full.clone() if full.data_ptr() == dtensors.local(tensor).data_ptr() else full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:  # type: ignore[override]
        replicated = DTensor.from_local(grad, ctx.mesh, [Replicate()] * ctx.mesh.ndim, run_check=False)
        return replicated.redistribute(placements=ctx.placements)


def without_grids(output: Any) -> Any:
    """``output`` with DTensors in placements of torch's own; not in a compiled graph, which cannot look at them."""
    if torch.compiler.is_compiling() or not any(map(_unusual, tensors_in(output, objects=True))):
        return output
    return mapped(lambda tensor: chunked(stand_ins.value_of(tensor)), output, objects=True)


def _unusual(tensor: torch.Tensor) -> bool:
    return is_grid(tensor) or isinstance(tensor, stand_ins.StandIn)
