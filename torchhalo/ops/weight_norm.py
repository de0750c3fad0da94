"""Weight norm: a weight made of its direction and its length, by a fused kernel of torch's.

Weights are small and whole on every rank, and their gradients are partial sums. The gradients of direction and length are
linear in these, and so are partial sums too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.torch_internals import dtensors, fake_tensors, handlers, redistribution, simulation

aten = torch.ops.aten

TRAFFIC = "nothing, unless the weight is cut along another dim than that of its norms"


@handlers.register(aten._weight_norm_interface.default, traffic=TRAFFIC)
def weight_norm(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Handler of ``aten._weight_norm_interface``: the weight, and the norms for backward."""
    direction, length, dim = handlers.bind(op, args, kwargs)
    direction, length = dtensors.as_dtensors("weight_norm", v=direction, g=length)
    home = _home(direction, dim)
    return _on_each_rank(op, {direction: home, length: home}, dim, home)


@handlers.register(aten._weight_norm_interface_backward.default, traffic=TRAFFIC)
def weight_norm_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Handler of ``aten._weight_norm_interface_backward``."""
    *tensors, dim = handlers.bind(op, args, kwargs)
    names = ("grad_w", "saved_v", "saved_g", "saved_norms")
    grad, *saved = dtensors.as_dtensors("weight_norm backward", **dict(zip(names, tensors, strict=True)))
    home = _home(saved[0], dim)
    summands = [q if p == Replicate() and q.is_partial() else p for p, q in zip(home, grad.placements, strict=True)]
    return _on_each_rank(op, {grad: summands, **dict.fromkeys(saved, home)}, dim, summands)


def _home(direction: DTensor, dim: int) -> list[Placement]:
    """Where a weight is for its norm to be taken: cut along the dim of the norms, or whole."""
    cut = Shard(dim % direction.ndim)
    return [cut if p == cut else Replicate() for p in direction.placements]


def _on_each_rank(
    op: handlers.Op, tensors: dict[DTensor, list[Placement]], dim: int, placements: Sequence[Placement]
) -> tuple[DTensor, ...]:
    """``op`` of what each rank has.

    Args:
        tensors: Its arguments, and how they are to be placed.
        placements: Of the results.
    """
    results = fake_tensors.plain_result(op, *tensors, dim)
    first = next(iter(tensors))
    if done := dtensors.non_member_result(first, results, [placements] * 2):
        return done

    def kernel(*shards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not shards[0].numel():
            return torch.empty_like(shards[0]), torch.empty_like(shards[-1])
        return op(*(shard.contiguous() for shard in shards), dim)

    shards = [redistribution.local_as(tensor, home) for tensor, home in tensors.items()]
    outs = simulation.per_rank(kernel, *shards)
    return tuple(dtensors.wrap(out, first.device_mesh, placements, result) for out, result in zip(outs, results, strict=True))
