"""Batch norm in all its variants, forward and backward.

What depends on no data is a program, worked out once for each signature.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchhalo.exchange.memory import laid_out, memory_format, strides
from torchhalo.kernels.norms import (
    affine,
    fused,
    fused_batch_norm,
    fused_input_gradient,
    fused_statistics,
    fused_sums,
    input_gradient,
    per_channel,
)
from torchhalo.ops.normalization import channel_placements, non_member_gradients, parameter_gradient
from torchhalo.ops.reduction import Reduction
from torchhalo.ops.statistics import deviations, merged, products, wide
from torchhalo.torch_internals import caching, collectives, dtensors, fake_tensors, handlers, redistribution, simulation
from torchhalo.torch_internals.constants import constant
from torchhalo.torch_internals.redistribution import local_as
from torchhalo.torch_internals.tracing import depend_if_empty, is_traced

aten = torch.ops.aten


class _Program:
    """All of a batch norm, forward or backward, that is not data."""

    def __init__(self, mesh: DeviceMesh, input: dtensors.Signature) -> None:
        self.input, (shape, stride, dtype) = input, input.meta
        self.over = Reduction.between(mesh, input.placements, shape, (0, *range(2, len(shape))))
        self.members, self.counts = self.over.members, self.over.counts()
        self.channels, self.everywhere = channel_placements(input.placements), [Replicate()] * mesh.ndim
        self.ndim, self.wide = len(shape), wide(dtype)
        self.statistic = dtensors.Meta(shape[1:2], (1,), self.wide)
        self.like_input = dtensors.Meta(shape, strides(shape, memory_format(shape, stride)), dtype)


class _Forward(_Program):
    def __init__(self, mesh: DeviceMesh, input: dtensors.Signature, op: handlers.Op, *rest: Any) -> None:
        super().__init__(mesh, input)
        self.results = self._plain(op, *rest)
        self.places = [input.placements, *(self.channels if all(r.shape) else self.everywhere for r in self.results[1:])]
        self.output = dtensors.Result(mesh, input.placements, self.results[0])
        name = op.overloadpacket.__name__
        self.updates, self.in_place = "with_update" in name, not name.endswith("functional")
        self.unbiased = self.members / (self.members - 1) if self.members > 1 else float("inf")

    def takes(self, buffer: DTensor) -> bool:
        """Whether torch's kernels can update the shard of a running statistic."""
        return list(buffer.placements) == self.channels

    def _plain(self, op: handlers.Op, *rest: Any) -> tuple[Any, ...]:
        """What plain torch returns: one like the input, and others that depend on its channels alone, asked for once."""
        shape, _, dtype = self.input.meta
        if 0 in shape:
            return fake_tensors.plain_result(op, self.input, *rest)
        few = (2, shape[1], *[2] * (len(shape) - 2))
        small = replace(self.input, meta=dtensors.Meta(few, strides(few, torch.contiguous_format), dtype))
        first, *others = fake_tensors.plain_result(op, small, *rest)
        return first._replace(shape=shape, stride=self.like_input.stride), *others


def _key(value: Any) -> Any:
    """Of an argument what a program depends on; numbers such as a momentum, which may change at each step, are not."""
    if isinstance(value, DTensor):
        return dtensors.signature(value)
    return 0.5 if isinstance(value, float) else value


