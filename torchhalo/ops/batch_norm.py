"""Batch norm in all its variants, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchhalo.exchange.memory import formatted, laid_out, memory_format, strides
from torchhalo.kernels.norms import input_gradient, normalize_, per_channel
from torchhalo.ops.normalization import channel_placements, non_member_gradients, parameter_gradient
from torchhalo.ops.reduction import Reduction
from torchhalo.ops.statistics import deviations, merged, products, wide
from torchhalo.torch_internals import collectives, dtensors, fake_tensors, handlers, redistribution, simulation
from torchhalo.torch_internals.redistribution import local_as
from torchhalo.torch_internals.tracing import depend_if_empty

aten = torch.ops.aten


def _updated(buffer: DTensor, value: DTensor, momentum: float, in_place: bool) -> DTensor:
    """A running statistic after one more value."""
    if any(p.is_partial() for p in buffer.placements):
        raise NotImplementedError(f"batch_norm: running statistics must be Replicate or Shard, got {buffer.placements}")
    shard = dtensors.local(redistribution.redistribute(value, buffer.placements))
    target = dtensors.local(buffer) if in_place else dtensors.local(buffer).clone()
    target.mul_(1 - momentum).add_(shard.to(target.dtype), alpha=momentum)
    return dtensors.wrap(target, buffer.device_mesh, buffer.placements, dtensors.meta(buffer))


def _plain_batch_norm(op: handlers.Op, input: DTensor, *rest: Any) -> tuple[Any, ...]:
    """What plain torch returns: one like the input, and others that depend on its channels alone, asked for once."""
    if 0 in input.shape:
        return fake_tensors.plain_result(op, input, *rest)
    known = dtensors.signature(input)
    shape, stride, dtype = known.meta
    few = (2, shape[1], *[2] * (len(shape) - 2))
    small = known._replace(meta=dtensors.Meta(few, strides(few, torch.contiguous_format), dtype))
    first, *others = fake_tensors.plain_result(op, small, *rest)
    return first._replace(shape=shape, stride=strides(shape, memory_format(shape, stride))), *others


@handlers.register(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
    traffic="two numbers per channel from every rank in training, nothing in evaluation",
)
def batch_norm(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Handler of all variants of batch norm."""
    given = handlers.named(op, args, kwargs)
    names = ("input", "weight", "bias", "running_mean", "running_var")
    input, *parameters = dtensors.as_dtensors("batch_norm", **{name: given.get(name) for name in names})
    results = _plain_batch_norm(op, *handlers.bind(op, args, kwargs))
    training = given.get("training", "with_update" in op.overloadpacket.__name__)
    eps = given["eps"] if "eps" in given else given["epsilon"]
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, (0, *range(2, input.ndim)))
    channels, everywhere = channel_placements(input.placements), [Replicate()] * over.mesh.ndim
    places = [list(input.placements), *(channels if all(r.shape) else everywhere for r in results[1:])]
    if done := dtensors.non_member_result(input, results, places):
        return done
    weight, bias, running_mean, running_var = (local_as(tensor, channels) for tensor in parameters)
    buffers = [buffer for buffer in parameters[2:] if buffer is not None]
    if training:
        out, mean, rstd, squares = _train(input, over, weight, bias, eps, results[0])
        meta = dtensors.Meta((input.shape[1],), (1,), mean.dtype)
        latest = [dtensors.wrap(value, over.mesh, channels, meta) for value in (mean, squares / (over.members - 1))]
        momentum = given["momentum"] if "momentum" in given else given["exponential_average_factor"]
        in_place = not op.overloadpacket.__name__.endswith("functional")
        buffers = [_updated(*pair, momentum, in_place) for pair in zip(buffers, latest, strict=False)]
    else:
        assert running_mean is not None and running_var is not None
        mean, rstd = running_mean, (running_var + eps).rsqrt()
        out = simulation.per_rank(_evaluated, dtensors.local(input), weight, bias, running_mean, running_var, eps)
    shards = [laid_out(out, results[0]), mean, rstd]
    wrapped = [
        dtensors.wrap(shard if all(result.shape) else shard.new_empty(0), over.mesh, place, result._replace(dtype=shard.dtype))
        for shard, result, place in zip(shards, results, places, strict=False)
    ]
    rest = results[3:]
    if rest and rest[0].dtype == torch.uint8:  # cuDNN's workspace
        wrapped.append(dtensors.wrap(out.new_empty(0, dtype=torch.uint8), over.mesh, everywhere, rest[0]._replace(shape=(0,))))
    return (*wrapped, *buffers[: len(results) - len(wrapped)])


