"""Batch, group, layer and RMS norm: statistics over all ranks, and their gradients.

All are one engine. Forward: a rank takes mean and squared deviations of its part, per channel, group or row; one gather merges
those of all ranks; each normalises its own part. Backward: the gradient, and its product with the normalised input, are summed
over what shares a statistic, and over the ranks by one all-reduce; from these each rank computes its part. Where no statistic
has its elements on different ranks, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.memory import laid_out, memory_format, strides
from torchhalo.geometry import Span
from torchhalo.ops.reduction import Reduction, deviations, merged, named, products, total, wide
from torchhalo.torch_internals import (
    collectives,
    dtensors,
    fake_tensors,
    handlers,
    process_groups,
    redistribution,
    simulation,
    tracing,
)
from torchhalo.torch_internals.redistribution import local_as
from torchhalo.torch_internals.tracing import depend_if_empty

aten = torch.ops.aten

Placements = list[Placement]


# The engine, on one rank. Statistics and parameters have a shape that fits the input: [1, C, 1, 1] of a batch norm.


def _affine(input: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor, in_place: bool) -> torch.Tensor:
    """``input * factor + shift``, perhaps in the memory of ``input``.

    With one factor per channel that is batch norm in evaluation, whose kernel took one core 9 ms in place, `addcmul` 15, for 16
    contiguous channels of 768x1536 in float32; in channels-last `addcmul` was the faster one.
    """
    channels = input.shape[1] if input.ndim > 2 else 0
    if (
        input.device.type == "cpu"
        and input.numel()
        and input.is_contiguous()
        and factor.numel() == shift.numel() == factor.shape[1] == channels
        and input.dtype == factor.dtype == shift.dtype
        and not tracing.is_traced(input)
    ):
        factor, shift = factor.view(-1), shift.view(-1)
        plain = torch.zeros_like(factor), torch.ones_like(factor)
        if not in_place:
            return aten.native_batch_norm(input, factor, shift, *plain, False, 0.0, 0.0)[0]
        out = {"out": input, "save_mean": input.new_empty(0), "save_invstd": input.new_empty(0)}
        return aten.native_batch_norm.out(input, factor, shift, *plain, False, 0.0, 0.0, **out)[0]
    return torch.addcmul(shift, input, factor, out=input if in_place else None)


def _scaled(
    rest: torch.Tensor, shift: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """``(rest + shift) * rstd * weight + bias``, in the memory of ``rest``, which holds deviations from a rank's own mean."""
    apart = weight is not None and any(a > 1 and b == 1 for a, b in zip(weight.shape, rstd.shape, strict=True))
    if weight is not None and not apart:
        rstd = rstd * weight
    shift = shift * rstd
    if bias is not None and not apart:
        shift = shift + bias
    rest = _affine(rest, rstd, shift, in_place=True)
    if apart:  # along different dims: the product of both factors would be as large as the input
        assert weight is not None
        rest.mul_(weight)
        rest = rest if bias is None else rest.add_(bias)
    return rest


