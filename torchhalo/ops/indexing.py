"""Elements chosen by indices or a mask: read, and written."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.broadcasting import aligned
from torchhalo.exchange.layout import has_layout
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution

aten = torch.ops.aten


@handlers.register(
    aten.index.Tensor,
    traffic="what DTensor makes of it: nothing along dims that are not cut",
    limits="plain indices are taken as replicated; indices along a cut dim gather",
)
def index(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.index``, ``x[:, [0, 2]]``: DTensor's own, with plain indices."""
    input, indices = args
    mesh = dtensors.mesh_of(input, *indices)
    found = [None if t is None else dtensors.replicated(t, mesh) for t in indices]
    return handlers.stock(op, (input, found), kwargs)


@handlers.register(
    aten.index_put_.default,
    aten.index_put.default,
    traffic="nothing for a mask with one value; else what DTensor makes of it",
    limits="plain indices and values are taken as replicated; indices along a cut dim gather",
)
def index_put(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``y[mask] = value`` and ``y[indices] = values``."""
    input, indices, values, accumulate = handlers.bind(op, args, kwargs)
    mesh = dtensors.mesh_of(input, values, *indices)
    input, values = (dtensors.replicated(t, mesh) for t in (input, values))
    indices = [None if t is None else dtensors.replicated(t, mesh) for t in indices]
    mask = indices[0]
    if len(indices) > 1 or mask is None or mask.dtype != torch.bool or values.numel() != 1 or accumulate:
        return handlers.stock(op, (input, indices, values, accumulate), {})
    while mask.ndim < input.ndim:
        mask = mask.unsqueeze(-1)
    fill = aten.masked_fill_ if op is aten.index_put_.default else aten.masked_fill
    return fill(input, mask, values.to(input.dtype).reshape(()))


@handlers.register(
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    traffic="nothing, or the mask, where it is sharded otherwise",
)
def masked_fill(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.masked_fill`` and ``aten.masked_fill_``."""
    input, mask, value = args
    # Zeros may be filled into summands: label smoothing drops what is ignored so.
    summands = isinstance(input, DTensor) and redistribution.is_partial(input)
    if (
        not isinstance(input, DTensor)
        or not has_layout(input)
        or (summands and (isinstance(value, torch.Tensor) or value != 0))
    ):
        return handlers.stock(op, args, kwargs)
    mask, given = dtensors.as_dtensors("masked_fill", self=input, mask=mask, value=_number(value, input))[1:]
    (result,) = fake_tensors.plain_result(op, input, mask, value if given is None else given)
    if result.shape != tuple(input.shape):
        return handlers.stock(op, args, kwargs)
    shards = [dtensors.local(input), dtensors.local(aligned(mask, input.placements, result.shape))]
    if process_groups.coordinate(input.device_mesh) is not None:
        shards[0] = op(*shards, value if given is None else dtensors.local(redistribution.whole(given)))
    in_place = op in (aten.masked_fill_.Scalar, aten.masked_fill_.Tensor)
    return input if in_place else dtensors.wrap(shards[0], input.device_mesh, input.placements, result)


def _number(value: Any, input: DTensor) -> DTensor | None:
    """A value that is a tensor, which has one element and so may be a plain one."""
    return dtensors.replicated(value, input.device_mesh) if isinstance(value, torch.Tensor) else None
