"""Variance and standard deviation: each rank's mean and squared deviations, merged."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.ops.reduction import Reduction, reduce_locally
from torchhalo.ops.statistics import deviations, merged
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, redistribution, simulation

aten = torch.ops.aten


@handlers.register(
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
    traffic="two numbers per result from every rank",
    limits="complex tensors raise",
)
def variance(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | tuple[DTensor, ...]:
    """Handler of ``var``, ``std``, ``var_mean`` and ``std_mean``."""
    name = op.overloadpacket.__name__
    results = fake_tensors.plain_result(op, *args, **kwargs)
    input, dims, correction, keepdim = handlers.bind(op, args, kwargs)
    correction = 1 if correction is None else correction
    if input.is_complex():
        raise NotImplementedError(f"{name}: torchhalo has no variance of complex tensors, take that of `real` and `imag`")
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, dims)
    done = dtensors.non_member_result(input, results, [over.result(keepdim)] * len(results)) or reduce_locally(
        op, input, over, results, keepdim, args, kwargs
    )
    if done is None:
        counts = over.counts()

        def summary(shard: torch.Tensor) -> torch.Tensor:
            return deviations(shard, over.dims)[2]

        def merge(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            center, spread = merged(parts, counts)
            spread = spread * over.members / max(0, over.members - correction)
            return (spread.sqrt() if name.startswith("std") else spread), center

        found = simulation.per_rank(merge, over.gather(simulation.per_rank(summary, dtensors.local(input))))
        done = tuple(over.wrap(shard, result, keepdim) for shard, result in zip(found, results, strict=False))
    return done if len(results) > 1 else done[0]