def _input_gradient(
    grad: torch.Tensor,
    input: torch.Tensor,
    sums: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    scale: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """The gradient of the input.

    Args:
        grad: Gradient of the output.
        sums: Over all that share a statistic: of the gradient, and of its product with the normalised input.
        mean: None, if it is not taken out.
        rstd: One over the standard deviation.
        scale: What the gradient is multiplied by.
        count: How many share a statistic.
    """
    first, second = (sums * (rstd / -count)).unbind(0)
    slope = second * rstd
    out = _affine(input, slope, first if mean is None else first - slope * mean, in_place=False)
    return out.addcmul_(grad.to(out.dtype), scale)


def _per_channel(tensor: torch.Tensor | None, ndim: int, dtype: torch.dtype) -> torch.Tensor | None:
    """A parameter of each channel in the shape of the input."""
    return None if tensor is None else tensor.to(dtype).view(1, -1, *[1] * (ndim - 2))


# Placements.


def _channels(placements: Sequence[Placement]) -> Placements:
    """Of a tensor with one element per channel: cut where the channels are."""
    return [Shard(0) if p == Shard(1) else Replicate() for p in placements]


def _parameter_gradient(
    shard: torch.Tensor, owner: DTensor | None, input: DTensor, shape: Sequence[int], placements: Placements
) -> DTensor:
    """The gradient of a parameter, returned as that is placed; as it was computed where that saves a collective.

    Args:
        owner: The parameter; the weight for a bias that the op is not given.
        input: The op's input, whose dtype a gradient has if there is no owner.
    """
    dtype = input.dtype if owner is None else owner.dtype
    meta = dtensors.Meta(tuple(shape), strides(tuple(shape), torch.contiguous_format), dtype)
    found = dtensors.wrap(shard.to(dtype), input.device_mesh, placements, meta)
    owned = [Replicate()] * len(placements) if owner is None else owner.placements
    pairs = zip(placements, owned, strict=True)
    return redistribution.redistribute(
        found, [q if isinstance(q, Shard) else p if p.is_partial() else Replicate() for p, q in pairs]
    )


# Batch norm.


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
    given = named(op, args, kwargs)
    names = ("input", "weight", "bias", "running_mean", "running_var")
    input, *parameters = dtensors.as_dtensors("batch_norm", **{name: given.get(name) for name in names})
    results = _plain_batch_norm(op, *handlers.bind(op, args, kwargs))
    training = given.get("training", "with_update" in op.overloadpacket.__name__)
    eps = given["eps"] if "eps" in given else given["epsilon"]
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, (0, *range(2, input.ndim)))
    channels, everywhere = _channels(input.placements), [Replicate()] * over.mesh.ndim
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
        factors = (_per_channel(tensor, rest.ndim, dtype) for tensor in (weight, bias))
        out = _scaled(rest, (center - mean).to(dtype), rstd, *factors).to(result.dtype)
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
    given = named(op, args, kwargs)
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
    channels = _channels(input.placements)
    result = dtensors.Meta(tuple(input.shape), _dense_strides(input), input.dtype)
    meta = dtensors.Meta((input.shape[1],), (1,), input.dtype)
    if done := dtensors.non_member_result(input, [result, meta, meta], [input.placements, channels, channels]):
        return tuple(grad if wanted else None for grad, wanted in zip(done, mask, strict=True))
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
        factor = _per_channel(weight, ndim, dtype)
        scale = rstd if factor is None else rstd * factor
        if training:
            sums = sums if factor is None else sums * factor
            out = _input_gradient(grad, shard, sums, mean, rstd, scale, over.members)
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
            found[i] = _parameter_gradient(sums[which].reshape(-1), weight, input, input.shape[1:2], places)
    return tuple(found)


def _dense_strides(input: DTensor) -> tuple[int, ...]:
    return strides(tuple(input.shape), memory_format(input.shape, input.stride()))


# Group norm.


class _Groups(NamedTuple):
    """The channels that a rank owns, of ``groups`` groups of ``size`` channels each."""

    channels: Span
    size: int
    groups: int

    def lengths(self) -> list[int]:
        """How many of the rank's channels each group has."""
        return [(self.channels & Span(g * self.size, (g + 1) * self.size)).size for g in range(self.groups)]

    def whole(self, cells: torch.Tensor) -> torch.Tensor:
        """Zeros for the channels of other ranks: ``[..., own] -> [..., all]``."""
        return aten.constant_pad_nd(cells, [self.channels.start, self.groups * self.size - self.channels.stop])

    def sum(self, cells: torch.Tensor) -> torch.Tensor:
        """Over the rank's channels of each group: ``[N, own, 1, 1] -> [N, groups]``."""
        return self.whole(cells.flatten(1)).unflatten(1, (self.groups, self.size)).sum(2)

    def spread(self, groups: torch.Tensor, ndim: int) -> torch.Tensor:
        """To each of the rank's channels what its group has: ``[N, groups] -> [N, own, 1, 1]``."""
        every = groups.unsqueeze(2).expand(-1, -1, self.size).flatten(1)
        return every[:, self.channels.start : self.channels.stop].reshape(len(every), self.channels.size, *[1] * (ndim - 2))


