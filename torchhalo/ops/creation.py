"""New tensors made from a given one."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from torchhalo.exchange.grids import fold, unfold, unfolded_meta
from torchhalo.exchange.layout import has_layout, layout
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, simulation
from torchhalo.torch_internals.grid_shard import BOXES, GridShard, WindowShard, has_folded

aten = torch.ops.aten


@handlers.register(
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    traffic="nothing",
)
def new(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.new_empty`` and its kin: cut as the given tensor, along dims that it has and that are longer than 1.

    Autograd copies a gradient into ``new_empty_strided`` if its strides are not the parameter's. A compiler chooses the strides
    of each rank's partial sums, so only some ranks may copy: they must remain partial sums, or only some would reduce them.
    """
    input, size = args[:2]
    if has_folded(input.placements):
        return _new_grid(op, args, kwargs)
    if not has_layout(input):
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, *args)
    result = result._replace(dtype=kwargs.get("dtype") or result.dtype)
    mesh, coordinate = input.device_mesh, process_groups.coordinate(input.device_mesh)
    same, like = tuple(size) == tuple(input.shape), len(size) == input.ndim
    kept = same and op is aten.new_empty_strided.default
    placements = [
        p if (isinstance(p, BOXES) and (same or (like and _fits(p, size[p.dim])))) or (kept and p.is_partial()) else Replicate()
        for p in input.placements
    ]
    target = layout(size, mesh, placements)
    order = sorted(range(len(size)), key=lambda dim: -result.stride[dim])

    def kernel(shard: torch.Tensor, *coordinate: int) -> torch.Tensor:
        shape = target.owned(coordinate).shape
        if op is not aten.new_empty_strided.default:
            return op(shard, shape, *args[2:], **kwargs)
        dense = shard.new_empty([shape[dim] for dim in order], **kwargs)
        return dense.permute([order.index(dim) for dim in range(len(shape))])

    shard = dtensors.local(input)
    shard = shard.new_empty(0, **kwargs) if coordinate is None else simulation.per_rank(kernel, shard, *coordinate)
    return dtensors.wrap(shard, mesh, placements, result)


def _fits(placement: Shard | WindowShard, size: int) -> bool:
    return size == placement.sizes[0] if isinstance(placement, WindowShard) else size > 1


def _new_grid(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Of tokens: cut as these where it has their shape, else whole."""
    input, size = args[:2]
    if tuple(size) != tuple(input.shape):
        whole = [Replicate()] * input.device_mesh.ndim
        plain = dtensors.wrap(dtensors.local(input).new_empty(0), input.device_mesh, whole, dtensors.meta(input))
        return op(plain, *args[1:], **kwargs)
    (result,) = fake_tensors.plain_result(op, *args)
    apart = unfolded_meta(result, input.placements)
    strided = op is aten.new_empty_strided.default
    rest = (apart.stride, *args[3:]) if strided else args[2:]
    out = op(unfold(input), apart.shape, *rest, **kwargs)
    pairs = zip(input.placements, out.placements, strict=True)
    placements = [p if isinstance(p, GridShard) else q for p, q in pairs]
    return fold(out, result._replace(dtype=out.dtype), placements)
