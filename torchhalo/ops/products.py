"""Products of matrices, such as those of an attention that is written out: rows stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchhalo.exchange.gather_dim import gather_dim, scatter_dim
from torchhalo.exchange.grids import unfolded, unfolded_meta
from torchhalo.exchange.relayout import with_grids
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution, simulation
from torchhalo.torch_internals.grid_shard import GridShard, at, cuts, has_grid

aten = torch.ops.aten


handlers.register_composites(
    __name__,
    aten.matmul.default,
    aten.einsum.default,
    traffic="that of the products and views that it is made of",
)


@handlers.register(
    aten.bmm.default,
    aten.baddbmm.default,
    traffic="nothing, but the second factor where both are cut and the first along its rows, and partial sums that meet a "
    "factor that is cut, or of which each rank gets a share",
    limits="other placements that do not fit are DTensor's own affair",
)
def bmm(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.bmm``: rows stay, as those of the queries of an attention that is written out."""
    *rest, first, second = args
    if isinstance(first, DTensor) and isinstance(second, DTensor) and first.device_mesh == second.device_mesh:
        # DTensor may gather the other factor instead, where that is small.
        first, second = _added_up(first, second), _added_up(second, first)
        for dim in (1, 2):
            cut = [axis for axis, p in enumerate(second.placements) if cuts(p, dim)]
            if cut and all(cuts(first.placements[axis], 1) for axis in cut):
                second = _made_whole(second, dim, cut)
    out = handlers.stock(op, (*rest, first, second), kwargs)
    return _shared_out(out, first) if isinstance(out, DTensor) and isinstance(first, DTensor) and not rest else out


def _shared_out(out: DTensor, first: DTensor) -> DTensor:
    """``out`` with partial sums over tokens added up where it has as many rows or columns as tokens: a share on each rank.

    Such are the gradients of keys and values in an attention whose queries are cut; all of them on every rank would be as large
    as uncut keys.
    """
    mesh, count = out.device_mesh, int(first.shape[2])
    axes = [axis for axis, p in enumerate(out.placements) if p.is_partial()]
    dim = next((dim for dim in (1, 2) if out.shape[dim] == count), None)
    if dim is None or not axes or process_groups.coordinate(mesh) is None:
        return out
    summed = [axis for axis, p in enumerate(first.placements) if cuts(p, 2)]
    if axes != summed or has_grid(out.placements) or any(cuts(p, dim) for p in out.placements):
        return out
    placements = [at(first.placements[axis], dim) if axis in axes else p for axis, p in enumerate(out.placements)]
    meta = dtensors.meta(out)
    apart = unfolded(tuple(map(int, meta.shape)), tuple(placements))
    like = dtensors.wrap(dtensors.local(out), mesh, apart.placements, unfolded_meta(meta, placements))
    group = apart.dims[dim]
    shard = simulation.per_rank(lambda t: t.unflatten(dim, apart.shape[group.start : group.stop]), dtensors.local(out))
    for each in group:
        (shard,) = scatter_dim((shard,), (like,), each)
    return dtensors.wrap(simulation.per_rank(lambda t: t.flatten(group.start, group.stop - 1), shard), mesh, placements, meta)


def _added_up(tensor: DTensor, other: DTensor) -> DTensor:
    """``tensor`` without partial sums, if ``other`` is cut: such as keys times values of a linear attention, which are few."""
    cut = any(isinstance(p, (Shard, GridShard)) for p in other.placements)
    return redistribution.reduce_partial(tensor) if cut else tensor


def _made_whole(tensor: DTensor, dim: int, axes: Sequence[int]) -> DTensor:
    placements = [Replicate() if axis in axes else p for axis, p in enumerate(tensor.placements)]
    if has_grid(tensor.placements):
        return with_grids(tensor, placements)
    takes_part = process_groups.coordinate(tensor.device_mesh) is not None
    shard = gather_dim((tensor,), dim)[0] if takes_part else dtensors.local(tensor)
    meta = dtensors.meta(tensor)
    return dtensors.wrap(shard, tensor.device_mesh, placements, meta)


@handlers.register(
    aten.linear.default,
    traffic="nothing if the weight is whole",
    limits="arrives in inference mode only: elsewhere it is a matrix product between two views",
)
def linear(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.linear``: every token is on its own."""
    given = dict(zip(("input", "weight", "bias"), handlers.bind(op, args, kwargs), strict=True))
    input, weight, bias = dtensors.as_dtensors("linear", **given)
    (result,) = fake_tensors.plain_result(op, input, weight, bias)
    parameters = [t for t in (weight, bias) if t is not None]
    if any(p != Replicate() for t in parameters for p in t.placements) or any(
        p.is_partial() or cuts(p, input.ndim - 1) for p in input.placements
    ):
        return op.decompose(*args, **kwargs)
    out = op(dtensors.local(input), dtensors.local(weight), None if bias is None else dtensors.local(bias))
    return dtensors.wrap(out, input.device_mesh, input.placements, result)
