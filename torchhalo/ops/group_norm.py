"""Group norm, forward and backward; channels may be cut across groups."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchhalo.exchange.memory import formatted, laid_out, memory_format, strides
from torchhalo.geometry import Span
from torchhalo.kernels.norms import input_gradient, normalize_, per_channel
from torchhalo.ops.normalization import Placements, channel_placements, non_member_gradients, parameter_gradient
from torchhalo.ops.reduction import Reduction
from torchhalo.ops.statistics import deviations, merged, products, wide
from torchhalo.torch_internals import collectives, dtensors, fake_tensors, handlers, process_groups, redistribution, simulation
from torchhalo.torch_internals.constants import constant
from torchhalo.torch_internals.redistribution import local_as
from torchhalo.torch_internals.tracing import depend_if_empty

aten = torch.ops.aten


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
        mean = groups.sum(means) / constant([max(1, length) for length in groups.lengths()], means)
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
        factors = (per_channel(tensor, rest.ndim, dtype) for tensor in (weight, bias))
        shift = (center - groups.spread(mean, rest.ndim)).to(dtype)
        out = normalize_(rest, shift, groups.spread(rstd, rest.ndim), *factors)
        return depend_if_empty(laid_out(out.to(results[0].dtype), results[0]), parts), mean.to(dtype), rstd

    where = process_groups.coordinate(over.mesh)
    rest, center, parts = simulation.per_rank(summary, dtensors.local(input), where)
    channels = channel_placements(input.placements)
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
    channels = channel_placements(input.placements)
    rows = [p if p == Shard(0) else Replicate() for p in input.placements]
    result = formatted(dtensors.meta(input), input)
    meta = dtensors.Meta((input.shape[1],), (1,), input.dtype)
    if done := non_member_gradients(input, [result, meta, meta], [input.placements, rows, rows], mask):
        return done
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
        factor = per_channel(weight, ndim, dtype)
        per_group = [groups.sum(cells) for cells in (sums if factor is None else sums * factor)]
        channels = groups.whole(sums.flatten(2).sum(1))
        return torch.cat([torch.stack(per_group).flatten(), channels.flatten()])

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
        factor = per_channel(weight, ndim, dtype)
        per_cell = torch.stack([groups.spread(each, ndim) for each in per_group])
        scale = spread if factor is None else spread * factor
        out = input_gradient(grad, shard, per_cell, center, spread, scale, over.members // count)
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
            found[i] = parameter_gradient(last, weight, input, (size,), places)
    return tuple(found)
