"""Embeddings: a table of which rows are read, and what of its gradient depends on how often they are."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchhalo.exchange.broadcasting import aligned, shared_placements
from torchhalo.exchange.layout import has_layout
from torchhalo.exchange.relayout import with_placements
from torchhalo.ops.indexing import read
from torchhalo.torch_internals import collectives, dtensors, fake_tensors, handlers, process_groups, redistribution, simulation

aten = torch.ops.aten


@handlers.register(
    aten.embedding.default,
    traffic="nothing for a table that is whole or cut along its columns; the result is sharded as the indices",
    limits="of a table that is cut along its rows, DTensor's own",
)
def embedding(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.embedding``."""
    table, indices, *rest = handlers.bind(op, args, kwargs)
    table, indices = dtensors.as_dtensors("embedding", weight=table, indices=indices)
    if not has_layout(table) or not has_layout(indices) or Shard(0) in table.placements:
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, table, indices, *rest)
    return read(op, table, [redistribution.reduce_partial(indices)], result, lambda table, found: op(table, found, *rest))


@handlers.register(
    aten.embedding_dense_backward.default,
    traffic="nothing, the result is Partial; with `scale_grad_by_freq`, one number per row, reduced",
)
def embedding_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.embedding_dense_backward``; stock DTensor would count only the rank's own reads of a row."""
    grad, indices, rows, padding, by_frequency = handlers.bind(op, args, kwargs)
    grad, indices = dtensors.as_dtensors("embedding backward", grad_output=grad, indices=indices)
    (result,) = fake_tensors.plain_result(op, grad, indices, rows, padding, by_frequency)
    mesh, width = grad.device_mesh, grad.ndim - 1
    indices = redistribution.reduce_partial(indices)
    cut = shared_placements(grad.shape, [grad, aten.unsqueeze.default(indices, -1)])
    cut = [p if p.is_partial() else q for p, q in zip(grad.placements, cut, strict=True)]
    placements = [Shard(1) if p == Shard(width) else Partial() if isinstance(p, Shard) else p for p in cut]
    if done := dtensors.non_member_result(grad, [result], [placements]):
        return done[0]
    points = [p if isinstance(p, Shard) and p.dim < width else Replicate() for p in cut]
    shards = dtensors.local(aligned(grad, cut, grad.shape)), dtensors.local(with_placements(indices, points))

    def count(grad: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        found = indices.reshape(-1)
        return grad.new_zeros(rows).index_add_(0, found, grad.new_ones(found.shape))

    def share(grad: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return grad / counts[indices].unsqueeze(-1)

    def kernel(grad: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        if not grad.shape[-1]:  # torch's kernel of CUDA takes the width from a stride, which is one then, and reads
            return grad.new_zeros(rows, 0)
        return op(grad, indices, rows, padding, False)

    if by_frequency:
        axes = [axis for axis, p in enumerate(points) if isinstance(p, Shard)]
        counts = collectives.all_reduce(simulation.per_rank(count, *shards), mesh, axes)
        shards = simulation.per_rank(share, *shards, counts), shards[1]
    return dtensors.wrap(simulation.per_rank(kernel, *shards), mesh, placements, result)


@handlers.register(
    aten.embedding_renorm_.default,
    traffic="the indices, to all ranks",
    limits="raises for a table that is cut",
)
def embedding_renorm_(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.embedding_renorm_``, which is ``max_norm``: every rank shortens the rows that any rank reads."""
    table, indices, *norms = handlers.bind(op, args, kwargs)
    table, indices = dtensors.as_dtensors("embedding", weight=table, indices=indices)
    mesh, whole = table.device_mesh, (Replicate(),) * table.device_mesh.ndim
    if tuple(table.placements) != whole:
        raise NotImplementedError(
            f"embedding: `max_norm` changes the table in place, which must be replicated, got placements {table.placements}"
        )
    if process_groups.coordinate(mesh) is not None:
        op(dtensors.local(table), dtensors.local(with_placements(indices, whole)), *norms)
    return table
