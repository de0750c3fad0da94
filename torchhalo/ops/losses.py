"""Losses: each rank computes those of its own elements; a sum or mean over all of them is added up at once.

A mean divides by the global count before the ranks add up, so that it sends nothing by itself. Only the mean of `nll_loss`,
whose divisor depends on the targets, needs one all-reduce, of two numbers.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.broadcasting import aligned, moved, shared_placements
from torchhalo.exchange.layout import layout
from torchhalo.exchange.memory import laid_out
from torchhalo.geometry import Span
from torchhalo.torch_internals import collectives, dtensors, fake_tensors, handlers, process_groups, redistribution, simulation
from torchhalo.torch_internals.tracing import depend_on

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2


@handlers.register(
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    traffic="with a sum or mean, one number per rank; else nothing",
)
def pointwise(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of losses of which each element depends on one element of every tensor."""
    arguments, tensors = _named(op, args, kwargs)
    mesh = tensors["self"].device_mesh
    (each,) = fake_tensors.plain_result(op, *{**arguments, "reduction": NONE}.values())
    placements = shared_placements(each.shape, tensors.values())
    reduction = arguments["reduction"]
    result = each if reduction == NONE else dtensors.Meta((), (), each.dtype)
    summed = placements if reduction == NONE else [Replicate()] * mesh.ndim
    if done := dtensors.non_member_result(tensors["self"], [result], [summed]):
        return done[0]
    shards = {name: dtensors.local(aligned(tensor, placements, each.shape)) for name, tensor in tensors.items()}
    out = op(*{**arguments, **shards, "reduction": NONE}.values())
    if reduction == NONE:
        return dtensors.wrap(laid_out(out, result), mesh, summed, result)
    out = collectives.all_reduce(_sum(out), mesh, [axis for axis, p in enumerate(placements) if p != Replicate()])
    out = out / prod(each.shape) if reduction == MEAN else out
    return dtensors.wrap(out.to(result.dtype), mesh, summed, result)


@handlers.register(
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
    traffic="nothing",
)
def pointwise_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of their gradients: a mean is a sum whose gradient is divided by the global count."""
    arguments, tensors = _named(op, args, kwargs)
    mesh = tensors["self"].device_mesh
    (result,) = fake_tensors.plain_result(op, *arguments.values())
    reduction, grad = arguments["reduction"], tensors.pop("grad_output")
    placements = shared_placements(result.shape, tensors.values())
    if done := dtensors.non_member_result(tensors["self"], [result], [placements]):
        return done[0]
    shards = {name: dtensors.local(aligned(tensor, placements, result.shape)) for name, tensor in tensors.items()}
    shards["grad_output"] = dtensors.local(aligned(grad, placements, result.shape))
    if reduction == MEAN:
        shards["grad_output"] = shards["grad_output"] / prod(result.shape)
    out = op(*{**arguments, **shards, "reduction": NONE if reduction == NONE else SUM}.values())
    return dtensors.wrap(laid_out(out, result), mesh, placements, result)


@handlers.register(
    aten.nll_loss_forward.default,
    aten.nll_loss2d_forward.default,
    traffic="with a sum or mean, two numbers per rank; else nothing",
)
def nll_loss(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    """Handler of ``aten.nll_loss_forward`` and its 2-d form: the loss and the weight of all targets that count.

    Where the classes are sharded, each rank takes the targets whose class it has.
    """
    arguments, tensors = _named(op, args, kwargs)
    _check_shapes(op, tensors)
    results = fake_tensors.plain_result(op, *arguments.values())
    reduction, ignore = arguments["reduction"], arguments["ignore_index"]
    mesh = tensors["self"].device_mesh
    placements, targets, classes = _nll_placements(tensors["self"], tensors["target"])
    per_target: list[Placement] = [Partial() if isinstance(p, Shard) else q for p, q in zip(classes, targets, strict=True)]
    whole: list[Placement] = [Replicate()] * mesh.ndim
    out = per_target if reduction == NONE else whole
    coordinate = process_groups.coordinate(mesh)
    if coordinate is None:
        nothing = dtensors.local(tensors["self"]).new_empty(0, dtype=results[0].dtype)
        return dtensors.wrap(nothing, mesh, out, results[0]), dtensors.wrap(nothing, mesh, whole, results[1])
    shards = _nll_shards(tensors, placements, targets, classes)
    owned = layout(tensors["self"].shape, mesh, placements)

    def kernel(input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, *coordinate: int) -> torch.Tensor:
        span = owned.owned(coordinate).spans[_class_dim(input)]
        target, ignored = _localised(target, span, owned.shape[_class_dim(input)], ignore)
        if not input.numel():
            each = depend_on(input.new_zeros(target.shape), input)
            return each if reduction == NONE else _sum(each).expand(2).contiguous()
        each = op(input, target, weight, NONE, ignored)[0]
        if reduction == NONE:
            return each
        counts = (target != ignored).to(_wide(each))
        if weight is not None:
            counts = counts * weight.to(counts.dtype)[target.clamp(0, len(weight) - 1)]
        return torch.stack([_sum(each), _sum(counts)])

    found = simulation.per_rank(kernel, *shards, *coordinate)
    if reduction == NONE:
        zero = found.new_zeros(())
        return dtensors.wrap(found, mesh, out, results[0]), dtensors.wrap(zero, mesh, whole, results[1])
    found = collectives.all_reduce(found, mesh, [axis for axis, p in enumerate(per_target) if p != Replicate()])
    loss, total = found.unbind()
    loss = loss / total if reduction == MEAN else loss
    return (
        dtensors.wrap(loss.to(results[0].dtype), mesh, out, results[0]),
        dtensors.wrap(total.to(results[1].dtype), mesh, whole, results[1]),
    )


@handlers.register(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, traffic="nothing")
def nll_loss_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.nll_loss_backward`` and its 2-d form."""
    arguments, tensors = _named(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, *arguments.values())
    reduction, ignore = arguments["reduction"], arguments["ignore_index"]
    grad, total = tensors.pop("grad_output"), tensors.pop("total_weight")
    mesh = tensors["self"].device_mesh
    placements, targets, classes = _nll_placements(tensors["self"], tensors["target"])
    coordinate = process_groups.coordinate(mesh)
    if coordinate is None:
        return dtensors.wrap(dtensors.local(grad).new_empty(0, dtype=result.dtype), mesh, placements, result)
    shards = _nll_shards(tensors, placements, targets, classes)
    scale = dtensors.local(aligned(grad, targets, tensors["target"].shape))
    if reduction == MEAN:
        scale = scale / dtensors.local(redistribution.reduce_partial(total))
    owned = layout(tensors["self"].shape, mesh, placements)

    def kernel(
        scale: torch.Tensor, input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, *coordinate: int
    ) -> torch.Tensor:
        if not input.numel():
            return depend_on(torch.zeros_like(input), scale)
        span = owned.owned(coordinate).spans[_class_dim(input)]
        target, ignored = _localised(target, span, owned.shape[_class_dim(input)], ignore)
        return op(scale, input, target, weight, NONE if reduction == NONE else SUM, ignored, input.new_ones(()))

    out = simulation.per_rank(kernel, scale, *shards, *coordinate)
    return dtensors.wrap(laid_out(out, result), mesh, placements, result)


