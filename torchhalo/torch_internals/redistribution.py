"""DTensor's own redistribution: called, and watched."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed.tensor._redistribute as stock_redistribution
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves

from torchhalo.torch_internals.calls import Op
from torchhalo.torch_internals.dtensors import bare
from torchhalo.torch_internals.process_groups import coordinate
from torchhalo.torch_internals.simulation import per_rank
from torchhalo.torch_internals.watching import Redistribution, announce


def watch_redistribution(on: bool) -> None:
    """Announce what stock ops redistribute."""
    dispatcher = DTensor._op_dispatcher
    dispatcher.__dict__.pop("redistribute_local_args", None)
    if on:
        stock = dispatcher.redistribute_local_args
        setattr(dispatcher, "redistribute_local_args", partial(_redistribute_local_args, stock))  # noqa: B010


def _redistribute_local_args(stock: Callable[..., None], op_info: Any, schema: Any, use_values: bool) -> None:
    wanted = schema.args_schema if op_info.args_tree_spec is None else tree_leaves(schema.args_schema)
    for spec, other in zip(op_info.flat_args_schema, wanted, strict=False):
        if isinstance(spec, DTensorSpec) and spec != other and isinstance(other, DTensorSpec):
            assert spec.tensor_meta is not None
            shape, _, dtype = spec.tensor_meta
            announce(Redistribution(schema.op, shape, dtype, spec.mesh, spec.placements, other.placements))
    stock(op_info, schema, use_values)


def redistribute(tensor: DTensor, placements: Sequence[Placement], op: Op | None = None) -> DTensor:
    """``tensor`` with other placements, by DTensor's own collectives; the same object if it has them already.

    Args:
        op: For an activation, the op that wants it so, which is named if that gathers it.
    """
    if tensor._spec.placements == tuple(placements):
        return tensor
    pairs = list(zip(tensor.placements, placements, strict=True))
    reduced = tuple(Replicate() if p.is_partial() and p != q else p for p, q in pairs)
    whole = tuple(Replicate() if q.is_partial() and p != q else q for p, q in pairs)
    steps = list(dict.fromkeys((tensor.placements, reduced, whole)))
    for source, step in pairwise(steps):  # all of them first: a listener may refuse the last
        announce(Redistribution(op, tensor.shape, tensor.dtype, tensor.device_mesh, source, step))
    for step in steps[1:]:
        tensor = _step(tensor, step, stock_redistribution.redistribute_local_tensor)
    return tensor if whole == tuple(placements) else _step(tensor, placements, _summands)


def _step(tensor: DTensor, placements: Sequence[Placement], move: Callable[..., torch.Tensor]) -> DTensor:
    spec = tensor._spec
    target = DTensorSpec(spec.mesh, tuple(placements), spec.tensor_meta)
    return DTensor(bare(move(tensor._local_tensor, spec, target)), target, requires_grad=False)


def _summands(shard: torch.Tensor, spec: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """Of a sum the first rank gets all: DTensor divides by their number, which rounds and makes fractions of integers."""
    changed = [(axis, q) for axis, (p, q) in enumerate(zip(spec.placements, target.placements, strict=True)) if p != q]
    if any(q != Partial() for _, q in changed):
        return stock_redistribution.redistribute_local_tensor(shard, spec, target)
    own = coordinate(spec.mesh)

    def kernel(shard: torch.Tensor, *coordinate: int) -> torch.Tensor:
        return torch.zeros_like(shard) if any(coordinate[axis] for axis, _ in changed) else shard.clone()

    return shard if own is None else per_rank(kernel, shard, *own)


def local_as(tensor: DTensor | None, placements: Sequence[Placement]) -> torch.Tensor | None:
    """This rank's shard of ``tensor`` after a redistribution to ``placements``; None for None."""
    return None if tensor is None else redistribute(tensor, placements)._local_tensor


def reduce_partial(tensor: DTensor) -> DTensor:
    """``tensor`` with its partial sums added up, sharded as it was."""
    return redistribute(tensor, reduced_placements(tensor.placements)) if is_partial(tensor) else tensor


def is_partial(tensor: DTensor) -> bool:
    """Whether the shards of ``tensor`` are summands along any axis."""
    return any(p.is_partial() for p in tensor._spec.placements)


def whole(tensor: DTensor) -> DTensor:
    """``tensor`` on every rank."""
    return redistribute(tensor, [Replicate()] * tensor.device_mesh.ndim)


def reduced_placements(placements: Sequence[Placement]) -> list[Placement]:
    """The placements of a tensor after its partial sums are added up, which are those of what is computed from it."""
    return [Replicate() if p.is_partial() else p for p in placements]


def silence_hints() -> None:
    """Let DTensor put Partial tensors together in this process without a word: on several axes it suggests flatter meshes."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
