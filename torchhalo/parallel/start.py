"""A model that is built on the meta device gets its memory only when each rank knows what it keeps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchhalo.parallel.edges import replace_tensors


def materialize(model: nn.Module, init: Callable[[nn.Module], object] | None = None) -> nn.Module:
    """Give memory and first values to a model that was built under ``torch.device("meta")`` and then parallelized.

    Parameters and buffers come to the device of their mesh, each rank those or the shards that it keeps. Then every module that
    has any of its own is initialised by its ``reset_parameters``, inner modules first. All ranks must be seeded alike, which is
    checked; they then agree, and one seed gives the same values on any number of ranks, replicated or as `fully_shard` keeps
    them. They are drawn as torchhalo draws, so they are not those of ``Net()`` in one process. To continue a run, call
    `Checkpoints.load` after it.

    Args:
        model: Changed in place; make the optimizer afterwards.
        init: Called with each module that has tensors of its own and no ``reset_parameters``; it sets them in place.

    Returns:
        The model.

    Raises:
        ValueError: Modules that nothing initialises; before any memory is taken.

    Example:
        >>> with torch.device("meta"):  # doctest: +SKIP
        ...     model = Net()
        >>> torchhalo.materialize(torchhalo.parallelize(model, mesh))  # doctest: +SKIP
    """
    resets = [(name, module, _reset(module)) for name, module in model.named_modules() if _on_meta(module)]
    unknown = [f"{name or 'the model'} ({type(module).__name__})" for name, module, reset in resets if reset is None]
    if unknown and init is None:
        raise ValueError(
            f"materialize: nothing initialises the parameters and buffers of {', '.join(unknown)}. Give them a method "
            "`reset_parameters`, or pass `init`, a function of a module that sets them in place"
        )
    allocate(model)
    for _, module, reset in reversed(resets):
        if reset is not None:
            reset()
        elif init is not None:
            with torch.no_grad():
                init(module)
    return model


def without_values(model: nn.Module) -> nn.Module:
    """A copy of the model with parameters and buffers on the meta device, where they take no memory."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def allocate(model: nn.Module) -> None:
    """Memory for all that is on the meta device, with NaN in it, so that what is forgotten cannot be overlooked."""
    meshes = (tensor.device_mesh for tensor in _tensors(model) if isinstance(tensor, DTensor))
    device = next((mesh.device_type for mesh in meshes), None) or torch.get_default_device()

    def allocated(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        memory = torch.empty_like(tensor, device=device)
        return memory.fill_(math.nan) if memory.is_floating_point() else memory

    replace_tensors(model, allocated)


def _reset(module: nn.Module) -> Callable[[], object] | None:
    # nn.MultiheadAttention and models after its pattern have the second.
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _on_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in _tensors(module, recurse=False))


def _tensors(module: nn.Module, recurse: bool = True) -> Iterator[torch.Tensor]:
    return chain(module.parameters(recurse), module.buffers(recurse))
