"""Reductions along sharded dims: each rank sums up its own part in a few numbers, and these are merged.

A mean needs no collective: each rank's sum is divided by the global count, and the result is Partial. All else gathers the few
numbers of every rank, once, whatever the number of mesh axes, and merges them on each: mean and squared deviations (var, std,
the norms), the largest and where it is (max, argmax), the largest and the sum of exponentials (softmax). How many elements each
rank counts is known from the layout and never sent; a rank with an empty shard counts none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.layout import Layout, layout
from torchhalo.exchange.memory import canonical, laid_out, memory_format
from torchhalo.geometry import Box
from torchhalo.torch_internals import (
    collectives,
    dtensors,
    fake_tensors,
    handlers,
    process_groups,
    redistribution,
    simulation,
    tracing,
)
from torchhalo.torch_internals.tracing import depend_if_empty, depend_on

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
        ndim = input.ndim
        over = tuple(sorted({dim % ndim for dim in dims})) if dims and ndim else tuple(range(ndim))
        cut = layout(input.shape, input.device_mesh, input.placements)
        axes = tuple(sorted(axis for dim in over for axis in cut.cuts[dim]))
        return cls(input.device_mesh, tuple(input.placements), cut, over, axes)

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

    def counts(self) -> list[int]:
        """How many elements each rank along ``axes`` reduces to one, in the order of `gather`."""
        return [prod(box.spans[dim].size for dim in self.dims) for box in self.boxes()]

    def gather(self, summary: torch.Tensor) -> torch.Tensor:
        """The summaries of the ranks along ``axes``, stacked along a new first dim, by one collective."""
        return collectives.all_gather(summary, self.mesh, self.axes)

    def result(self, keepdim: bool) -> list[Placement]:
        """The placements of the result, which is the same along ``axes``."""
        return [
            Replicate()
            if axis in self.axes
            else Shard(p.dim - sum(dim < p.dim for dim in self.dims))
            if isinstance(p, Shard) and not keepdim
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


def _alone(
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


def named(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of ``op`` by name, defaults filled in."""
    return dict(zip((arg.name for arg in op._schema.arguments), handlers.bind(op, args, kwargs), strict=True))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sum in: float32 for half types, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def total(input: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The sum over ``dims``, which stay with size 1; over none of them, if there are none."""
    return input.sum(list(dims), keepdim=True, dtype=wide(input.dtype)) if dims else input.to(wide(input.dtype))


# Mean.


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


def _added_up(result: Any, keepdim: bool) -> object:
    """A result that is about to meet its input again, for the reason that `mean` gives."""
    return redistribution.reduce_partial(result) if keepdim else result


@handlers.register(
    aten.sum.dim_IntList, traffic="nothing, the result is Partial; but with keepdim one number per result, reduced"
)
def sum_along(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.sum`` along dims; with ``keepdim`` it is also the gradient of what was broadcast."""
    return _added_up(handlers.stock(op, args, kwargs), handlers.bind(op, args, kwargs)[2])


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


# Variance.


def deviations(input: torch.Tensor, dims: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one rank's part: the differences from its mean over ``dims``, that mean, and a summary for `merged`.

    The summary is the mean and the sum of squared differences, in float64: where the mean is large beside the differences,
    its rounding would be all that is left of the difference between two ranks' means. What rounding has left in the
    differences is taken out of both numbers.
    """
    count = max(1, prod(input.shape[dim] for dim in dims))
    center = total(input, dims) / count
    rest = input - center
    slip, squares = products(rest, rest, None, dims).double()
    slip = slip / count
    return rest, center, torch.stack([center + slip, squares - count * slip.square()])


def products(first: torch.Tensor, second: torch.Tensor, center: torch.Tensor | None, dims: Sequence[int]) -> torch.Tensor:
    """The sums over ``dims``, which stay with size 1, of ``first`` and of ``first * (second - center)``.

    Of channels they are what the gradient of batch norm adds up, whose kernel on a CPU reads both tensors once and makes no
    other: of 16 channels of 512x1024 in float32 it took one core 8 ms, the sums of products 25. It takes two tensors for
    alike in memory that are not, where dims of size one have other strides, and reads beyond the end of centers that are
    expanded; so it gets both in one memory format, with that format's own strides, and dense centers.
    """
    spatial = tuple(range(2, first.ndim))
    by_channel = spatial and tuple(dims) in (spatial, (0, *spatial)) and first.dtype == second.dtype
    if not by_channel or first.device.type != "cpu" or not first.numel() or tracing.is_traced(first):
        second = second if center is None else second - center
        return torch.stack([total(first, dims), total(first * second, dims)])
    format = memory_format(second.shape, second.stride())
    first, second = canonical(first, format), canonical(second, format)
    ones = first.new_ones(first.shape[1], dtype=wide(first.dtype))
    centers = torch.zeros_like(ones).expand(len(first), -1) if center is None else center.flatten(1).contiguous()

    def sums(first: torch.Tensor, second: torch.Tensor, center: torch.Tensor) -> torch.Tensor:
        none = None, None
        _, *found = aten.native_batch_norm_backward(first, second, ones, *none, center, ones, True, 0.0, [False, True, True])
        return torch.stack(found[::-1])

    if 0 in dims:
        found = sums(first, second, centers[0]).unsqueeze(1)
    else:
        found = torch.stack([sums(*sample) for sample in zip(first.split(1), second.split(1), centers, strict=True)], 1)
    return found.view(*found.shape, *[1] * len(spatial))


def merged(parts: torch.Tensor, counts: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and sum of squared deviations of all, from those of the parts (Chan's formula).

    Args:
        parts: ``[part, 2, ...]``, the means and the sums of squares.
        counts: For each part, how many elements it has: a number, or a list that fits the last dims of ``parts``.
    """
    means, squares = parts.unbind(1)
    if len(counts) == 1:
        return means[0], squares[0]
    count = parts.new_tensor(counts)
    count = count.view(len(counts), *[1] * (means.ndim - count.ndim), *count.shape[1:])
    share = count / count.sum(0)
    center = (share * means).sum(0)
    center = center + (share * (means - center)).sum(0)
    return center, (squares + count * (means - center).square()).sum(0)


@handlers.register(
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
    traffic="two numbers per result from every rank",
    limits="complex tensors raise",
)
def variance(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | tuple[DTensor, ...]:
    """Handler of ``var``, ``std``, ``var_mean`` and ``std_mean``."""
    name = op.overloadpacket.__name__
    results = fake_tensors.plain_result(op, *args, **kwargs)
    input, dims, correction, keepdim = handlers.bind(op, args, kwargs)
    correction = 1 if correction is None else correction
    if input.is_complex():
        raise NotImplementedError(f"{name}: torchhalo has no variance of complex tensors, take that of `real` and `imag`")
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, dims)
    done = dtensors.non_member_result(input, results, [over.result(keepdim)] * len(results)) or _alone(
        op, input, over, results, keepdim, args, kwargs
    )
    if done is None:
        counts = over.counts()

        def summary(shard: torch.Tensor) -> torch.Tensor:
            return deviations(shard, over.dims)[2]

        def merge(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            center, squares = merged(parts, counts)
            spread = squares / max(0, over.members - correction)
            return (spread.sqrt() if name.startswith("std") else spread), center

        found = simulation.per_rank(merge, over.gather(simulation.per_rank(summary, dtensors.local(input))))
        done = tuple(over.wrap(shard, result, keepdim) for shard, result in zip(found, results, strict=False))
    return done if len(results) > 1 else done[0]


# What is merged by the same reduction once more: over the ranks.


def _again(
    op: handlers.Op,
    input: DTensor,
    over: Reduction,
    keepdim: bool,
    results: Sequence[dtensors.Meta],
    local: Sequence[Callable[[torch.Tensor, list[int]], torch.Tensor]],
) -> tuple[DTensor, ...]:
    """Reduce each rank's part, and then the results of the ranks that have any elements.

    Args:
        local: For each result, the reduction of a plain tensor over dims, which it keeps.
    """
    if done := dtensors.non_member_result(input, results, [over.result(keepdim)] * len(results)):
        return done
    filled = [place for place, count in enumerate(over.counts()) if count]
    dims, dtype = list(over.dims), wide(results[0].dtype)

    def summary(shard: torch.Tensor) -> torch.Tensor:
        if over.members and 0 in (shard.shape[dim] for dim in dims):
            return torch.stack([total(shard, dims).to(dtype)] * len(local))  # not used; zeros that depend on the shard
        return torch.stack([reduce(shard, dims).to(dtype) for reduce in local])

    def merge(parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(parts) == 1:
            return tuple(parts[0])
        parts = parts if len(filled) == len(parts) else parts[filled]
        return tuple(reduce(parts[:, i], [0]).squeeze(0) for i, reduce in enumerate(local))

    found = simulation.per_rank(merge, over.gather(simulation.per_rank(summary, dtensors.local(input))))
    return tuple(over.wrap(shard, result, keepdim) for shard, result in zip(found, results, strict=True))


def _amax(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.amax(dims, keepdim=True)


def _amin(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.amin(dims, keepdim=True)


def _logsumexp(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.to(wide(x.dtype)).logsumexp(dims, keepdim=True)


def _all(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return torch.all(x, dims, keepdim=True)


def _any(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return torch.any(x, dims, keepdim=True)


_LOCAL = {
    "amax": [_amax],
    "amin": [_amin],
    "max": [_amax],
    "min": [_amin],
    "aminmax": [_amin, _amax],
    "logsumexp": [_logsumexp],
    "all": [_all],
    "any": [_any],
}


@handlers.register(
    aten.amax.default,
    aten.amin.default,
    aten.aminmax.default,
    aten.max.default,
    aten.min.default,
    aten.logsumexp.default,
    aten.all.default,
    aten.all.dim,
    aten.all.dims,
    aten.any.default,
    aten.any.dim,
    aten.any.dims,
    traffic="one number per result from every rank",
)
def repeated(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | tuple[DTensor, ...]:
    """Handler of reductions that are merged by themselves: largest, smallest, all, any, logarithm of a sum of exponentials."""
    results = fake_tensors.plain_result(op, *args, **kwargs)
    given = named(op, args, kwargs)
    dim = given.get("dim")
    input = redistribution.reduce_partial(given["self"])
    over = Reduction.of(input, (dim,) if isinstance(dim, int) else dim)
    local = _LOCAL[op.overloadpacket.__name__]
    done = _again(op, input, over, given.get("keepdim", False), results, local)
    return done if len(results) > 1 else done[0]


@handlers.register(
    aten.linalg_vector_norm.default,
    traffic="nothing, the result is Partial; but with keepdim, or for infinite norms, one number per result from every rank",
)
def linalg_vector_norm(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.linalg_vector_norm``, whose infinite norms stock DTensor cannot take of an empty shard."""
    input, order, dims, keepdim, _ = handlers.bind(op, args, kwargs)
    if abs(order) != inf:
        return _added_up(handlers.stock(op, args, kwargs), keepdim)
    results = fake_tensors.plain_result(op, *args, **kwargs)
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, dims)

    def norm(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
        return torch.linalg.vector_norm(x, order, dims or None, keepdim=True, dtype=kwargs.get("dtype"))

    return _again(op, input, over, keepdim, results, [norm])[0]


# Where the largest and smallest are.


@handlers.register(
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    traffic="one number per result from every rank, and where it is",
)
def located(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | tuple[DTensor, ...]:
    """Handler of those that say where; the index is the global one, and of equals the first wins, also across ranks."""
    results = fake_tensors.plain_result(op, *args, **kwargs)
    input, dim, keepdim = handlers.bind(op, args, kwargs)
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, None if dim is None else (dim,))
    done = dtensors.non_member_result(input, results, [over.result(keepdim)] * len(results)) or _alone(
        op, input, over, results, keepdim, args, kwargs
    )
    if done is None:
        done = tuple(
            over.wrap(shard, result, keepdim)
            for shard, result in zip(
                _located(input, over, "max" in op.overloadpacket.__name__)[-len(results) :], results, strict=True
            )
        )
    return done if len(results) > 1 else done[0]


def _located(input: DTensor, over: Reduction, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest, or smallest, and its index along the reduced dim, or in the flattened tensor."""
    filled = [place for place, count in enumerate(over.counts()) if count]
    pick, reduce = (torch.max, _amax) if largest else (torch.min, _amin)

    def summary(shard: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
        box = over.layout.owned(coordinate)
        if 0 in (shard.shape[dim] for dim in over.dims):
            value = total(shard, over.dims).to(shard.dtype)
            index = value.to(torch.int64)
        elif len(over.dims) == 1:
            (dim,) = over.dims
            value, index = pick(shard, dim, keepdim=True)
            index = index + box.spans[dim].start
        else:
            value, index = pick(shard.reshape(-1), 0)
            value, index = (t.view([1] * shard.ndim) for t in (value, _global_index(index, box, over.layout.shape)))
        # One collective for both, whatever their dtypes; the wider one first, as it must be aligned.
        return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in (index, value)])

    def merge(parts: torch.Tensor, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = [1 if dim in over.dims else size for dim, size in enumerate(shard.shape)]
        sizes = [prod(shape) * 8, prod(shape) * shard.element_size()]
        bytes_of_index, bytes_of_value = parts[filled].split(sizes, 1)
        values = bytes_of_value.contiguous().view(shard.dtype).view(len(filled), *shape)
        indices = bytes_of_index.contiguous().view(torch.int64).view(len(filled), *shape)
        best = reduce(values, [0])
        same = (values == best) | values.isnan()
        return best.squeeze(0), torch.where(same, indices, torch.iinfo(torch.int64).max).amin(0)

    shard = dtensors.local(input)
    parts = over.gather(simulation.per_rank(summary, shard, process_groups.coordinate(over.mesh)))
    return simulation.per_rank(merge, parts, shard)


def _global_index(index: torch.Tensor, box: Box, shape: Sequence[int]) -> torch.Tensor:
    """From an index in the flattened box to that in the flattened tensor."""
    found = torch.zeros_like(index)
    step = 1
    for span, size in zip(reversed(box.spans), reversed(shape), strict=True):
        found = found + (index % span.size + span.start) * step
        index = index // span.size
        step *= size
    return found


@handlers.register(aten.scatter.src, traffic="as stock DTensor")
def scatter(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.scatter``, to which torch 2.11 gives plain zeros in the gradient of ``max.dim``."""
    arguments = handlers.bind(op, args, kwargs)
    input, index = arguments[0], arguments[2]
    if not isinstance(input, DTensor):
        arguments[0] = dtensors.replicated(input, index.device_mesh)
    return handlers.stock(op, tuple(arguments), {})


# Softmax.


@handlers.register(
    aten._softmax.default,
    aten._log_softmax.default,
    traffic="two numbers per row from every rank; nothing if the dim is not sharded",
)
def softmax(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``softmax`` and ``log_softmax``."""
    (result,) = fake_tensors.plain_result(op, *args, **kwargs)
    input, dim, half_to_float = args
    input = redistribution.reduce_partial(input)
    over = Reduction.of(input, (dim,))
    if done := dtensors.non_member_result(input, [result], [input.placements]):
        return done[0]
    shard = dtensors.local(input)
    if not over.axes:
        return dtensors.wrap(laid_out(op(shard, dim, half_to_float), result), over.mesh, input.placements, result)

    def summary(shard: torch.Tensor) -> torch.Tensor:
        if not shard.shape[dim]:
            none = total(shard, over.dims)
            return torch.stack([none - inf, none])
        x = shard.to(wide(shard.dtype))
        most = x.amax(dim, keepdim=True)
        # Where all is -inf, the difference would be nan.
        return torch.stack([most, total((x - most.nan_to_num(nan=torch.nan, posinf=inf, neginf=0.0)).exp_(), over.dims)])

    def finish(parts: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        mosts, sums = parts.unbind(1)
        most = mosts.amax(0)
        norm = (sums * (mosts - most).exp()).sum(0)
        rest = shard.to(wide(shard.dtype)) - most
        out = rest.exp_().div_(norm) if op is aten._softmax.default else rest.sub_(norm.log())
        return depend_if_empty(laid_out(out.to(result.dtype), result), parts)

    parts = over.gather(simulation.per_rank(summary, shard))
    return dtensors.wrap(simulation.per_rank(finish, parts, shard), over.mesh, input.placements, result)


@handlers.register(
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    traffic="one number per row, reduced; nothing if the dim is not sharded",
)
def softmax_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of their gradients."""
    (result,) = fake_tensors.plain_result(op, *args, **kwargs)
    grad, output, dim, dtype = args
    grad, output = dtensors.as_dtensors(op.overloadpacket.__name__, grad_output=grad, output=output)
    output = redistribution.reduce_partial(output)
    grad = redistribution.redistribute(grad, output.placements)
    over = Reduction.of(output, (dim,))
    if done := dtensors.non_member_result(output, [result], [output.placements]):
        return done[0]
    if not over.axes:
        out = op(dtensors.local(grad), dtensors.local(output), dim, dtype)
        return dtensors.wrap(laid_out(out, result), over.mesh, output.placements, result)

    def summary(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        grad = grad.to(wide(grad.dtype))
        return total(grad * output if op is aten._softmax_backward_data.default else grad, over.dims)

    def finish(sums: torch.Tensor, grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        if op is aten._softmax_backward_data.default:
            out = (grad - sums).mul_(output)
        else:
            out = torch.addcmul(grad, output.to(sums.dtype).exp(), sums, value=-1)
        return depend_if_empty(laid_out(out.to(result.dtype), result), sums)

    shards = dtensors.local(grad), dtensors.local(output)
    sums = collectives.all_reduce(simulation.per_rank(summary, *shards), over.mesh, over.axes)
    return dtensors.wrap(simulation.per_rank(finish, sums, *shards), over.mesh, output.placements, result)


# Sums and products so far.


@handlers.register(
    aten.cumsum.default, aten.cumprod.default, traffic="the total of every rank; nothing if the dim is not sharded"
)
def scan(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``cumsum`` and ``cumprod``: those of the rank's own part, with the totals of the ranks before it."""
    (result,) = fake_tensors.plain_result(op, *args, **kwargs)
    input, dim = redistribution.reduce_partial(args[0]), args[1]
    over = Reduction.of(input, (dim,))
    if done := dtensors.non_member_result(input, [result], [input.placements]):
        return done[0]
    dtype = wide(result.dtype)
    reduce, join = (torch.sum, torch.add) if op is aten.cumsum.default else (torch.prod, torch.mul)

    def totals(shard: torch.Tensor) -> torch.Tensor:
        return reduce(shard, dim, keepdim=True, dtype=dtype)

    def finish(parts: torch.Tensor | None, shard: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
        out = op(shard, dim, dtype=dtype)
        if parts is not None:
            before = parts[: over.layout.part(over.dims[0], coordinate)]
            out = depend_if_empty(join(out, reduce(before, 0)), parts) if len(before) else depend_on(out, parts)
        return laid_out(out.to(result.dtype), result)

    shard = dtensors.local(input)
    parts = over.gather(simulation.per_rank(totals, shard)) if over.axes else None
    out = simulation.per_rank(finish, parts, shard, process_groups.coordinate(over.mesh))
    return dtensors.wrap(out, over.mesh, input.placements, result)


@handlers.register(aten.cumsum_.default, aten.cumprod_.default, traffic="as cumsum")
def scan_(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of their variants in place."""
    out = aten.cumsum if op is aten.cumsum_.default else aten.cumprod
    return args[0].copy_(out.default(*args, **kwargs))


# Stock DTensor would gather for these.
handlers.register_composites(
    __name__,
    aten.softmax.int,
    aten.log_softmax.int,
    traffic="as the ops that it is made of",
)