def _groups(over: Reduction, coordinate: Sequence[int], count: int) -> _Groups:
    return _Groups(over.layout.owned(coordinate).spans[1], over.layout.shape[1] // count, count)


@handlers.register(aten.native_group_norm.default, traffic="two numbers per sample and group from every rank")
def group_norm(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Handler of ``aten.native_group_norm``; channels may be sharded in any way, also across groups."""
    input, weight, bias = dtensors.as_dtensors("group_norm", input=args[0], weight=args[1], bias=args[2])
    results = list(fake_tensors.plain_result(op, input, weight, bias, *args[3:]))
    # Fake tensors have other strides along dims of size 1.
    shape, stride, _ = results[0]
    results[0] = results[0]._replace(stride=strides(shape, memory_format(shape, stride)))
    count, eps = args[6:]
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, range(1, input.ndim))
    rows = [p if p == Shard(0) else Replicate() for p in input.placements]
    if done := dtensors.non_member_result(input, results, [input.placements, rows, rows]):
        return done
    spatial, dtype = range(2, input.ndim), wide(input.dtype)
    counts = [
        [length * _size(box.spans[2:]) for length in _Groups(box.spans[1], input.shape[1] // count, count).lengths()]
        for box in over.boxes()
    ]

    def summary(shard: torch.Tensor, coordinate: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        groups = _groups(over, coordinate, count)
        rest, center, (means, squares) = deviations(shard, spatial)
        # from channels to groups, as from ranks to all
        mean = groups.sum(means) / means.new_tensor(groups.lengths()).clamp(min=1)
        apart = (means - groups.spread(mean, shard.ndim)).square() * _size(shard.shape[2:])
        return rest, center, torch.stack([mean, groups.sum(squares + apart)])

    def finish(
        parts: torch.Tensor,
        rest: torch.Tensor,
        center: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        coordinate: tuple[int, ...],
    ) -> tuple[torch.Tensor, ...]:
        groups = _groups(over, coordinate, count)
        mean, squares = merged(parts, counts)
        rstd = (squares / (over.members // count) + eps).rsqrt().to(dtype)
        factors = (_per_channel(tensor, rest.ndim, dtype) for tensor in (weight, bias))
        shift = (center - groups.spread(mean, rest.ndim)).to(dtype)
        out = _scaled(rest, shift, groups.spread(rstd, rest.ndim), *factors)
        return depend_if_empty(laid_out(out.to(results[0].dtype), results[0]), parts), mean.to(dtype), rstd

    where = process_groups.coordinate(over.mesh)
    rest, center, parts = simulation.per_rank(summary, dtensors.local(input), where)
    channels = _channels(input.placements)
    parameters = local_as(weight, channels), local_as(bias, channels)
    shards = simulation.per_rank(finish, over.gather(parts), rest, center, *parameters, where)
    return tuple(
        dtensors.wrap(shard, over.mesh, place, result._replace(dtype=shard.dtype))
        for shard, place, result in zip(shards, (input.placements, rows, rows), results, strict=True)
    )


def _size(spans: Sequence[Any]) -> int:
    return prod(span if isinstance(span, int) else span.size for span in spans)


@handlers.register(
    aten.native_group_norm_backward.default,
    traffic="two numbers per sample and group and two per channel, reduced; nothing if only the batch is sharded",
)
def group_norm_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor | None, ...]:
    """Handler of ``aten.native_group_norm_backward``."""
    names = ("grad_output", "input", "mean", "rstd", "weight")
    grad, input, mean, rstd, weight = dtensors.as_dtensors("group_norm backward", **dict(zip(names, args, strict=False)))
    count, mask = args[8:]
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, range(1, input.ndim))
    channels = _channels(input.placements)
    rows = [p if p == Shard(0) else Replicate() for p in input.placements]
    result = dtensors.Meta(tuple(input.shape), _dense_strides(input), input.dtype)
    meta = dtensors.Meta((input.shape[1],), (1,), input.dtype)
    if done := dtensors.non_member_result(input, [result, meta, meta], [input.placements, rows, rows]):
        return tuple(grad if wanted else None for grad, wanted in zip(done, mask, strict=True))
    grad = redistribution.redistribute(grad, input.placements)
    spatial, dtype, ndim = range(2, input.ndim), wide(input.dtype), input.ndim

    def summary(
        grad: torch.Tensor,
        shard: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        coordinate: tuple[int, ...],
    ) -> torch.Tensor:
        groups = _groups(over, coordinate, count)
        first, second = products(grad, shard, groups.spread(mean.to(dtype), ndim), spatial)
        sums = torch.stack([first, second * groups.spread(rstd.to(dtype), ndim)])
        factor = _per_channel(weight, ndim, dtype)
        per_group = [groups.sum(cells) for cells in (sums if factor is None else sums * factor)]
        per_channel = groups.whole(sums.flatten(2).sum(1))
        return torch.cat([torch.stack(per_group).flatten(), per_channel.flatten()])

    def finish(
        sums: torch.Tensor,
        grad: torch.Tensor,
        shard: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        coordinate: tuple[int, ...],
    ) -> torch.Tensor:
        groups = _groups(over, coordinate, count)
        per_group = sums[: 2 * rstd.numel()].view(2, *rstd.shape)
        center, spread = (groups.spread(each.to(dtype), ndim) for each in (mean, rstd))
        factor = _per_channel(weight, ndim, dtype)
        per_cell = torch.stack([groups.spread(each, ndim) for each in per_group])
        scale = spread if factor is None else spread * factor
        out = _input_gradient(grad, shard, per_cell, center, spread, scale, over.members // count)
        return depend_if_empty(laid_out(out.to(result.dtype), result), sums)

    where = process_groups.coordinate(over.mesh)
    shards = (
        dtensors.local(grad),
        dtensors.local(input),
        local_as(mean, rows),
        local_as(rstd, rows),
        local_as(weight, channels),
    )
    sums = simulation.per_rank(summary, *shards, where)
    sums = collectives.all_reduce(sums, over.mesh, over.axes) if mask[0] else sums
    found: list[DTensor | None] = [None, None, None]
    if mask[0]:
        out = simulation.per_rank(finish, sums, *shards, where)
        found[0] = dtensors.wrap(out, over.mesh, input.placements, result)
    summed = [axis for axis, p in enumerate(input.placements) if p == Shard(0) or (axis in over.axes and not mask[0])]
    places: Placements = [Partial() if axis in summed else Replicate() for axis in range(over.mesh.ndim)]
    size = input.shape[1]
    for i, last in ((1, sums[sums.numel() - size :]), (2, sums[sums.numel() - 2 * size : sums.numel() - size])):
        if mask[i]:
            found[i] = _parameter_gradient(last, weight, input, (size,), places)
    return tuple(found)


# Layer norm and RMS norm: a statistic per row, parameters along it.


@handlers.register(
    aten.native_layer_norm.default,
    aten._fused_rms_norm.default,
    traffic="two numbers per row from every rank (RMS: one); nothing if the normalised dims are not sharded",
)
def layer_norm(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Handler of ``aten.native_layer_norm`` and ``aten._fused_rms_norm``."""
    given = named(op, args, kwargs)
    names = ("input", "weight", "bias")
    input, weight, bias = dtensors.as_dtensors("layer_norm", **{name: given.get(name) for name in names})
    centered, eps, shape = op is aten.native_layer_norm.default, given["eps"], given["normalized_shape"]
    if list(shape) != list(input.shape[-len(shape) :]):  # fake tensors object in other words
        aten.native_layer_norm(torch.zeros(()).expand(input.shape), shape, None, None, 0.0)
    results = fake_tensors.plain_result(op, *args, **kwargs)
    input = redistribution.reduce_partial(input)
    lead = input.ndim - len(shape)
    over = Reduction.of(input, range(lead, input.ndim))
    rows, parameters = over.result(keepdim=True), _along_rows(over, lead)
    places = [list(input.placements), *[rows] * (len(results) - 1)]
    if done := dtensors.non_member_result(input, results, places):
        return done
    dtype, counts = wide(input.dtype), over.counts()
    eps = torch.finfo(dtype).eps if eps is None else eps
    shard, factors = (
        dtensors.local(input),
        [local_as(weight, parameters), local_as(bias, parameters)],
    )

    def summary(shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if centered:
            return deviations(shard, over.dims)
        rest = shard.to(dtype, copy=True)
        squares = total(rest.square(), over.dims)
        return rest, torch.zeros_like(squares), squares

    def finish(
        parts: torch.Tensor, rest: torch.Tensor, center: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        mean, squares = merged(parts, counts) if centered else (center, parts)
        rstd = (squares / over.members + eps).rsqrt().to(dtype)
        out = _scaled(rest, (center - mean).to(dtype), rstd, *(_in_row(tensor, lead, dtype) for tensor in (weight, bias)))
        return (
            depend_if_empty(laid_out(out.to(results[0].dtype), results[0]), parts),
            *([mean.to(dtype)] if centered else []),
            rstd,
        )

    def alone(shard: torch.Tensor, *factors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return op(shard, shape, *(factors if centered else factors[:1]), given["eps"])

    if over.axes:
        rest, center, parts = simulation.per_rank(summary, shard)
        parts = over.gather(parts) if centered else collectives.all_reduce(parts, over.mesh, over.axes)
        found = simulation.per_rank(finish, parts, rest, center, *factors)
    else:
        found = simulation.per_rank(alone, laid_out(shard, input), *factors)
    return tuple(
        dtensors.wrap(laid_out(shard, result), over.mesh, place, result._replace(dtype=shard.dtype))
        for shard, place, result in zip(found, places, results, strict=True)
    )


def _along_rows(over: Reduction, lead: int) -> Placements:
    """Of a parameter with one element per place in a row: cut where the row is."""
    return [
        Shard(p.dim - lead) if axis in over.axes and isinstance(p, Shard) else Replicate()
        for axis, p in enumerate(over.placements)
    ]


def _in_row(tensor: torch.Tensor | None, lead: int, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype).view(*[1] * lead, *tensor.shape)


@handlers.register(
    aten.native_layer_norm_backward.default,
    aten._fused_rms_norm_backward.default,
    traffic="two numbers per row, reduced, and the parameters' gradients; nothing if the normalised dims are not sharded",
)
def layer_norm_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor | None, ...]:
    """Handler of ``aten.native_layer_norm_backward`` and ``aten._fused_rms_norm_backward``."""
    given = named(op, args, kwargs)
    names = ("grad_out", "input", "mean", "rstd", "weight", "bias")
    tensors = dtensors.as_dtensors("layer_norm backward", **{name: given.get(name) for name in names})
    grad, input, mean, rstd, weight, bias = tensors
    centered, mask, shape = op is aten.native_layer_norm_backward.default, given["output_mask"], given["normalized_shape"]
    input = redistribution.reduce_partial(input)
    lead = input.ndim - len(shape)
    over = Reduction.of(input, range(lead, input.ndim))
    rows, parameters = over.result(keepdim=True), _along_rows(over, lead)
    result = dtensors.Meta(tuple(input.shape), _dense_strides(input), input.dtype)
    meta = dtensors.Meta(tuple(shape), strides(tuple(shape), torch.contiguous_format), input.dtype)
    if done := dtensors.non_member_result(
        input, [result, meta, meta][: len(mask)], [input.placements, parameters, parameters][: len(mask)]
    ):
        return tuple(grad if wanted else None for grad, wanted in zip(done, mask, strict=True))
    grad = redistribution.redistribute(grad, input.placements)
    dtype = wide(input.dtype)
    shards: list[Any] = [dtensors.local(grad), dtensors.local(input)]
    shards += [
        local_as(mean, rows),
        local_as(rstd, rows),
        local_as(weight, parameters),
    ]

    def summary(
        grad: torch.Tensor, shard: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        rest = shard.to(dtype, copy=True) if mean is None else shard - mean.to(dtype)
        rstd, factor = rstd.to(dtype), _in_row(weight, lead, dtype)
        weighted = grad.to(dtype) if factor is None else grad * factor
        second = total(weighted * rest, over.dims) * rstd
        first = total(weighted, over.dims) if centered else torch.zeros_like(second)
        each = grad * rest * rstd if mask[1] else rest
        sums = [total(tensor, range(lead)).view(shard.shape[lead:]) for tensor in (each, grad)]
        return weighted, torch.stack([first, second]), *sums

    def finish(
        sums: torch.Tensor, weighted: torch.Tensor, shard: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor
    ) -> torch.Tensor:
        rstd = rstd.to(dtype)
        out = _input_gradient(weighted, shard, sums, None if mean is None else mean.to(dtype), rstd, rstd, over.members)
        return depend_if_empty(laid_out(out.to(result.dtype), result), sums)

    if over.axes or (input.device.type == "cpu" and not centered):  # the CPU has no kernel of RMS norm's gradient
        weighted, sums, *found = simulation.per_rank(summary, *shards)
        if mask[0]:
            out = simulation.per_rank(finish, collectives.all_reduce(sums, over.mesh, over.axes), weighted, *shards[1:4])
        found = [out if mask[0] else sums, *found]
    else:
        saved = [t for t in shards[2:4] if t is not None]
        given_too = [shards[4], local_as(bias, parameters)] if centered else [shards[4]]

        def alone(grad: torch.Tensor, shard: torch.Tensor, *rest: torch.Tensor | None) -> Any:
            return op(grad, shard, shape, *rest, mask)

        found = list(simulation.per_rank(alone, laid_out(shards[0], grad), laid_out(shards[1], input), *saved, *given_too))
    summed: Placements = [
        Partial() if isinstance(p, Shard) and axis not in over.axes else q
        for axis, (p, q) in enumerate(zip(input.placements, parameters, strict=True))
    ]
    wrapped: list[DTensor | None] = [None] * len(mask)
    if mask[0]:
        wrapped[0] = dtensors.wrap(laid_out(found[0], result), over.mesh, input.placements, result)
    for i, owner in ((1, weight), (2, bias)):
        if i < len(mask) and mask[i]:
            wrapped[i] = _parameter_gradient(found[i], owner, input, shape, summed)
    return tuple(wrapped)


handlers.register_composites(
    __name__,
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.group_norm.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten._batch_norm_impl_index.default,
    traffic="as the ops that it is made of",
)
