"""Padding and its backward: constant (and cropping) as a shifted window of one element, the other modes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.memory import formatted, formatted_on_cpu
from torchhalo.exchange.pieces import gather_pieces, scatter_pieces
from torchhalo.exchange.task import Task
from torchhalo.exchange.windowed import adjoint, exact, forward, reach
from torchhalo.geometry import Piece, Pieces, Span, Window
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, redistribution

aten = torch.ops.aten


@handlers.register(aten.constant_pad_nd.default, traffic="what changes owner")
def constant_pad_nd(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.constant_pad_nd``: ``1234 -> 0012340``; negative padding crops."""
    input, padding, value = (*args, 0)[:3]
    (result,) = fake_tensors.plain_result(op, input, padding, value)
    ends = _ends(input.ndim, padding)
    windows = {dim: Window(1, before=before, after=after) for dim, (before, after) in ends.items()}

    def kernel(region: torch.Tensor, task: Task) -> torch.Tensor:
        rest = [(0, 0) if dim in task.dims else ends.get(dim, (0, 0)) for dim in reversed(range(region.ndim))]
        return aten.constant_pad_nd(region, [end for pair in rest for end in pair], value)

    return forward(kernel, input, windows, [result], region=reach, fill=value)[0]


@handlers.register(
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    traffic="what changes owner, and the mirrored or repeated edge where it is padded",
)
def pad_from_edges(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of reflection, ``1234 -> 32123432``, and replication, ``1234 -> 11123444``; negative padding crops."""
    input, padding = args
    (result,) = fake_tensors.plain_result(op, input, padding)
    relations = _relations(op, input.shape, padding)

    def kernel(region: torch.Tensor, task: Task) -> torch.Tensor:
        return gather_pieces(region, task, relations)

    return forward(kernel, input, relations, [formatted_on_cpu(result, input)], region=exact)[0]


@handlers.register(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
    traffic="the same of the gradient, on its way back",
)
def pad_from_edges_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of the backward of reflection and replication."""
    grad, input = dtensors.as_dtensors(_name(op), grad_output=args[0], input=args[1])
    (result,) = fake_tensors.plain_result(op, grad, input, args[2])
    grad = redistribution.redistribute(grad, redistribution.reduced_placements(input.placements))
    relations = _relations(op, input.shape, args[2])

    def kernel(shard: torch.Tensor, task: Task) -> torch.Tensor:
        return scatter_pieces(shard, task, relations)

    return adjoint(kernel, grad, relations, formatted(result, input), region=exact)


def _name(op: handlers.Op) -> str:
    return op.name().removeprefix("aten::")


def _ends(ndim: int, padding: Sequence[int]) -> dict[int, tuple[int, int]]:
    """How much is added before and after each dim; aten lists the last dim first."""
    return {ndim - 1 - i // 2: (padding[i], padding[i + 1]) for i in range(0, len(padding), 2)}


def _relations(op: handlers.Op, shape: Sequence[int], padding: Sequence[int]) -> dict[int, Pieces]:
    """Which input each output is a copy of: the middle its own, the ends those beside the edge, or the edge itself."""
    sign, beside = (-1, 1) if "reflection" in op.name() else (0, 0)
    relations = {}
    for dim, (before, after) in _ends(len(shape), padding).items():
        size = shape[dim]
        outputs = Span(0, size + before + after)
        ends = before, size + before, size + before + after
        whole = [
            Piece(Span(0, ends[0]), first=before if beside else 0, sign=sign),
            Piece(Span(ends[0], ends[1]), first=0),
            Piece(Span(ends[1], ends[2]), first=size - 1 - beside, sign=sign),
        ]
        relations[dim] = Pieces(tuple(_clipped(piece, outputs) for piece in whole))
    return relations


def _clipped(piece: Piece, outputs: Span) -> Piece:
    """The part of a piece that remains where negative padding crops."""
    mine = piece.outputs & outputs
    return Piece(mine, piece.first + piece.sign * (mine.start - piece.outputs.start), piece.sign)
