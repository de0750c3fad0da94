"""Pointwise ops, mostly gradients of activations, for which stock DTensor has no rule, or one that gathers tiny shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo import dispatch
from torchhalo.windowed import laid_out

aten = torch.ops.aten

OPS = (
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "elu_backward",
    "hardshrink_backward",
    "hardsigmoid_backward",
    "hardswish",
    "hardswish_backward",
    "hardtanh_backward",
    "leaky_relu_backward",
    "log_sigmoid_backward",
    "log_sigmoid_forward",
    "mish_backward",
    "rrelu_with_noise_backward",
    "softplus_backward",
    "softshrink_backward",
)


@dispatch.register(*(getattr(aten, name).default for name in OPS), traffic="nothing")
def pointwise(op: dispatch.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | tuple[DTensor, ...]:
    """Handler of ops whose tensors broadcast to the shape of the results: all are placed as the most sharded of them."""
    given = dispatch.bound(op, args, kwargs)
    names = [str(number) for number in range(len(given))]
    tensors = {name: value for name, value in zip(names, given, strict=True) if isinstance(value, torch.Tensor)}
    tensors = dict(zip(tensors, dispatch.as_dtensors(op.overloadpacket.__name__, **tensors), strict=True))
    given = [tensors.get(name, value) for name, value in zip(names, given, strict=True)]
    results = dispatch.plain_result(op, *given)
    shape = results[0].shape
    leader = max(
        (t for t in tensors.values() if tuple(t.shape) == shape), key=lambda t: sum(isinstance(p, Shard) for p in t.placements)
    )
    placements = dispatch.without_partial(leader.placements)
    mesh = leader.device_mesh
    if dispatch.coordinate(mesh) is None:
        outs = [dispatch.local(leader).new_empty(0, dtype=result.dtype) for result in results]
    else:
        shards = [
            dispatch.local(dispatch.redistribute(value, [_cut(p, value, shape) for p in placements]))
            if isinstance(value, DTensor)
            else value
            for value in given
        ]
        out = op(*shards)
        outs = list(out) if isinstance(out, tuple) else [out]
    # CUDA's log_sigmoid has a second result, of no elements.
    homes = [placements if result.shape == shape else [Replicate()] * mesh.ndim for result in results]
    wrapped = tuple(
        dispatch.wrap(laid_out(shard, result), mesh, home, result)
        for shard, result, home in zip(outs, results, homes, strict=True)
    )
    return wrapped if len(wrapped) > 1 else wrapped[0]


def _cut(placement: Placement, tensor: DTensor, shape: tuple[int, ...]) -> Placement:
    """How a tensor that broadcasts to ``shape`` goes with a result that is placed so."""
    if isinstance(placement, Shard) and tensor.ndim == len(shape) and tensor.shape[placement.dim] == shape[placement.dim]:
        return placement
    return Replicate()
