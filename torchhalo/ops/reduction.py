"""Reductions along sharded dims: each rank sums up its own part in a few numbers, and these are merged.

A mean needs no collective: each rank's sum is divided by the global count, and the result is Partial. All else gathers the few
numbers of every rank, once, whatever the number of mesh axes, and merges them on each: mean and squared deviations (var, std,
the norms), the largest and where it is (max, argmax), the largest and the sum of exponentials (softmax). How many elements each
rank counts is known from the layout and never sent; a rank with an empty shard counts none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.layout import Layout, layout
from torchhalo.exchange.memory import laid_out
from torchhalo.geometry import Box
from torchhalo.ops.statistics import total
from torchhalo.torch_internals import collectives, dtensors, fake_tensors, handlers, process_groups, redistribution, simulation
from torchhalo.torch_internals.grid_shard import BOXES, at

aten = torch.ops.aten


class Reduction(NamedTuple):
    """A reduction over ``dims`` of a sharded tensor.

    Attributes:
        mesh, placements, layout: Those of the tensor, which is not Partial.
        dims: The reduced dims, in ascending order, none negative.
        axes: The axes that cut any of them.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    layout: Layout
    dims: tuple[int, ...]
    axes: tuple[int, ...]

    @classmethod
    def of(cls, input: DTensor, dims: Sequence[int] | None = None) -> Reduction:
        """The reduction of ``input`` over ``dims``, or over all."""
        return cls.between(input.device_mesh, input.placements, input.shape, dims)

    @classmethod
    def between(
        cls, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dims: Sequence[int] | None = None
    ) -> Reduction:
        """The same of a tensor of global ``shape``."""
        ndim = len(shape)
        over = tuple(sorted({dim % ndim for dim in dims})) if dims and ndim else tuple(range(ndim))
        cut = layout(shape, mesh, placements)
        axes = tuple(sorted(axis for dim in over for axis in cut.cuts[dim]))
        return cls(mesh, tuple(placements), cut, over, axes)

    @property
    def members(self) -> int:
        """How many elements are reduced to one."""
        return prod(self.layout.shape[dim] for dim in self.dims)

    def boxes(self) -> list[Box]:
        """What the ranks along ``axes`` own, in the order of `gather`; along other axes, what the first one does."""
        found = []
        for place in product(*(range(self.mesh.size(axis)) for axis in self.axes)):
            coordinate = dict(zip(self.axes, place, strict=True))
            found.append(self.layout.owned([coordinate.get(axis, 0) for axis in range(self.mesh.ndim)]))
        return found

    def counts(self) -> tuple[int, ...]:
        """How many elements each rank along ``axes`` reduces to one, in the order of `gather`."""
        return tuple(prod(box.spans[dim].size for dim in self.dims) for box in self.boxes())

    def gather(self, summary: torch.Tensor) -> torch.Tensor:
        """The summaries of the ranks along ``axes``, stacked along a new first dim, by one collective."""
        return collectives.all_gather(summary, self.mesh, self.axes)

    def result(self, keepdim: bool) -> list[Placement]:
        """The placements of the result, which is the same along ``axes``."""
        return [
            Replicate()
            if axis in self.axes
            else at(p, p.dim - sum(dim < p.dim for dim in self.dims))
            if isinstance(p, BOXES) and not keepdim
            else p
            for axis, p in enumerate(self.placements)
        ]

    def shaped(self, shard: torch.Tensor, result: dtensors.Meta, keepdim: bool) -> torch.Tensor:
        """This rank's part of the result, computed with the reduced dims kept, as plain torch would give it."""
        shard = shard if keepdim or not self.dims else shard.squeeze(self.dims)
        return laid_out(shard.to(result.dtype), result)

    def wrap(self, shard: torch.Tensor, result: dtensors.Meta, keepdim: bool) -> DTensor:
        """The result, of which this rank has computed ``shard`` with the reduced dims kept."""
        return dtensors.wrap(self.shaped(shard, result, keepdim), self.mesh, self.result(keepdim), result)


