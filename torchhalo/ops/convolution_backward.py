"""The gradients of a convolution: halos of the output's gradient, and the pairs whose input a rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.memory import dense, laid_out
from torchhalo.exchange.source import Source, run
from torchhalo.kernels import edges, local_convolution
from torchhalo.ops.convolution import function_name, halo_of, stacked, write_parts
from torchhalo.ops.convolution_program import Program, program_of
from torchhalo.ops.convolution_work import Part, Product
from torchhalo.torch_internals import dtensors, handlers, process_groups, redistribution, streams

aten = torch.ops.aten


@handlers.register(aten.convolution_backward.default, traffic="the halo of the gradient of the output")
def convolution_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor | None, ...]:
    """Handler of ``aten.convolution_backward``."""
    _, *parameters, mask = args[3:]
    name = f"{function_name(args[2], parameters[3])} backward"
    grad, input, weight = dtensors.as_dtensors(name, grad_output=args[0], input=args[1], weight=args[2])
    program = program_of(True, input, weight, None, *parameters)
    mesh = input.device_mesh
    if process_groups.coordinate(mesh) is None:
        nothing = dtensors.local(input).new_empty(0)
        grads: list[torch.Tensor | None] = [nothing if wanted else None for wanted in mask]
    else:
        grad = redistribution.redistribute(grad, program.grad_output)
        grads = _local_gradients(program, grad, input, weight, mask)
    wrapped = [
        None if shard is None else result.wrap(laid_out(shard, result.meta))
        for shard, result in zip(grads, program.gradients, strict=True)
    ]
    if wrapped[1] is not None:
        wrapped[1] = redistribution.redistribute(
            wrapped[1], [_returned(*pair) for pair in zip(program.grads[1], weight.placements, strict=True)]
        )
    return tuple(wrapped)


def _local_gradients(
    program: Program, grad: DTensor, input: DTensor, weight: DTensor, mask: Sequence[bool]
) -> list[torch.Tensor | None]:
    input = redistribution.redistribute(input, program.input)
    weight = redistribution.redistribute(weight, program.weight)

    def kernel(
        source: Source, coordinate: tuple[int, ...], input: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        input, shard = dense(input, program.input_format), source.shard
        whole, bulk, strips, products, edge = program.work(coordinate, source.plan)

        def gradients(part: Part, grad: torch.Tensor) -> list[torch.Tensor]:
            # The kernel sums up the bias's on its way. But of ranks that must agree on it, one may have none to call.
            at_once = mask[2] and part.recipe.untouched and Replicate() not in program.grads[2]
            wanted = [*mask[:2], at_once]
            found = local_convolution.backward(grad, input, weight, shard.shape[1:2], part.call, wanted)
            if mask[2] and not at_once:
                found[2] = _bias_gradient(shard)
            return found

        def wanted_of(found: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            return tuple(tensor for tensor, wanted in zip(found, mask, strict=True) if wanted)

        if whole is None:
            found = [torch.zeros_like(input), torch.zeros_like(weight), _bias_gradient(shard)]
        elif bulk is None:
            found = gradients(whole, source.over(whole.recipe))
        else:
            edge = edge if edge is not None and edges.usable(shard, weight) else None
            side = streams.SideStream(shard if edge is None else None)
            found = gradients(bulk, source.held(bulk.recipe))
            if edge is not None:
                halo = halo_of(source, edge)
                if mask[0]:
                    edges.write_strips(found[0], shard, halo, weight, None, edge)
                if mask[1]:
                    edges.add_pairs(found[1], input, halo, edge)
                return wanted_of(found)
            by_strips = mask[0], mask[1] and products is None
            with side:
                more = [_strips_of_gradients(source, group, input, weight, by_strips) for group in strips]
            for group, (values, share) in zip(strips, more, strict=True):
                if by_strips[0]:
                    write_parts(found[0], group, values)
                if by_strips[1]:
                    found[1].add_(share)
            if mask[1] and products:
                _add_products(found[1], source, input, products, program.config.transposed)
        return wanted_of(found)

    shard = laid_out(dtensors.local(grad), program.output)
    if not any(mask[:2]):
        return [None, None, _bias_gradient(shard)]
    tensors = laid_out(dtensors.local(input), input), dtensors.local(weight)
    grads = iter(run(kernel, shard, program.exchange, grad.device_mesh, *tensors, format=program.source_format))
    return [next(grads) if wanted else None for wanted in mask]


def _bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    return grad.sum([0, *range(2, grad.ndim)])


def _strips_of_gradients(
    source: Source, group: Sequence[Part], input: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]
) -> tuple[Any, Any]:
    """What the bulk could not know: strips of the input's gradient, and the share in the weight's of pairs across the edge."""
    cuts = [input[part.cut] for part in group]
    edge = cuts[0] if len(cuts) == 1 else torch.cat(cuts)
    region, call = stacked(source, group), group[0].call
    values = local_convolution.backward(region, edge, weight, None, call, [True, False, False])[0] if mask[0] else None
    if not mask[1]:
        return values, None
    for part, each in zip(group, region.chunk(len(group)), strict=True):
        each[part.known].zero_()
    # oneDNN's low-precision gradients of a weight are wrong on some small strips.
    wide = torch.float32 if region.device.type == "cpu" and region.dtype.itemsize < 4 else region.dtype
    region, edge, weight = (tensor.to(wide) for tensor in (region, edge, weight))
    return values, local_convolution.backward(region, edge, weight, None, call, [False, True, False])[1]


def _add_products(
    grad_weight: torch.Tensor, source: Source, input: torch.Tensor, products: Sequence[Product], transposed: bool
) -> None:
    """Add what pairs across the edges have to add, tap by tap; the batch is one image."""
    source.used = True
    for number, grad, own, tap in products:
        outputs, inputs = source.pieces()[number][grad][0].flatten(1), input[own][0].flatten(1)
        rows, columns = (inputs, outputs) if transposed else (outputs, inputs)
        grad_weight[tap].addmm_(rows, columns.t())


def _returned(computed: Placement, owner: Placement) -> Placement:
    """The placement in which a weight gets its gradient: its own, or, if it is not sharded, one that saves a collective."""
    if isinstance(owner, Shard):
        return owner
    return Replicate() if isinstance(computed, Shard) else computed
