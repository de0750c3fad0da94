"""Fused optimizer steps: one kernel for many parameters, of which each rank updates what it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchhalo.torch_internals import handlers, redistribution

aten = torch.ops.aten


@handlers.register(
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
    aten._fused_adagrad_.default,
    aten._fused_adagrad_.tensor_lr,
    traffic="nothing, unless a gradient is placed otherwise than its parameter",
)
def fused_step(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Handler of the steps of ``SGD(fused=True)`` and ``Adagrad(fused=True)``; those of Adam are DTensor's own."""
    parameters = args[0]

    def shard(value: Any, like: DTensor | None = None) -> Any:
        if isinstance(value, (list, tuple)):
            return [shard(each, parameter) for each, parameter in zip(value, parameters, strict=len(value) > 0)]
        if not isinstance(value, DTensor):
            return value
        whole = [Replicate()] * value.device_mesh.ndim
        return redistribution.local_as(value, like.placements if like is not None and value.shape == like.shape else whole)

    op(*map(shard, args), **{name: shard(value) for name, value in kwargs.items()})