def _update(
    buffers: list[DTensor], targets: list[torch.Tensor], values: list[torch.Tensor], momentum: float, to: _Forward
) -> None:
    """Add one more value to each running statistic."""
    shards = []
    for buffer, value in zip(buffers, values, strict=False):
        if list(buffer.placements) != to.channels:
            wrapped = dtensors.wrap(value, to.over.mesh, to.channels, to.statistic)
            value = dtensors.local(redistribution.redistribute(wrapped, buffer.placements))
        shards.append(value.to(buffer.dtype))
    if targets:
        aten._foreach_lerp_.Scalar(targets, shards, momentum)  # one launch


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
    input = redistribution.reduce_partial(input)
    given.update((name, tensor) for name, tensor in zip(names[1:], parameters, strict=True) if name in given)
    rest = [_key(value) for value in list(given.values())[1:]]
    program = caching.cached_on_mesh(input.device_mesh, _Forward, dtensors.signature(input), op, *rest)
    results, channels, mesh = program.results, program.channels, input.device_mesh
    if done := dtensors.non_member_result(input, results, program.places):
        return done
    weight, bias, running_mean, running_var = (local_as(tensor, channels) for tensor in parameters)
    buffers = [buffer for buffer in parameters[2:] if buffer is not None]
    eps = given["eps"] if "eps" in given else given["epsilon"]
    if given.get("training", program.updates):
        momentum = given["momentum"] if "momentum" in given else given["exponential_average_factor"]
        if any(map(redistribution.is_partial, buffers)):
            raise NotImplementedError(
                f"batch_norm: running statistics must be Replicate or Shard, got {[b.placements for b in buffers]}"
            )
        targets = [dtensors.local(buffer) if program.in_place else dtensors.local(buffer).clone() for buffer in buffers]
        if fused(dtensors.local(input)) and program.members and all(program.takes(buffer) for buffer in buffers):
            out, mean, rstd = _train_fused(input, program, weight, bias, targets, momentum, eps)
        else:
            out, mean, rstd, variance = _train(input, program, weight, bias, eps)
            _update(buffers, targets, [mean, variance], momentum, program)
        if not program.in_place:
            pairs = zip(targets, buffers, strict=True)
            buffers = [dtensors.wrap(target, mesh, buffer.placements, dtensors.meta(buffer)) for target, buffer in pairs]
    else:
        assert running_mean is not None and running_var is not None
        mean, rstd = running_mean, (running_var + eps).rsqrt()
        out = simulation.per_rank(_evaluated, dtensors.local(input), weight, bias, running_mean, running_var, eps)
    wrapped = [program.output.wrap(laid_out(out, results[0]))]
    for shard, result, place in zip((mean, rstd), results[1:], program.places[1:], strict=False):
        shard = shard if all(result.shape) else shard.new_empty(0)
        wrapped.append(dtensors.wrap(shard, mesh, place, result._replace(dtype=shard.dtype)))
    more = results[3:]
    if more and more[0].dtype == torch.uint8:  # cuDNN's workspace
        workspace = out.new_empty(0, dtype=torch.uint8)
        wrapped.append(dtensors.wrap(workspace, mesh, program.everywhere, more[0]._replace(shape=(0,))))
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
    input: DTensor, program: _Forward, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, ...]:
    """This rank's output; for its channels, the mean, one over the standard deviation, and the unbiased variance."""
    dtype, over = program.wide, program.over

    def finish(
        parts: torch.Tensor, rest: torch.Tensor, center: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        mean, variance = merged(parts, program.counts)
        rstd, shift = (variance + eps).rsqrt(), center - mean
        scale = rstd if weight is None else rstd * per_channel(weight, program.ndim)
        shift = shift * scale if bias is None else torch.addcmul(per_channel(bias, program.ndim), shift, scale)
        few = [mean, rstd, variance * program.unbiased, scale, shift]
        if is_traced(rest):
            mean, rstd, variance, scale, shift = (each.to(dtype) for each in few)
        else:  # one launch
            mean, rstd, variance, scale, shift = torch.stack(few).to(dtype).unbind()
        out = affine(rest, scale, shift, in_place=True).to(program.results[0].dtype)
        return depend_if_empty(out, parts), mean.flatten(), rstd.flatten(), variance.flatten()

    rest, center, parts = simulation.per_rank(deviations, dtensors.local(input), over.dims)
    return simulation.per_rank(finish, over.gather(parts), rest, center, weight, bias)


def _train_fused(
    input: DTensor,
    program: _Forward,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running: list[torch.Tensor],
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """As `_train`, by torch's kernels, which update the running statistics too."""

    def finish(
        parts: torch.Tensor,
        shard: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None = None,
        var: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return fused_batch_norm(shard, parts, constant(program.counts, parts), weight, bias, mean, var, momentum, eps)

    shard = dtensors.local(input)
    parts = program.over.gather(simulation.per_rank(lambda shard: fused_statistics(shard, program.wide, eps), shard))
    return simulation.per_rank(finish, parts, shard, weight, bias, *running)


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
    program = caching.cached_on_mesh(input.device_mesh, _Backward, dtensors.signature(input))
    channels, dtype, ndim, over, result = program.channels, program.wide, program.ndim, program.over, program.like_input
    meta = program.statistic
    if done := non_member_gradients(input, [result, meta, meta], [input.placements, channels, channels], mask):
        return done
    grad = redistribution.redistribute(grad, input.placements)
    names = (
        ("save_mean", "save_invstd" if "save_invstd" in given else "save_var") if training else ("running_mean", "running_var")
    )
    statistics = [
        local_as(tensor, channels)
        for tensor in dtensors.as_dtensors("batch_norm backward", input=input, **{name: given[name] for name in names})[1:]
    ]

    by_torch = training and fused(dtensors.local(input))

    def summary(grad: torch.Tensor, shard: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if by_torch:
            return fused_sums(grad, shard, mean, rstd), mean, rstd
        mean, rstd = (per_channel(each.to(dtype), ndim) for each in (mean, rstd))
        rstd = rstd if training else (rstd + eps).rsqrt()
        return products(grad, shard, mean, over.dims), mean, rstd

    def finish(
        sums: torch.Tensor,
        grad: torch.Tensor,
        shard: torch.Tensor,
        weight: torch.Tensor | None,
        mean: torch.Tensor,
        rstd: torch.Tensor,
    ) -> torch.Tensor:
        if by_torch:
            return laid_out(fused_input_gradient(grad, shard, mean, rstd, weight, sums, program.members), result)
        scale = rstd if weight is None else rstd * per_channel(weight.to(dtype), ndim)
        out = input_gradient(grad, shard, sums, mean, rstd, scale, scale, program.members) if training else grad * scale
        return depend_if_empty(laid_out(out.to(result.dtype), result), sums)

    shards = dtensors.local(grad), dtensors.local(input)
    sums, mean, rstd = simulation.per_rank(summary, *shards, *statistics)
    add_up = training and mask[0]
    sums = collectives.all_reduce(sums, over.mesh, over.axes, in_place=True) if add_up else sums
    found: list[DTensor | None] = [None, None, None]
    if mask[0]:
        found[0] = program.grad.wrap(simulation.per_rank(finish, sums, *shards, local_as(weight, channels), mean, rstd))
    places = channels if add_up else program.partial
    if mask[1]:
        found[1] = parameter_gradient((sums[1] * rstd).reshape(-1), weight, input, input.shape[1:2], places)
    if mask[2]:
        found[2] = parameter_gradient(sums[0].reshape(-1), weight, input, input.shape[1:2], places)
    return tuple(found)


class _Backward(_Program):
    def __init__(self, mesh: DeviceMesh, input: dtensors.Signature) -> None:
        super().__init__(mesh, input)
        self.grad = dtensors.Result(mesh, input.placements, self.like_input)
        self.partial = [Partial() if axis in self.over.axes else p for axis, p in enumerate(self.channels)]
