"""Group norm, forward and backward; channels may be cut across groups."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchhalo.exchange.memory import canonical, laid_out, memory_format, strides
from torchhalo.geometry import Box
from torchhalo.kernels import group_norm as kernels
from torchhalo.kernels.group_norm import Groups
from torchhalo.kernels.norms import affine, input_gradient
from torchhalo.ops.normalization import Placements, channel_placements, non_member_gradients, parameter_gradient
from torchhalo.ops.reduction import Reduction
from torchhalo.ops.statistics import deviations, merged, products, shares, wide
from torchhalo.torch_internals import (
    caching,
    collectives,
    dtensors,
    fake_tensors,
    handlers,
    process_groups,
    redistribution,
    simulation,
)
from torchhalo.torch_internals.constants import constant
from torchhalo.torch_internals.redistribution import local_as
from torchhalo.torch_internals.tracing import depend_if_empty

aten = torch.ops.aten


class _Program:
    """All of a group norm, forward or backward, that is not data."""

    def __init__(self, mesh: DeviceMesh, input: dtensors.Signature, count: int) -> None:
        shape, stride, dtype = input.meta
        self.over = Reduction.between(mesh, input.placements, shape, range(1, len(shape)))
        self.count, self._size = count, shape[1] // count
        self.members, self.wide, self.ndim = self.over.members // count, wide(dtype), len(shape)
        self.spatial = tuple(range(2, len(shape)))
        self.rows = [p if p == Shard(0) else Replicate() for p in input.placements]
        self.channels = channel_placements(input.placements)
        self.format = memory_format(shape, stride)
        self.like_input = dtensors.Meta(shape, strides(shape, self.format), dtype)
        self.grad = dtensors.Result(mesh, input.placements, self.like_input)
        boxes = self.over.boxes()
        counts = [tuple(length * _volume(box) for length in Groups(box.spans[1], self._size, count).lengths()) for box in boxes]
        alike = all(len(set(each)) == 1 for each in counts)
        self.counts: tuple[Any, ...] = tuple(each[0] for each in counts) if alike else tuple(counts)
        self._groups: dict[tuple[int, ...], Groups] = {}

    def groups(self, coordinate: tuple[int, ...]) -> Groups:
        if coordinate not in self._groups:
            self._groups[coordinate] = Groups(self.over.layout.owned(coordinate).spans[1], self._size, self.count)
        return self._groups[coordinate]


class _Forward(_Program):
    def __init__(self, mesh: DeviceMesh, input: dtensors.Signature, dtype: torch.dtype, *rest: Any) -> None:
        super().__init__(mesh, input, rest[-1])
        _, *others = fake_tensors.plain_result(aten.native_group_norm.default, input, *rest, 0.5)
        self.shares = shares(self.counts)
        self.results = [self.like_input._replace(dtype=dtype), *others]
        places = input.placements, self.rows, self.rows
        dtypes = dtype, self.wide, self.wide
        self.wraps = [
            dtensors.Result(mesh, place, result._replace(dtype=dtype))
            for place, result, dtype in zip(places, self.results, dtypes, strict=True)
        ]


def _volume(box: Box) -> int:
    """How many elements of each channel a box has."""
    return prod(span.size for span in box.spans[2:])


@handlers.register(aten.native_group_norm.default, traffic="two numbers per sample and group from every rank")
def group_norm(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Handler of ``aten.native_group_norm``; channels may be sharded in any way, also across groups.

    A ``dtype``, of which the op knows nothing, is that of the output.
    """
    input, weight, bias = dtensors.as_dtensors("group_norm", input=args[0], weight=args[1], bias=args[2])
    input = redistribution.reduce_partial(input)
    signature, *parameters = (None if tensor is None else dtensors.signature(tensor) for tensor in (input, weight, bias))
    dtype = kwargs.get("dtype", input.dtype)
    program = caching.cached_on_mesh(input.device_mesh, _Forward, signature, dtype, *parameters, *map(int, args[3:7]))
    over, dtype, result, eps = program.over, program.wide, program.results[0], args[7]
    if done := dtensors.non_member_result(input, program.results, [input.placements, program.rows, program.rows]):
        return done

    def summary(shard: torch.Tensor, coordinate: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        groups = program.groups(coordinate)
        if kernels.usable(shard):
            shard = canonical(shard, program.format)
            return shard, kernels.statistics(shard, groups)
        rest, center, parts = deviations(shard, program.spatial)
        means, variances = parts.flatten(2).unbind()
        # from channels to groups, as from ranks to all
        lengths: Any = groups.size if groups.all else constant(groups.lengths(), means).clamp(min=1)
        mean = groups.sum(means) / lengths
        apart = means - groups.spread(mean)
        return rest, torch.stack([mean, groups.sum(torch.addcmul(variances, apart, apart)) / lengths]), center

    def finish(
        parts: torch.Tensor,
        rest: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        coordinate: tuple[int, ...],
        center: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if center is None:
            groups = program.groups(coordinate)
            out, *found = kernels.normalize(rest, parts, program.shares, weight, bias, eps, groups, result.dtype)
            return out, *found
        mean, variance = merged(parts, program.counts)
        few = torch.stack([mean, (variance + eps).rsqrt()])
        means, scale = program.groups(coordinate).spread(few).unbind()
        scale = scale if weight is None else scale * weight
        shift = center.flatten(1) - means
        shift = shift * scale if bias is None else torch.addcmul(bias, shift, scale)
        scale, shift = torch.stack([scale, shift]).to(dtype).view(2, *center.shape).unbind()
        out = affine(rest, scale, shift, in_place=True)
        return depend_if_empty(laid_out(out.to(result.dtype), result), parts), *few.to(dtype).unbind()

    where = process_groups.coordinate(over.mesh)
    rest, parts, *center = simulation.per_rank(summary, dtensors.local(input), where)
    factors = local_as(weight, program.channels), local_as(bias, program.channels)
    shards = simulation.per_rank(finish, over.gather(parts), rest, *factors, where, *center)
    return tuple(known.wrap(shard) for known, shard in zip(program.wraps, shards, strict=True))


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
    program = caching.cached_on_mesh(input.device_mesh, _Program, dtensors.signature(input), count)
    over, rows, dtype, ndim, result = program.over, program.rows, program.wide, program.ndim, program.like_input
    meta = dtensors.Meta((input.shape[1],), (1,), input.dtype)
    if done := non_member_gradients(input, [result, meta, meta], [input.placements, rows, rows], mask):
        return done
    grad = redistribution.redistribute(grad, input.placements)

    def summary(
        grad: torch.Tensor,
        shard: torch.Tensor,
        mean: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        coordinate: tuple[int, ...],
    ) -> tuple[torch.Tensor, ...]:
        groups = program.groups(coordinate)
        if kernels.usable(shard):
            grad, shard = (canonical(tensor, program.format) for tensor in (grad, shard))
            return kernels.products(grad, shard, mean, rstd, weight, groups), mean, rstd, grad, shard
        center, spread = groups.spread(torch.stack([mean, rstd]).to(dtype)).unbind()
        sums = products(grad, shard, center.reshape(*center.shape, *[1] * (ndim - 2)), program.spatial).flatten(2)
        per_group = groups.sum(sums if weight is None else sums * weight.to(dtype))
        first, second = sums.unbind()
        channels = groups.whole(torch.stack([first.sum(0), (second * spread).sum(0)]))
        return torch.cat([per_group.flatten(), channels.flatten()]), center, spread, grad, shard

    def finish(
        sums: torch.Tensor,
        center: torch.Tensor,
        spread: torch.Tensor,
        grad: torch.Tensor,
        shard: torch.Tensor,
        weight: torch.Tensor | None,
        coordinate: tuple[int, ...],
    ) -> torch.Tensor:
        if kernels.usable(shard):
            groups = program.groups(coordinate)
            return kernels.input_gradient(grad, shard, center, spread, weight, sums, program.members, groups)
        per_group = sums[: 2 * len(shard) * count].view(2, len(shard), count)
        few = [*program.groups(coordinate).spread(per_group).unbind(), center, spread]
        few.append(spread if weight is None else spread * weight.to(dtype))
        *per_cell, center, spread, scale = (each.reshape(*each.shape, *[1] * (ndim - 2)) for each in few)
        out = input_gradient(grad, shard, per_cell, center, spread, scale, spread, program.members)
        return depend_if_empty(laid_out(out.to(result.dtype), result), sums)

    where = process_groups.coordinate(over.mesh)
    factor = local_as(weight, program.channels)
    sums, *rest = simulation.per_rank(
        summary, dtensors.local(grad), dtensors.local(input), local_as(mean, rows), local_as(rstd, rows), factor, where
    )
    sums = collectives.all_reduce(sums, over.mesh, over.axes) if mask[0] else sums
    found: list[DTensor | None] = [None, None, None]
    if mask[0]:
        found[0] = program.grad.wrap(simulation.per_rank(finish, sums, *rest, factor, where))
    summed = [axis for axis, p in enumerate(input.placements) if p == Shard(0) or (axis in over.axes and not mask[0])]
    places: Placements = [Partial() if axis in summed else Replicate() for axis in range(over.mesh.ndim)]
    size = input.shape[1]
    for i, last in ((1, sums[sums.numel() - size :]), (2, sums[sums.numel() - 2 * size : sums.numel() - size])):
        if mask[i]:
            found[i] = parameter_gradient(last, weight, input, (size,), places)
    return tuple(found)
