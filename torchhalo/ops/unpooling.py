"""Max unpooling, and gather, of which its gradient is made: what travels depends on the indices."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchhalo.exchange import addressed
from torchhalo.exchange.addressed import Addresses
from torchhalo.exchange.layout import layout
from torchhalo.exchange.memory import laid_out
from torchhalo.exchange.relayout import with_placements
from torchhalo.ops.pooling import as_pooled, spatial
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution, simulation

aten = torch.ops.aten


@handlers.register(
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    traffic="the values whose place is on another rank, with their indices",
    limits="along a sharded dim the host waits for the indices and torch.compile refuses; of values with one index any is kept",
)
def max_unpool(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.max_unpool2d`` and its like: each value goes to the rank that owns the element of its index."""
    input, indices = dtensors.as_dtensors(str(op), self=args[0], indices=args[1])
    rest = handlers.bind(op, args, kwargs)[2:]
    (result,) = fake_tensors.plain_result(op, input, indices, *rest)
    indices = as_pooled(indices, input)
    input = redistribution.reduce_partial(input)
    mesh, placements = input.device_mesh, input.placements
    dims = tuple(range(input.ndim - spatial(op), input.ndim))
    addresses = Addresses(layout(result.shape, mesh, placements), dims)

    def kernel(values: torch.Tensor, indices: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
        if not values.numel():
            return values.new_empty(addresses.layout.owned(coordinate).shape)
        return op(values, indices, *rest)

    shards = dtensors.local(input), dtensors.local(indices)
    if process_groups.coordinate(mesh) is None:
        out = shards[0].new_empty(0)
    elif not addresses.axes:
        out = simulation.per_rank(kernel, *shards, process_groups.coordinate(mesh))
    else:
        size = "x".join(str(result.shape[dim]) for dim in dims)
        out = addressed.scatter(
            *shards, addresses, mesh, f"Found an invalid max index: {{}} (output volumes are of size {size})"
        )
    return dtensors.wrap(laid_out(out, result), mesh, placements, result)


@handlers.register(
    aten.gather.default,
    traffic="nothing along a dim that is not sharded, else indices to the owners of what they name, and that back",
    limits="along a sharded dim the host waits for the indices and torch.compile refuses; its gradient is DTensor's own",
)
def gather(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.gather``; the result is sharded as the input, or where that is not, as the indices."""
    input, dim, indices, _ = handlers.bind(op, args, kwargs)
    input, indices = dtensors.as_dtensors(str(op), self=input, index=indices)
    (result,) = fake_tensors.plain_result(op, input, dim, indices)
    if not input.ndim or not indices.ndim:
        return handlers.stock(op, args, kwargs)
    dim %= input.ndim
    for other, size in enumerate(indices.shape):
        if other != dim and size < input.shape[other]:
            input = aten.slice.Tensor(input, other, 0, size)
    holds, names = redistribution.reduced_placements(input.placements), redistribution.reduced_placements(indices.placements)
    placements = [held if isinstance(held, Shard) else named for held, named in zip(holds, names, strict=True)]
    # Where the indices alone are sharded along the dim, each rank has all that its own may name.
    alone = [p == Shard(dim) and held != p for held, p in zip(holds, placements, strict=True)]
    input = with_placements(input, [Replicate() if a else p for a, p in zip(alone, placements, strict=True)])
    indices = with_placements(indices, placements)
    mesh = input.device_mesh
    addresses = Addresses(layout(input.shape, mesh, input.placements), (dim,))
    shards = dtensors.local(input), dtensors.local(indices)
    if process_groups.coordinate(mesh) is None:
        out = shards[0].new_empty(0)
    elif not addresses.axes:
        out = simulation.per_rank(lambda shard, indices: op(shard, dim, indices), *shards)
    else:
        wrong = f"index {{}} is out of bounds for dimension {dim} with size {input.shape[dim]}"
        out = addressed.gather(*shards, addresses, mesh, wrong)
    return dtensors.wrap(out, mesh, placements, result)