handlers.register_composites(
    __name__,
    aten.cross_entropy_loss.default,
    aten.nll_loss_nd.default,
    aten.nll_loss.default,
    aten.nll_loss2d.default,
    aten.l1_loss.default,
    aten.kl_div.default,
    aten.poisson_nll_loss.default,
    traffic="that of the ops that they are made of",
)


@handlers.register(
    aten._local_scalar_dense.default,
    traffic="the one number, if it is not replicated",
    limits="all ranks of the mesh must call `item()` of a Partial scalar, such as a sum",
)
def item(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``Tensor.item()``: of what is still a sum over the ranks, the sum and not this rank's part."""
    (tensor,) = args
    mesh = tensor.device_mesh
    if process_groups.coordinate(mesh) is None:
        return handlers.stock(op, args, kwargs)
    if set(tensor.placements) <= {Partial(), Replicate()}:
        axes = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Partial)]
        return op(collectives.all_reduce(dtensors.local(tensor), mesh, axes))
    return op(dtensors.local(moved(tensor, [Replicate()] * mesh.ndim)))


def _named(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, DTensor]]:
    """All arguments of a call by name, defaults too and in the order of the op; and those that are tensors, as DTensors."""
    arguments = dtensors.named_dtensors(op, args, kwargs)
    return arguments, {name: value for name, value in arguments.items() if isinstance(value, DTensor)}


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which to add up: half types overflow and lose digits."""
    return torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sum(dtype=_wide(tensor))


def _class_dim(input: torch.Tensor) -> int:
    return 0 if input.ndim == 1 else 1


def _check_shapes(op: handlers.Op, tensors: dict[str, DTensor]) -> None:
    """Let plain torch object, with its own words, to shapes that fake tensors do not check."""
    input, target, weight = tensors["self"], tensors["target"], tensors.get("weight")
    sizes = list(input.shape)
    classes = sizes.pop(_class_dim(input))
    if list(target.shape) != sizes or (weight is not None and list(weight.shape) != [classes]):
        device = dtensors.device_type(input)
        wrong = [
            t if t is None else torch.zeros((), dtype=t.dtype, device=device).expand(t.shape) for t in (input, target, weight)
        ]
        simulation.without_modes(lambda: op(*wrong, SUM, 0))


def _nll_placements(input: DTensor, target: DTensor) -> tuple[list[Placement], list[Placement], list[Placement]]:
    """How input, target and class weights are to be sharded: as the input is, and along other axes as the target is."""
    found: list[tuple[Placement, Placement, Placement]] = []
    channel = _class_dim(input)
    for have, wanted in zip(input.placements, target.placements, strict=True):
        if isinstance(have, Shard) and have.dim == channel:
            found.append((have, Replicate(), Shard(0)))
        elif isinstance(have, Shard):
            found.append((have, Shard(have.dim - (have.dim > channel)), Replicate()))
        elif isinstance(wanted, Shard):
            found.append((Shard(wanted.dim + (wanted.dim >= channel)), wanted, Replicate()))
        else:
            found.append((Replicate(), Replicate(), Replicate()))
    inputs, targets, classes = (list(placements) for placements in zip(*found, strict=True))
    return inputs, targets, classes


def _nll_shards(
    tensors: dict[str, DTensor], inputs: list[Placement], targets: list[Placement], classes: list[Placement]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    weight = tensors.get("weight")
    return (
        laid_out(dtensors.local(moved(tensors["self"], inputs)), tensors["self"]),
        dtensors.local(moved(tensors["target"], targets)),
        None if weight is None else dtensors.local(moved(weight, classes)),
    )


def _localised(target: torch.Tensor, classes: Span, count: int, ignore: int) -> tuple[torch.Tensor, int]:
    """The targets as indices into this rank's ``classes``, those of other ranks ignored; and the index that is ignored.

    What is no class at all stays out of bounds, for the kernel to object to.
    """
    if classes.size == count:
        return target, ignore
    elsewhere = ((target >= 0) & (target < classes.start)) | ((target >= classes.stop) & (target < count))
    return (target - classes.start).masked_fill(elsewhere, ignore - classes.start), ignore - classes.start
