"""Run a local kernel over a sharded tensor, at once or in parts, and its adjoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.assembly import empty, recipe, resized
from torchhalo.exchange.layout import layout
from torchhalo.exchange.memory import laid_out, memory_format, memory_order, strides
from torchhalo.exchange.parts import Pads, bulk_and_strips
from torchhalo.exchange.plan import Exchange, Plan, exchange_between, index
from torchhalo.exchange.source import Source, run
from torchhalo.exchange.task import Task
from torchhalo.exchange.transfer import cut_back, cut_own, fold
from torchhalo.geometry import Box, Grid, Relation
from torchhalo.torch_internals import dtensors, redistribution, streams

Region = Callable[[Exchange, Plan, tuple[int, ...]], "Box | Grid"]


def reach(exchange: Exchange, plan: Plan, coordinate: tuple[int, ...]) -> Box:
    """All that the rank's outputs reach, also beyond the tensor: there the region is filled."""
    own = exchange.target.owned(coordinate)
    return Box(tuple(window.reach(own.spans[dim]) for dim, window in zip(exchange.dims, exchange.windows, strict=True)))


def hull(exchange: Exchange, plan: Plan, coordinate: tuple[int, ...]) -> Box:
    """The smallest box within the tensor that holds all that the rank's outputs read."""
    return plan.needs


def exact(exchange: Exchange, plan: Plan, coordinate: tuple[int, ...]) -> Grid:
    """Just what the rank's outputs read."""
    return plan.exact


def forward(
    kernel: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    input: DTensor,
    windows: Mapping[int, Relation],
    results: Sequence[dtensors.Meta],
    *others: DTensor | None,
    region: Region = hull,
    fill: float = 0.0,
    pads: Pads | None = None,
) -> tuple[DTensor, ...]:
    """Apply a local kernel to a sharded tensor; the results are sharded as it is.

    Args:
        kernel: Called with what ``region`` says of the source, a `Task`, and the shards of ``others``; it returns the rank's
            part of each of ``results``, a tensor if there is one, else a tuple. It is also called where a shard is empty.
        input: Partial sums are added up first.
        windows: For each dim that the op moves along, what an output reads. All dims keep their place.
        results: What plain torch gives for the whole tensor.
        others: Tensors that the kernel also wants, as they are.
        region: `hull`, `reach` or `exact`.
        fill: The value of what lies outside the source.
        pads: For a kernel that pads by itself, as `Task.padding` says, with the same value, and of which the region is what it
            can `reach`: whether it can do so along a dim, by so much at both ends, where the last so many elements are left
            over. Then large shards are computed in parts.

    Example:
        Every second column, of whatever is sharded (below autograd, in a handler)::

            (y,) = forward(lambda region, task: region, x, {3: Window(1, stride=2)}, [result], region=exact)
    """
    mesh = input.device_mesh
    input = redistribution.reduce_partial(input)
    placements = input.placements
    if done := dtensors.non_member_result(input, results, [placements] * len(results)):
        return done
    exchange = exchange_between(layout(input.shape, mesh, placements), layout(results[0].shape, mesh, placements), windows)
    format = memory_format(input.shape, input.stride())

    def on_source(source: Source, coordinate: tuple[int, ...], *others: torch.Tensor | None) -> Any:
        held = region(exchange, source.plan, coordinate)
        task = Task(coordinate, exchange.source.owned(coordinate), exchange.target.owned(coordinate), held, exchange.dims)
        bulk, strips = bulk_and_strips(exchange, source.plan, task, source.shard, format, pads) if pads else (None, [])
        if bulk is None:
            return kernel(source.region(held), task, *others)
        side = streams.SideStream(source.shard)
        found: Any = kernel(source.held(recipe(exchange, source.plan, bulk.region)), bulk, *others)
        with side:
            parts: list[Any] = [kernel(source.region(strip.region), strip, *others) for strip in strips]
        for strip, part in zip(strips, parts, strict=True):
            cut = strip.outputs.within(task.outputs)
            for whole, value in zip(found, part, strict=True) if isinstance(found, tuple) else [(found, part)]:
                whole[cut].copy_(value)
        return found

    shards = [None if other is None else dtensors.local(other) for other in others]
    out = run(on_source, laid_out(dtensors.local(input), input), exchange, mesh, *shards, format=format, fill=fill)
    outs = (out,) if len(results) == 1 else out
    return tuple(
        dtensors.wrap(laid_out(shard, result), mesh, placements, result) for shard, result in zip(outs, results, strict=True)
    )