def _evaluated(
    shard: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    out: torch.Tensor = aten.native_batch_norm(shard, weight, bias, mean, var, False, 0.0, eps)[0] if shard.numel() else shard
    return out


def _train(
    input: DTensor,
    over: Reduction,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    result: dtensors.Meta,
) -> tuple[torch.Tensor, ...]:
    """This rank's output; for its channels, the mean, one over the standard deviation, and the sum of squared deviations."""
    counts, dtype = over.counts(), wide(input.dtype)

    def finish(
        parts: torch.Tensor, rest: torch.Tensor, center: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        mean, squares = merged(parts, counts)
        rstd = (squares / over.members + eps).rsqrt().to(dtype)
        factors = (per_channel(tensor, rest.ndim, dtype) for tensor in (weight, bias))
        out = normalize_(rest, (center - mean).to(dtype), rstd, *factors).to(result.dtype)
        return depend_if_empty(out, parts), mean.view(-1).to(dtype), rstd.view(-1), squares.view(-1).to(dtype)

    rest, center, parts = simulation.per_rank(deviations, dtensors.local(input), over.dims)
    return simulation.per_rank(finish, over.gather(parts), rest, center, weight, bias)


@handlers.register(
    aten.native_batch_norm_backward.default,
    aten.cudnn_batch_norm_backward.default,
    aten.miopen_batch_norm_backward.default,
    aten.batch_norm_backward.default,
    traffic="two numbers per channel, reduced, in training; nothing in evaluation, where the weight's gradient is Partial",
)
def batch_norm_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor | None, ...]:
    """Handler of the gradients of all variants of batch norm."""
    given = handlers.named(op, args, kwargs)
    grad, input, weight = dtensors.as_dtensors(
        "batch_norm backward",
        grad_output=given.get("grad_out", given.get("grad_output")),
        input=given["input"],
        weight=given["weight"],
    )
    training = given.get("train", given.get("update", True))
    mask = given.get("output_mask", [True, True, True])
    eps = given["eps"] if "eps" in given else given["epsilon"]
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, (0, *range(2, input.ndim)))
    channels = channel_placements(input.placements)
    result = formatted(dtensors.meta(input), input)
    meta = dtensors.Meta((input.shape[1],), (1,), input.dtype)
    if done := non_member_gradients(input, [result, meta, meta], [input.placements, channels, channels], mask):
        return done
    grad = redistribution.redistribute(grad, input.placements)
    dtype, ndim = wide(input.dtype), input.ndim
    names = (
        ("save_mean", "save_invstd" if "save_invstd" in given else "save_var") if training else ("running_mean", "running_var")
    )
    statistics = [
        local_as(tensor, channels)
        for tensor in dtensors.as_dtensors("batch_norm backward", input=input, **{name: given[name] for name in names})[1:]
    ]

    def factors(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, ...]:
        second = second.to(dtype)
        pair = first.to(dtype), second if training else (second + eps).rsqrt()
        return tuple(tensor.view(1, -1, *[1] * (ndim - 2)) for tensor in pair)

    def summary(grad: torch.Tensor, shard: torch.Tensor, *statistics: torch.Tensor) -> torch.Tensor:
        mean, rstd = factors(*statistics)
        first, second = products(grad, shard, mean, over.dims)
        return torch.stack([first, second * rstd])

    def finish(
        sums: torch.Tensor, grad: torch.Tensor, shard: torch.Tensor, weight: torch.Tensor | None, *statistics: torch.Tensor
    ) -> torch.Tensor:
        mean, rstd = factors(*statistics)
        factor = per_channel(weight, ndim, dtype)
        scale = rstd if factor is None else rstd * factor
        if training:
            sums = sums if factor is None else sums * factor
            out = input_gradient(grad, shard, sums, mean, rstd, scale, over.members)
        else:
            out = grad * scale
        return depend_if_empty(laid_out(out.to(result.dtype), result), sums)

    shards = dtensors.local(grad), dtensors.local(input)
    sums = simulation.per_rank(summary, *shards, *statistics)
    add_up = training and mask[0]
    sums = collectives.all_reduce(sums, over.mesh, over.axes) if add_up else sums
    found: list[DTensor | None] = [None, None, None]
    if mask[0]:
        out = simulation.per_rank(finish, sums, *shards, local_as(weight, channels), *statistics)
        found[0] = dtensors.wrap(out, over.mesh, input.placements, result)
    places = [Partial() if axis in over.axes and not add_up else p for axis, p in enumerate(channels)]
    for i, which in ((1, 1), (2, 0)):
        if mask[i]:
            found[i] = parameter_gradient(sums[which].reshape(-1), weight, input, input.shape[1:2], places)
    return tuple(found)
