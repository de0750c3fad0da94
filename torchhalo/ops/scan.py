"""Sums and products so far: those of a rank's own part, with the totals of the ranks before it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.memory import laid_out
from torchhalo.ops.reduction import Reduction
from torchhalo.ops.statistics import wide
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution, simulation
from torchhalo.torch_internals.tracing import depend_if_empty, depend_on

aten = torch.ops.aten


@handlers.register(
    aten.cumsum.default, aten.cumprod.default, traffic="the total of every rank; nothing if the dim is not sharded"
)
def scan(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``cumsum`` and ``cumprod``: those of the rank's own part, with the totals of the ranks before it."""
    (result,) = fake_tensors.plain_result(op, *args, **kwargs)
    input, dim = redistribution.reduce_partial(args[0]), args[1]
    over = Reduction.of(input, (dim,))
    if done := dtensors.non_member_result(input, [result], [input.placements]):
        return done[0]
    dtype = wide(result.dtype)
    reduce, join = (torch.sum, torch.add) if op is aten.cumsum.default else (torch.prod, torch.mul)

    def totals(shard: torch.Tensor) -> torch.Tensor:
        return reduce(shard, dim, keepdim=True, dtype=dtype)

    def finish(parts: torch.Tensor | None, shard: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
        out = op(shard, dim, dtype=dtype)
        if parts is not None:
            before = parts[: over.layout.part(over.dims[0], coordinate)]
            out = depend_if_empty(join(out, reduce(before, 0)), parts) if len(before) else depend_on(out, parts)
        return laid_out(out.to(result.dtype), result)

    shard = dtensors.local(input)
    parts = over.gather(simulation.per_rank(totals, shard)) if over.axes else None
    out = simulation.per_rank(finish, parts, shard, process_groups.coordinate(over.mesh))
    return dtensors.wrap(out, over.mesh, input.placements, result)


@handlers.register(aten.cumsum_.default, aten.cumprod_.default, traffic="as cumsum")
def scan_(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of their variants in place."""
    out = aten.cumsum if op is aten.cumsum_.default else aten.cumprod
    return args[0].copy_(out.default(*args, **kwargs))