def keep(region: torch.Tensor, task: Task) -> torch.Tensor:
    """The kernel of an op that moves elements and does not change them."""
    return region


def fetch(input: DTensor, relations: Mapping[int, Relation], shape: Sequence[int], region: Region) -> torch.Tensor:
    """What each rank's part of a result of ``shape`` reads of ``input``, as it is."""
    meta = dtensors.Meta(tuple(shape), strides(tuple(shape), torch.contiguous_format), input.dtype)
    return dtensors.local(forward(keep, input, relations, [meta], region=region)[0])


def adjoint(
    kernel: Callable[..., torch.Tensor],
    grad: DTensor,
    windows: Mapping[int, Relation],
    result: dtensors.Meta,
    *others: DTensor | None,
    region: Region = hull,
    pads: Pads | None = None,
) -> DTensor:
    """The gradient of a linear `forward`: each rank turns its part of ``grad`` into one over all it read, which is folded.

    Args:
        kernel: Called with the rank's shard of ``grad``, a `Task` and the shards of ``others``; it returns a value for each
            element of the region.
        grad: The gradient of the target, sharded as the source is to be.
        windows: As in the forward op.
        result: The source's shape, strides and dtype.
        others: Tensors that the kernel also wants; of the shape of ``grad`` if ``pads`` is given.
        region: `hull` or `exact`.
        pads: As in `forward`, for a kernel that leaves out what falls on the padding. Then a large shard's gradients of what
            other ranks own are computed first, and travel while the kernel turns to the shard.
    """
    mesh = grad.device_mesh
    grad = redistribution.reduce_partial(grad)
    placements = grad.placements
    if done := dtensors.non_member_result(grad, [result], [placements]):
        return done[0]
    exchange = exchange_between(layout(result.shape, mesh, placements), layout(grad.shape, mesh, placements), windows)
    format = memory_format(result.shape, result.stride)

    def parts(plan: Plan, coordinate: tuple[int, ...], shard: torch.Tensor) -> tuple[Task, Task | None, list[Task]]:
        owned, outputs = exchange.source.owned(coordinate), exchange.target.owned(coordinate)
        task = Task(coordinate, owned, outputs, region(exchange, plan, coordinate), exchange.dims)
        bulk, strips = bulk_and_strips(exchange, plan, task, shard, format, pads) if pads else (None, [])
        return (task, None, []) if bulk is None or bulk.region != plan.owned else (task, bulk, strips)

    def edge(
        plan: Plan, coordinate: tuple[int, ...], shard: torch.Tensor, *others: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        task, bulk, strips = parts(plan, coordinate, shard)
        if bulk is None:
            values = kernel(shard, task, *others)
            return cut_back(values, exchange, plan, region is exact), values
        found = []
        for strip in strips:
            cut = strip.outputs.within(task.outputs)
            reads = exchange.needs(Box(tuple(strip.outputs.spans[dim] for dim in task.dims)))
            found.append((reads, kernel(shard[cut], strip._replace(region=reads), *(other[cut] for other in others))))
        return [_gathered(box, found, exchange) for box in plan.receives], shard

    def rest(
        plan: Plan, coordinate: tuple[int, ...], values: torch.Tensor, shard: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        _, bulk, _ = parts(plan, coordinate, shard)
        return cut_own(values, exchange, plan, region is exact) if bulk is None else kernel(shard, bulk, *others)

    tensors = [laid_out(dtensors.local(grad), grad), *(None if other is None else dtensors.local(other) for other in others)]
    out = fold(edge, rest, exchange, mesh, *tensors, order=memory_order(format, len(result.shape)))
    return dtensors.wrap(laid_out(out, result), mesh, placements, result)


def _gathered(box: Box, found: Sequence[tuple[Box, torch.Tensor]], exchange: Exchange) -> torch.Tensor:
    """What regions that may overlap have for ``box``, added up."""
    meeting = [(region, values, box & region) for region, values in found if (box & region).size]
    if len(meeting) == 1 and meeting[0][2] == box:
        region, values, _ = meeting[0]
        return values[index(exchange, box, region)]
    like = meeting[0][1]
    out = empty(like, resized(like.shape, exchange.dims, box.shape)).zero_()
    for region, values, common in meeting:
        out[index(exchange, common, box)].add_(values[index(exchange, common, region)])
    return out
