"""Layer norm and RMS norm, forward and backward: a statistic per row, parameters along it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchhalo.exchange.memory import formatted, laid_out, strides
from torchhalo.kernels.norms import input_gradient, normalize_
from torchhalo.ops.normalization import Placements, non_member_gradients, parameter_gradient
from torchhalo.ops.reduction import Reduction
from torchhalo.ops.statistics import deviations, merged, total, wide
from torchhalo.torch_internals import collectives, dtensors, fake_tensors, handlers, redistribution, simulation
from torchhalo.torch_internals.grid_shard import BOXES
from torchhalo.torch_internals.redistribution import local_as
from torchhalo.torch_internals.tracing import depend_if_empty

aten = torch.ops.aten


@handlers.register(
    aten.native_layer_norm.default,
    aten._fused_rms_norm.default,
    traffic="two numbers per row from every rank (RMS: one); nothing if the normalised dims are not sharded",
)
def layer_norm(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Handler of ``aten.native_layer_norm`` and ``aten._fused_rms_norm``."""
    given = handlers.named(op, args, kwargs)
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
        return rest, torch.zeros_like(squares), squares / over.members

    def finish(
        parts: torch.Tensor, rest: torch.Tensor, center: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        mean, variance = merged(parts, counts) if centered else (center, parts)
        rstd = (variance + eps).rsqrt().to(dtype)
        out = normalize_(rest, (center - mean).to(dtype), rstd, *(_in_row(tensor, lead, dtype) for tensor in (weight, bias)))
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
        Shard(p.dim - lead) if axis in over.axes and isinstance(p, BOXES) else Replicate()
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
    given = handlers.named(op, args, kwargs)
    names = ("grad_out", "input", "mean", "rstd", "weight", "bias")
    tensors = dtensors.as_dtensors("layer_norm backward", **{name: given.get(name) for name in names})
    grad, input, mean, rstd, weight, bias = tensors
    centered, mask, shape = op is aten.native_layer_norm_backward.default, given["output_mask"], given["normalized_shape"]
    input = redistribution.reduce_partial(input)
    lead = input.ndim - len(shape)
    over = Reduction.of(input, range(lead, input.ndim))
    rows, parameters = over.result(keepdim=True), _along_rows(over, lead)
    result = formatted(dtensors.meta(input), input)
    meta = dtensors.Meta(tuple(shape), strides(tuple(shape), torch.contiguous_format), input.dtype)
    if done := non_member_gradients(
        input, [result, meta, meta][: len(mask)], [input.placements, parameters, parameters][: len(mask)], mask
    ):
        return done
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
        second = total(weighted * rest, over.dims)
        first = total(weighted, over.dims) if centered else torch.zeros_like(second)
        each = grad * rest * rstd if mask[1] else rest
        sums = [total(tensor, range(lead)).view(shard.shape[lead:]) for tensor in (each, grad)]
        return weighted, torch.stack([first, second]), *sums

    def finish(
        sums: torch.Tensor, weighted: torch.Tensor, shard: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor
    ) -> torch.Tensor:
        rstd = rstd.to(dtype)
        out = input_gradient(weighted, shard, sums, None if mean is None else mean.to(dtype), rstd, rstd, rstd, over.members)
        return depend_if_empty(laid_out(out.to(result.dtype), result), sums)

    if over.axes or (input.device.type == "cpu" and not centered):  # the CPU has no kernel of RMS norm's gradient
        weighted, sums, *found = simulation.per_rank(summary, *shards)
        if mask[0]:
            sums = collectives.all_reduce(sums, over.mesh, over.axes, in_place=True)
            out = simulation.per_rank(finish, sums, weighted, *shards[1:4])
        found = [out if mask[0] else sums, *found]
    else:
        saved = [t for t in shards[2:4] if t is not None]
        given_too = [shards[4], local_as(bias, parameters)] if centered else [shards[4]]

        def alone(grad: torch.Tensor, shard: torch.Tensor, *rest: torch.Tensor | None) -> Any:
            return op(grad, shard, shape, *rest, mask)

        found = list(simulation.per_rank(alone, laid_out(shards[0], grad), laid_out(shards[1], input), *saved, *given_too))
    summed: Placements = [
        Partial() if isinstance(p, BOXES) and axis not in over.axes else q
        for axis, (p, q) in enumerate(zip(input.placements, parameters, strict=True))
    ]
    wrapped: list[DTensor | None] = [None] * len(mask)
    if mask[0]:
        wrapped[0] = dtensors.wrap(laid_out(found[0], result), over.mesh, input.placements, result)
    for i, owner in ((1, weight), (2, bias)):
        if i < len(mask) and mask[i]:
            wrapped[i] = parameter_gradient(found[i], owner, input, shape, summed)
    return tuple(wrapped)
