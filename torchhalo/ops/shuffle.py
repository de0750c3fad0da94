"""Pixel and channel shuffles: what is one element on one side is a block on the other, along channels and along space."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.memory import formatted_on_cpu
from torchhalo.exchange.pieces import gather_pieces
from torchhalo.exchange.task import Task
from torchhalo.exchange.windowed import exact, forward
from torchhalo.geometry import Mirror, Piece, Pieces, Span, Window
from torchhalo.torch_internals import fake_tensors, handlers

aten = torch.ops.aten


@handlers.register(
    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, traffic="what changes owner, where blocks straddle two ranks"
)
def pixel_shuffle(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of both, each of which is the other's backward.

    A shuffle makes one channel of each ``factor**2``, and ``factor`` rows and columns of each one.
    """
    input, factor = handlers.bind(op, args, kwargs)
    shuffles = op is aten.pixel_shuffle.default
    if input.ndim >= 3 and factor > 0:  # else plain torch objects, on all releases alike
        block = (factor**2, 1, 1) if shuffles else (1, factor, factor)
        if any(size % whole for size, whole in zip(input.shape[-3:], block, strict=True)):
            raise RuntimeError(f"{op.name()}: the last dims of the input (={tuple(input.shape)}) must be multiples of {block}")
    (result,) = fake_tensors.plain_result(op, input, factor)
    result = formatted_on_cpu(result, input)
    channels, space = Window(factor**2, stride=factor**2), Window(factor, stride=factor)
    first = input.ndim - 3
    relations = {
        first: channels if shuffles else channels.mirror,
        first + 1: space.mirror if shuffles else space,
        first + 2: space.mirror if shuffles else space,
    }

    def kernel(region: torch.Tensor, task: Task) -> torch.Tensor:
        if not region.numel():
            return region.new_zeros(task.outputs.shape)
        cuts = [slice(None)] * region.ndim
        for dim, relation in relations.items():
            if isinstance(relation, Mirror):
                cuts[dim] = task.outputs.spans[dim].within(task.held(dim).start * relation.window.stride)
        return op(region, factor)[tuple(cuts)]

    return forward(kernel, input, relations, [result])[0]


@handlers.register(
    aten.channel_shuffle.default,
    aten.native_channel_shuffle.default,
    traffic="nothing; the channels that change owner, where channels are sharded",
)
def channel_shuffle(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.channel_shuffle``, its own backward: ``groups`` rows of channels are transposed."""
    input, groups = handlers.bind(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input, groups)
    each = input.shape[1] // groups
    order = [group * each + channel for channel in range(each) for group in range(groups)]
    relations = {1: Pieces(tuple(Piece(Span(i, i + 1), first) for i, first in enumerate(order)))}

    def kernel(region: torch.Tensor, task: Task) -> torch.Tensor:
        return gather_pieces(region, task, relations) if task.dims else op(region, groups)

    return forward(kernel, input, relations, [formatted_on_cpu(result, input)], region=exact)[0]
