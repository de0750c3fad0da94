"""Reductions that the ranks merge by the same reduction: largest and smallest, and where they are; all, any, logsumexp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from torchhalo.geometry import Box
from torchhalo.ops.reduction import Reduction, added_up, reduce_locally
from torchhalo.ops.statistics import total, wide
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution, simulation

aten = torch.ops.aten


def _again(
    op: handlers.Op,
    input: DTensor,
    over: Reduction,
    keepdim: bool,
    results: Sequence[dtensors.Meta],
    local: Sequence[Callable[[torch.Tensor, list[int]], torch.Tensor]],
) -> tuple[DTensor, ...]:
    """Reduce each rank's part, and then the results of the ranks that have any elements.

    Args:
        local: For each result, the reduction of a plain tensor over dims, which it keeps.
    """
    if done := dtensors.non_member_result(input, results, [over.result(keepdim)] * len(results)):
        return done
    filled = [place for place, count in enumerate(over.counts()) if count]
    dims, dtype = list(over.dims), wide(results[0].dtype)

    def summary(shard: torch.Tensor) -> torch.Tensor:
        if over.members and 0 in (shard.shape[dim] for dim in dims):
            return torch.stack([total(shard, dims).to(dtype)] * len(local))  # not used; zeros that depend on the shard
        return torch.stack([reduce(shard, dims).to(dtype) for reduce in local])

    def merge(parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(parts) == 1:
            return tuple(parts[0])
        parts = parts if len(filled) == len(parts) else parts[filled]
        return tuple(reduce(parts[:, i], [0]).squeeze(0) for i, reduce in enumerate(local))

    found = simulation.per_rank(merge, over.gather(simulation.per_rank(summary, dtensors.local(input))))
    return tuple(over.wrap(shard, result, keepdim) for shard, result in zip(found, results, strict=True))


def _amax(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.amax(dims, keepdim=True)


def _amin(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.amin(dims, keepdim=True)


def _logsumexp(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.to(wide(x.dtype)).logsumexp(dims, keepdim=True)


def _all(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return torch.all(x, dims, keepdim=True)


def _any(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return torch.any(x, dims, keepdim=True)


_LOCAL = {
    "amax": [_amax],
    "amin": [_amin],
    "max": [_amax],
    "min": [_amin],
    "aminmax": [_amin, _amax],
    "logsumexp": [_logsumexp],
    "all": [_all],
    "any": [_any],
}


@handlers.register(
    aten.amax.default,
    aten.amin.default,
    aten.aminmax.default,
    aten.max.default,
    aten.min.default,
    aten.logsumexp.default,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    traffic="one number per result from every rank",
)
def repeated(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | tuple[DTensor, ...]:
    """Handler of reductions that are merged by themselves: largest, smallest, all, any, logarithm of a sum of exponentials."""
    results = fake_tensors.plain_result(op, *args, **kwargs)
    given = handlers.named(op, args, kwargs)
    dim = given.get("dim")
    input = redistribution.reduce_partial(given["self"])
    over = Reduction.of(input, (dim,) if isinstance(dim, int) else dim)
    local = _LOCAL[op.overloadpacket.__name__]
    done = _again(op, input, over, given.get("keepdim", False), results, local)
    return done if len(results) > 1 else done[0]


@handlers.register(
    aten.linalg_vector_norm.default,
    traffic="nothing, the result is Partial; but with keepdim, or for infinite norms, one number per result from every rank",
)
def linalg_vector_norm(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.linalg_vector_norm``, whose infinite norms stock DTensor cannot take of an empty shard."""
    input, order, dims, keepdim, _ = handlers.bind(op, args, kwargs)
    if abs(order) != inf:
        out = handlers.stock(op, args, kwargs)
        assert isinstance(out, DTensor)
        if order == 1:  # a sum, as which torch 2.11 does not know it
            placements = [Partial() if p.is_partial() else p for p in out.placements]
            out = dtensors.wrap(dtensors.local(out), out.device_mesh, placements, dtensors.meta(out))
        return added_up(out, keepdim)
    results = fake_tensors.plain_result(op, *args, **kwargs)
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, dims)

    def norm(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
        return torch.linalg.vector_norm(x, order, dims or None, keepdim=True, dtype=kwargs.get("dtype"))

    return _again(op, input, over, keepdim, results, [norm])[0]


@handlers.register(
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    traffic="one number per result from every rank, and where it is",
)
def located(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | tuple[DTensor, ...]:
    """Handler of those that say where; the index is the global one, and of equals the first wins, also across ranks."""
    results = fake_tensors.plain_result(op, *args, **kwargs)
    input, dim, keepdim = handlers.bind(op, args, kwargs)
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, None if dim is None else (dim,))
    done = dtensors.non_member_result(input, results, [over.result(keepdim)] * len(results)) or reduce_locally(
        op, input, over, results, keepdim, args, kwargs
    )
    if done is None:
        done = tuple(
            over.wrap(shard, result, keepdim)
            for shard, result in zip(
                _located(input, over, "max" in op.overloadpacket.__name__)[-len(results) :], results, strict=True
            )
        )
    return done if len(results) > 1 else done[0]


def _located(input: DTensor, over: Reduction, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest, or smallest, and its index along the reduced dim, or in the flattened tensor."""
    filled = [place for place, count in enumerate(over.counts()) if count]
    pick, reduce = (torch.max, _amax) if largest else (torch.min, _amin)

    def summary(shard: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
        box = over.layout.owned(coordinate)
        if 0 in (shard.shape[dim] for dim in over.dims):
            value = total(shard, over.dims).to(shard.dtype)
            index = value.to(torch.int64)
        elif len(over.dims) == 1:
            (dim,) = over.dims
            value, index = pick(shard, dim, keepdim=True)
            index = index + box.spans[dim].start
        else:
            value, index = pick(shard.reshape(-1), 0)
            value, index = (t.view([1] * shard.ndim) for t in (value, _global_index(index, box, over.layout.shape)))
        # One collective for both, whatever their dtypes; the wider one first, as it must be aligned.
        return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in (index, value)])

    def merge(parts: torch.Tensor, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = [1 if dim in over.dims else size for dim, size in enumerate(shard.shape)]
        sizes = [prod(shape) * 8, prod(shape) * shard.element_size()]
        bytes_of_index, bytes_of_value = parts[filled].split(sizes, 1)
        values = bytes_of_value.reshape(-1).view(shard.dtype).view(len(filled), *shape)
        indices = bytes_of_index.reshape(-1).view(torch.int64).view(len(filled), *shape)
        best = reduce(values, [0])
        same = (values == best) | values.isnan()
        return best.squeeze(0), torch.where(same, indices, torch.iinfo(torch.int64).max).amin(0)

    shard = dtensors.local(input)
    parts = over.gather(simulation.per_rank(summary, shard, process_groups.coordinate(over.mesh)))
    return simulation.per_rank(merge, parts, shard)


def _global_index(index: torch.Tensor, box: Box, shape: Sequence[int]) -> torch.Tensor:
    """From an index in the flattened box to that in the flattened tensor."""
    found = torch.zeros_like(index)
    step = 1
    for span, size in zip(reversed(box.spans), reversed(shape), strict=True):
        found = found + (index % span.size + span.start) * step
        index = index // span.size
        step *= size
    return found
