"""Joins of several tensors: cat and stack."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.layout import has_layout, is_cut
from torchhalo.exchange.memory import laid_out
from torchhalo.exchange.windowed import fetch, hull
from torchhalo.geometry import Window
from torchhalo.ops.slicing import shifted
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution
from torchhalo.torch_internals.grid_shard import BOXES

aten = torch.ops.aten


def _on_one_mesh(op: handlers.Op, tensors: Sequence[torch.Tensor]) -> list[DTensor]:
    """The tensors of a list as DTensors.

    A plain one is taken as replicated: autograd makes zeros for the unused parts of a split without asking DTensor, and beside
    DTensors a plain tensor can be nothing else.
    """
    mesh = dtensors.mesh_of(*tensors)
    found = [dtensors.replicated(t, mesh) for t in tensors]
    return list(dtensors.as_dtensors(op.overloadpacket.__name__, **{f"tensors[{i}]": t for i, t in enumerate(found)}))


def _together(op: handlers.Op, tensors: Sequence[DTensor]) -> list[DTensor]:
    """The tensors with the same placements: those of the largest one that is sharded."""
    if all(t.placements == tensors[0].placements for t in tensors):
        return list(tensors)
    sharded = [t for t in tensors if any(isinstance(p, BOXES) for p in t.placements)]
    placements = redistribution.reduced_placements(max(sharded or tensors, key=DTensor.numel).placements)
    return [redistribution.redistribute(t, placements, op) for t in tensors]


@handlers.register(
    aten.cat.default,
    traffic="what changes owner, one exchange per tensor; nothing along a dim that is not cut",
    limits="plain tensors in the list are taken as replicated",
)
def cat(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.cat``."""
    tensors, dim = handlers.bind(op, args, kwargs)
    tensors = _on_one_mesh(op, tensors)
    if not all(map(has_layout, tensors)):
        return handlers.stock(op, (tensors, dim), {})
    (result,) = fake_tensors.plain_result(op, tensors, dim)
    dim, mesh = dim % len(result.shape), tensors[0].device_mesh
    nothing = dtensors.local(tensors[0]).new_empty(0, dtype=result.dtype)
    tensors = _together(op, [t for t in tensors if t.ndim == len(result.shape)])  # torch skips legacy empty ones
    placements = tensors[0].placements
    if process_groups.coordinate(mesh) is None:
        return dtensors.wrap(nothing, mesh, placements, result)
    shards = [dtensors.local(t) for t in tensors]
    if is_cut(mesh, placements, dim):
        placements = tuple(redistribution.reduced_placements(placements))
        starts = accumulate((t.shape[dim] for t in tensors), initial=0)
        moves = [Window(1, before=start) for start in starts]
        shards = [fetch(t, {dim: move}, result.shape, hull) for t, move in zip(tensors, moves, strict=False)]
    return dtensors.wrap(laid_out(torch.cat(shards, dim), result), mesh, placements, result)


@handlers.register(aten.stack.default, traffic="nothing", limits="plain tensors in the list are taken as replicated")
def stack(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.stack``."""
    tensors, dim = handlers.bind(op, args, kwargs)
    tensors = _on_one_mesh(op, tensors)
    if not all(map(has_layout, tensors)):
        return handlers.stock(op, (tensors, dim), {})
    (result,) = fake_tensors.plain_result(op, tensors, dim)
    dim, tensors, mesh = dim % len(result.shape), _together(op, tensors), tensors[0].device_mesh
    placements = shifted(tensors[0].placements, dim, 1)
    shards = [dtensors.local(t) for t in tensors]
    shard = shards[0] if process_groups.coordinate(mesh) is None else torch.stack(shards, dim)
    return dtensors.wrap(laid_out(shard, result), mesh, placements, result)