def reduce_locally(
    op: handlers.Op,
    input: DTensor,
    over: Reduction,
    results: Sequence[dtensors.Meta],
    keepdim: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[DTensor, ...] | None:
    """What each rank computes for itself, by plain torch's kernel; None if the reduced dims are sharded."""
    if over.axes:
        return None

    def local(shard: torch.Tensor) -> Any:
        return op(shard, *args[1:], **kwargs)

    found = simulation.per_rank(local, dtensors.local(input))
    shards = found if isinstance(found, tuple) else (found,)
    places = over.result(keepdim)
    return tuple(dtensors.wrap(laid_out(s, r), over.mesh, places, r) for s, r in zip(shards, results, strict=True))


@handlers.register(
    aten.mean.default,
    aten.mean.dim,
    traffic="nothing, the result is Partial; but over all dims, or with keepdim, one number per result, reduced",
)
def mean(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.mean``: sums divided by the global count.

    With ``keepdim`` the result is about to meet its input again. There stock DTensor would rather gather a small input than
    add up a Partial factor, and refuses to change a Partial tensor in place; so it is added up here. So is a mean over all
    dims, which is often a loss: then one rank may ask for its ``item()`` alone.
    """
    (result,) = fake_tensors.plain_result(op, *args, **kwargs)
    input, dims, keepdim = (*args, None, False)[:3]
    if not all(p.is_partial("sum") for p in input.placements if p.is_partial()):
        input = redistribution.reduce_partial(input)
    over = Reduction.of(input, dims)
    summed = [axis for axis, p in enumerate(input.placements) if axis in over.axes or p.is_partial()]
    at_once = keepdim or not result.shape
    places = [p if axis not in summed else Replicate() if at_once else Partial() for axis, p in enumerate(over.result(keepdim))]
    if done := dtensors.non_member_result(input, [result], [places]):
        return done[0]
    shard = dtensors.local(input).to(result.dtype) if kwargs.get("dtype") else dtensors.local(input)
    out = total(shard, over.dims) / over.members
    out = collectives.all_reduce(out, over.mesh, summed) if at_once else out
    return dtensors.wrap(over.shaped(out, result, keepdim), over.mesh, places, result)


def added_up(result: Any, keepdim: bool) -> object:
    """A result that is about to meet its input again, for the reason that `mean` gives."""
    return redistribution.reduce_partial(result) if keepdim else result


@handlers.register(
    aten.sum.dim_IntList, traffic="nothing, the result is Partial; but with keepdim one number per result, reduced"
)
def sum_along(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.sum`` along dims; with ``keepdim`` it is also the gradient of what was broadcast."""
    return added_up(handlers.stock(op, args, kwargs), handlers.bind(op, args, kwargs)[2])


@handlers.register(aten.nansum.default, traffic="as sum")
def nansum(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.nansum``, for which torch 2.11 has no rule."""
    input, dims, keepdim, dtype = handlers.bind(op, args, kwargs)
    numbers = aten.masked_fill.Scalar(input, aten.isnan(input), 0)
    dims = list(range(input.ndim)) if dims is None else dims
    return aten.sum.dim_IntList(numbers, dims, keepdim, dtype=dtype)


@handlers.register(aten.div.Scalar, traffic="nothing, where a repeated tensor is divided by a number")
def div(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of the division in the gradient of a mean, which would make one number as large as the whole input.

    Along a dim with stride 0 all elements are one; so the quotient is computed once and expanded again.
    """
    input, other = args
    whole = all(isinstance(p, Replicate) for p in input.placements)
    if not whole or process_groups.coordinate(input.device_mesh) is None:
        return handlers.stock(op, args, kwargs)
    repeated = [size > 1 and stride == 0 for size, stride in zip(input.shape, dtensors.local(input).stride(), strict=True)]
    if not any(repeated):
        return handlers.stock(op, args, kwargs)
    one = dtensors.local(input)[tuple(slice(0, 1) if again else slice(None) for again in repeated)]
    out = op(one, other, **kwargs).expand(input.shape)
    return dtensors.wrap(out, input.device_mesh, input.placements, dtensors.Meta(tuple(input.shape), out.stride(), out.dtype))
