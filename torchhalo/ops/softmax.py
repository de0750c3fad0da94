"""Softmax and log_softmax: each rank's largest and sum of exponentials, merged."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.memory import laid_out
from torchhalo.ops.reduction import Reduction
from torchhalo.ops.statistics import total, wide
from torchhalo.torch_internals import collectives, dtensors, fake_tensors, handlers, redistribution, simulation
from torchhalo.torch_internals.tracing import depend_if_empty

aten = torch.ops.aten


@handlers.register(
    aten._softmax.default,
    aten._log_softmax.default,
    traffic="two numbers per row from every rank; nothing if the dim is not sharded",
)
def softmax(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``softmax`` and ``log_softmax``."""
    (result,) = fake_tensors.plain_result(op, *args, **kwargs)
    input, dim, half_to_float = args
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, (dim,))
    if done := dtensors.non_member_result(input, [result], [input.placements]):
        return done[0]
    shard = dtensors.local(input)
    if not over.axes:
        return dtensors.wrap(laid_out(op(shard, dim, half_to_float), result), over.mesh, input.placements, result)

    def summary(shard: torch.Tensor) -> torch.Tensor:
        if not shard.shape[dim]:
            none = total(shard, over.dims)
            return torch.stack([none - inf, none])
        x = shard.to(wide(shard.dtype))
        most = x.amax(dim, keepdim=True)
        # Where all is -inf, the difference would be nan.
        return torch.stack([most, total((x - most.nan_to_num(nan=torch.nan, posinf=inf, neginf=0.0)).exp_(), over.dims)])

    def finish(parts: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        mosts, sums = parts.unbind(1)
        most = mosts.amax(0)
        norm = (sums * (mosts - most).exp()).sum(0)
        rest = shard.to(wide(shard.dtype)) - most
        out = rest.exp_().div_(norm) if op is aten._softmax.default else rest.sub_(norm.log())
        return depend_if_empty(laid_out(out.to(result.dtype), result), parts)

    parts = over.gather(simulation.per_rank(summary, shard))
    return dtensors.wrap(simulation.per_rank(finish, parts, shard), over.mesh, input.placements, result)


@handlers.register(aten._safe_softmax.default, traffic="that of softmax, and whether all is masked")
def safe_softmax(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten._safe_softmax``, which is zero where all of a row is masked by -inf."""
    input, dim, dtype = handlers.bind(op, args, kwargs)
    fake_tensors.plain_result(op, input, dim, dtype)
    input = redistribution.reduce_partial(input if dtype is None else aten._to_copy.default(input, dtype=dtype))
    masked = aten.all.dim(aten.eq.Scalar(input, -inf), dim, True)
    return aten.masked_fill.Scalar(aten._softmax.default(input, dim, False), masked, 0.0)


@handlers.register(
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    traffic="one number per row, reduced; nothing if the dim is not sharded",
)
def softmax_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of their gradients."""
    (result,) = fake_tensors.plain_result(op, *args, **kwargs)
    grad, output, dim, dtype = args
    grad, output = dtensors.as_dtensors(op.overloadpacket.__name__, grad_output=grad, output=output)
    output = redistribution.reduce_partial(output)
    grad = redistribution.redistribute(grad, output.placements)
    over = Reduction.of(output, (dim,))
    if done := dtensors.non_member_result(output, [result], [output.placements]):
        return done[0]
    if not over.axes:
        out = op(dtensors.local(grad), dtensors.local(output), dim, dtype)
        return dtensors.wrap(laid_out(out, result), over.mesh, output.placements, result)

    def summary(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        grad = grad.to(wide(grad.dtype))
        return total(grad * output if op is aten._softmax_backward_data.default else grad, over.dims)

    def finish(sums: torch.Tensor, grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        if op is aten._softmax_backward_data.default:
            out = (grad - sums).mul_(output)
        else:
            out = torch.addcmul(grad, output.to(sums.dtype).exp(), sums, value=-1)
        return depend_if_empty(laid_out(out.to(result.dtype), result), sums)

    shards = dtensors.local(grad), dtensors.local(output)
    sums = collectives.all_reduce(simulation.per_rank(summary, *shards), over.mesh, over.axes)
    return dtensors.wrap(simulation.per_rank(finish, sums, *shards), over.mesh, output.placements, result)


# Stock DTensor would gather for these.
handlers.register_composites(
    __name__,
    aten.softmax.int,
    aten.log_softmax.int,
    traffic="as the ops that it is made of",
)
