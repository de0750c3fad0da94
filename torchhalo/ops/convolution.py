"""Convolution and transposed convolution, 1-d to 3-d, forward and backward.

Along each spatial dim two sides are related by ``dense = sparse * stride - padding + k * dilation``: a convolution reads the
dense side and writes the sparse one, a transposed convolution the reverse. Forward, the ranks exchange halos of the input;
backward, of ``grad_output``, and each rank takes the gradients of the (input, output) pairs whose input it owns. So every pair
is counted on one rank, the input's halo is sent once and never saved, and the same local call serves all four cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.memory import laid_out
from torchhalo.exchange.source import Source, run, stacked_view
from torchhalo.kernels import edges, local_convolution
from torchhalo.ops.convolution_program import program_of
from torchhalo.ops.convolution_work import Part
from torchhalo.torch_internals import dtensors, handlers, redistribution, streams
from torchhalo.torch_internals.tracing import depend_on

aten = torch.ops.aten


def function_name(weight: torch.Tensor, transposed: bool) -> str:
    return f"conv{'_transpose' if transposed else ''}{weight.ndim - 2}d"


@handlers.register(
    aten.convolution.default,
    traffic="the halo of the input",
    limits="groups that do not divide among the ranks that share the channels gather the channels",
)
def convolution(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.convolution``."""
    input, weight, bias = dtensors.as_dtensors(function_name(args[1], args[6]), input=args[0], weight=args[1], bias=args[2])
    program = program_of(False, input, weight, bias, *args[3:])
    mesh, result = input.device_mesh, program.output
    if done := dtensors.non_member_result(input, [result], [program.placements]):
        return done[0]
    input = redistribution.redistribute(input, program.input, op)
    weight = redistribution.redistribute(weight, program.weight)
    bias = bias if bias is None else redistribution.redistribute(bias, program.bias)

    def kernel(source: Source, coordinate: tuple[int, ...], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bias = None if any(coordinate[axis] for axis in program.summed) else bias
        whole, bulk, strips, _, edge = program.work(coordinate, source.plan)
        if whole is None:
            out = depend_on(source.shard.new_zeros(program.exchange.target.owned(coordinate).shape), source.shard)
            return out if bias is None else out + bias.view(-1, *[1] * (out.ndim - 2))
        if bulk is None:
            return local_convolution.forward(source.over(whole.recipe), weight, bias, whole.call)
        edge = edge if edge is not None and edges.usable(source.shard, weight) else None
        side = streams.SideStream(source.shard if edge is None else None)
        out = local_convolution.forward(source.held(bulk.recipe), weight, bias, bulk.call)
        if edge is not None:
            edges.write_strips(out, source.shard, halo_of(source, edge), weight, bias, edge)
            return out
        with side:
            values = [local_convolution.forward(stacked(source, group), weight, bias, group[0].call) for group in strips]
        for group, value in zip(strips, values, strict=True):
            write_parts(out, group, value)
        return out

    shards = (None if tensor is None else dtensors.local(tensor) for tensor in (weight, bias))
    out = run(kernel, laid_out(dtensors.local(input), input), program.exchange, mesh, *shards, format=program.source_format)
    return program.result.wrap(laid_out(out, result))


def stacked(source: Source, group: Sequence[Part]) -> torch.Tensor:
    """What the parts read, one behind another along the batch."""
    return source.stacked([part.recipe for part in group])


def write_parts(out: torch.Tensor, group: Sequence[Part], values: torch.Tensor) -> None:
    """Put the parts, one behind another along the batch of ``values``, where they belong."""
    if len(group) == 1:
        out[group[0].cut].copy_(values)
        return
    both = stacked_view(out, [part.cut for part in group])
    if both is not None:
        both.copy_(values)
        return
    for part, value in zip(group, values.chunk(len(group)), strict=True):
        out[part.cut].copy_(value)


def halo_of(source: Source, edge: edges.Edge) -> edges.Halo:
    source.used = True
    pieces = {box.spans[0].start: piece for box, piece in zip(source.plan.receives, source.pieces(), strict=True)}
    return edges.Halo(*(pieces.get(span.start, source.shard) for span in (edge.before, edge.after)))


handlers.register_composites(
    __name__,
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    traffic="the halo of the input",
)
