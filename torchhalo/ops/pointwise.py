"""Pointwise ops, mostly gradients of activations, for which stock DTensor has no rule, or one that gathers tiny shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchhalo.exchange.broadcasting import aligned, shared_placements
from torchhalo.exchange.memory import laid_out
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups

aten = torch.ops.aten

OPS = (
    "_conj_physical",
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "celu",
    "complex",
    "elu",
    "elu_backward",
    "hardshrink",
    "hardshrink_backward",
    "hardsigmoid",
    "hardsigmoid_backward",
    "hardswish",
    "hardswish_backward",
    "hardtanh",
    "hardtanh_backward",
    "leaky_relu",
    "leaky_relu_backward",
    "log_sigmoid_backward",
    "log_sigmoid_forward",
    "mish",
    "mish_backward",
    "polar",
    "rrelu_with_noise_backward",
    "softplus",
    "softplus_backward",
    "softshrink",
    "softshrink_backward",
)


@handlers.register(*(getattr(aten, name).default for name in OPS), aten.ne.Tensor, traffic="nothing")
def pointwise(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | tuple[DTensor, ...]:
    """Handler of ops whose tensors broadcast to the shape of the first result."""
    given = handlers.bind(op, args, kwargs)
    places = [place for place, value in enumerate(given) if isinstance(value, torch.Tensor)]
    name = op.overloadpacket.__name__
    tensors = dtensors.as_dtensors(name, **{f"argument {place}": given[place] for place in places})
    for place, tensor in zip(places, tensors, strict=True):
        given[place] = tensor
    results = fake_tensors.plain_result(op, *given)
    mesh, shape = tensors[0].device_mesh, results[0].shape
    placements = shared_placements(shape, tensors)
    if process_groups.coordinate(mesh) is None:
        outs = [dtensors.local(tensors[0]).new_empty(0, dtype=result.dtype) for result in results]
    else:
        for place in places:
            given[place] = dtensors.local(aligned(given[place], placements, shape))
        out = op(*given)
        outs = list(out) if isinstance(out, tuple) else [out]
    # CUDA's log_sigmoid has a second result, of no elements.
    homes = [placements if result.shape == shape else [Replicate()] * mesh.ndim for result in results]
    wrapped = tuple(
        dtensors.wrap(laid_out(shard, result), mesh, home, result)
        for shard, result, home in zip(outs, results, homes, strict=True)
    )
    return wrapped if len(wrapped) > 1 else wrapped[0]


@handlers.register(*(getattr(aten, f"{name}_").default for name in OPS if hasattr(aten, f"{name}_")), traffic="nothing")
def pointwise_(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of those that write in place: of tiny shards, stock DTensor moves the tensor to another dim for them."""
    tensor = args[0]
    op(dtensors.local(tensor), *args[1:], **kwargs)
    return tensor


@handlers.register(aten.glu.default, traffic="what changes owner, where the halved dim is cut")
def glu(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.glu``, for which torch 2.11 has no rule."""
    input, dim = handlers.bind(op, args, kwargs)
    fake_tensors.plain_result(op, input, dim)
    values, gates = aten.split.Tensor(input, input.shape[dim] // 2, dim)
    return aten.mul.Tensor(values, aten.sigmoid(gates))


@handlers.register(aten.glu_backward.default, traffic="what changes owner, where the halved dim is cut")
def glu_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.glu_backward``."""
    grad, input, dim = handlers.bind(op, args, kwargs)
    values, gates = aten.split.Tensor(input, input.shape[dim] // 2, dim)
    open_gates = aten.sigmoid(gates)
    of_values = aten.mul.Tensor(grad, open_gates)
    of_gates = aten.sigmoid_backward(aten.mul.Tensor(grad, values), open_gates)
    return aten.cat.default([of_values, of_gates], dim)
