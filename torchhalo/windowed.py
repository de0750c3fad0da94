"""Run a local kernel over a sharded tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchhalo import dispatch
from torchhalo.exchange import Exchange, Plan, anchor, assemble, group_places, start
from torchhalo.geometry import Box, Mirror, Window
from torchhalo.layout import Layout

T = TypeVar("T")


def exchange_between(source: Layout, target: Layout, windows: Mapping[int, Window | Mirror]) -> Exchange:
    """The exchange for an op that reads ``source`` through ``windows``, one per dim that it moves along."""
    dims = tuple(dim for dim in sorted(windows) if source.cuts[dim])
    return Exchange(source, target, dims, tuple(windows[dim] for dim in dims))


def run(
    kernel: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    shard: torch.Tensor,
    exchange: Exchange,
    mesh: DeviceMesh,
    fit: Callable[[Plan, tuple[int, ...]], tuple[Box, T]],
    *others: torch.Tensor | None,
    fill: float = 0.0,
) -> Any:
    """Give each rank what it needs of the source and compute there.

    Args:
        kernel: Called with the assembled region, what ``fit`` gave with it, the rank's coordinate and ``others``, all of one
            rank. It returns a tensor or a flat tuple of tensors.
        shard: What this rank holds of the exchange's source.
        fit: From a rank's plan and coordinate, the box to assemble, which holds ``plan.needs``, and a word for the kernel.
        others: Tensors that the kernel also wants.
        fill: The value of what lies outside the source.
    """
    halo = start(shard, exchange, mesh)
    places = group_places(exchange, mesh)

    def on_rank(
        shard: torch.Tensor,
        halo: torch.Tensor | None,
        others: Sequence[torch.Tensor | None],
        coordinate: tuple[int, ...],
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        plan = exchange.plan(coordinate, places)
        box, word = fit(plan, coordinate)
        halo = None if halo is None else dispatch.wait(halo)
        result = kernel(assemble(shard, halo, exchange, plan, box, fill), word, coordinate, *others)
        if halo is None or halo.numel():
            return result
        if isinstance(result, torch.Tensor):
            return anchor(result, halo)
        smallest = min(result, key=torch.Tensor.numel)
        return tuple(anchor(tensor, halo) if tensor is smallest else tensor for tensor in result)

    return dispatch.per_rank(on_rank, shard, halo, others, dispatch.coordinate(mesh))


def memory_format(shape: Sequence[int], stride: Sequence[int]) -> torch.memory_format:
    """The memory format of a tensor, for `torch.Tensor.contiguous`: channels-last if it is that and nothing else."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if len(shape) not in formats or _dense(shape, stride, range(len(shape))):
        return torch.contiguous_format
    return formats[len(shape)] if _dense(shape, stride, (0, *range(2, len(shape)), 1)) else torch.contiguous_format


def strides(shape: Sequence[int], format: torch.memory_format) -> tuple[int, ...]:
    """The strides of a dense tensor of ``shape`` in a memory format."""
    order = range(len(shape)) if format == torch.contiguous_format else (0, *range(2, len(shape)), 1)
    found = dict.fromkeys(order, 1)
    for place, dim in enumerate(order):
        found[dim] = prod(max(1, shape[inner]) for inner in order[place + 1 :])
    return tuple(found[dim] for dim in range(len(shape)))


def _dense(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the dims lie in memory in ``order``, the outermost first, without gaps."""
    return all(
        shape[dim] == 1 or stride[dim] == prod(shape[inner] for inner in order[place + 1 :]) for place, dim in enumerate(order)
    )
