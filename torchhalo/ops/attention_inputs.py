"""The tokens of an attention shared out by samples before queries, keys and values are made of them.

Where an attention would have the samples cut, `attention_cuts` moves queries, keys and values, and the output back. A module
that is given tokens, and returns as many, can have its input moved instead, and its output back: half of that or less. That a
module is such a one shows when it is called: from the next call of the model on, its input is moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.relayout import with_placements
from torchhalo.torch_internals.grid_shard import GridShard

#: What watchers of collectives are told that these are about.
ATTENTION = "attention"

_Placements = tuple[Placement, ...]
_Key = tuple[nn.Module, torch.Size, _Placements]


class Moved(torch.autograd.Function):
    """A tensor with other placements. Adjoint: its gradient with the ones that it had."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, placements: _Placements) -> DTensor:
        ctx.placements = tensor.placements
        return with_placements(tensor, placements, ATTENTION)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, None]:  # type: ignore[override]
        return Moved.apply(grad, ctx.placements), None


class _Call:
    """A call of a module that has not returned.

    Attributes:
        tokens: What the module was given.
        moved: Whether the module got that with other placements.
        wanted: The placements with which an attention would have had it.
    """

    def __init__(self, module: nn.Module, tokens: DTensor):
        self.module, self.tokens = module, tokens
        self.moved = False
        self.wanted: _Placements | None = None


_calls: list[_Call] = []


class ModuleInputs:
    """How modules of a model are given their tokens."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Placements | None] = {}
        self._seen: dict[_Key, _Placements | None] = {}

    def adopt(self) -> None:
        """Follow what was seen until now; not sooner, as a call is repeated where activations are computed again."""
        if len(self._known) > 4096:  # of shapes that may never come again
            self._known.clear()
        self._known |= self._seen
        self._seen.clear()

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Called before ``module`` is: its arguments if they are others, else None."""
        if not (module._modules and args and isinstance(args[0], DTensor)) or torch.compiler.is_compiling():
            return None
        tokens = args[0]
        call = _Call(module, tokens)
        _calls.append(call)
        placements = self._known.get((module, tokens.shape, tokens.placements))
        if placements is None:
            return None
        call.moved = True
        return Moved.apply(tokens, placements), *args[1:]

    def leave(self, module: nn.Module, output: Any) -> Any:
        """Called after ``module`` was: its output, home again."""
        if torch.compiler.is_compiling() or not (_calls and _calls[-1].module is module):
            return output
        call = _calls.pop()
        if output is None:  # it raised, as where activations are computed again, and no more than is needed
            return None
        tokens = call.tokens
        alike = isinstance(output, DTensor) and output.shape == tokens.shape
        key = module, tokens.shape, tokens.placements
        if call.moved:
            if call.wanted is not None or not alike:
                self._seen[key] = None  # the attention moves its tokens nevertheless
            return Moved.apply(output, tokens.placements) if alike else output  # type: ignore[no-untyped-call]
        if call.wanted is not None and key not in self._known and alike and output.placements == tokens.placements:
            self._seen[key] = call.wanted
        return output


def offer(query: DTensor, dims: Mapping[int, int], cost: float) -> None:
    """Have the running module given its tokens cut by samples, next time, if they are fewer than what is moved now.

    Args:
        dims: For each axis that cuts tokens of ``query``, the dim of samples that it is to cut instead.
        cost: How many elements are to be moved now, there and back.
    """
    if not _calls:
        return
    call = _calls[-1]
    tokens, last = call.tokens, max(dims.values())
    cut = (tokens.placements[axis] for axis in dims)
    if (
        tokens.device_mesh == query.device_mesh
        and tokens.shape[: last + 1] == query.shape[: last + 1]
        and all(isinstance(p, (Shard, GridShard)) and p.dim > last for p in cut)
        and 2 * tokens.numel() < cost
    ) or call.moved:
        call.wanted = tuple(Shard(dims[axis]) if axis in dims else p for axis, p in enumerate(tokens.placements))
