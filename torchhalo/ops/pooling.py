"""Maximum and average pooling: 2-d and 3-d (1-d arrives as 2-d), forward and backward.

Each rank runs torch's own pool over what its outputs read, the padding along sharded dims included; or, if it is large, over
its shard as it is, and over strips along the edges afterwards. Of a maximum the indices are then moved from that region to the
whole tensor; an average is a sum, divided by what the whole tensor says of its window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.addressed import reindexed
from torchhalo.exchange.memory import canonical, memory_format, strides
from torchhalo.exchange.parts import Pads
from torchhalo.exchange.relayout import with_placements
from torchhalo.exchange.task import Task
from torchhalo.exchange.windowed import adjoint, forward, reach
from torchhalo.geometry import Span, Window
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, redistribution, tracing
from torchhalo.torch_internals.tracing import depend_on

aten = torch.ops.aten


def spatial(op: handlers.Op) -> int:
    """How many dims, the last ones, a pool goes along."""
    return 3 if "3d" in str(op) else 2


class Pool(NamedTuple):
    """The arguments of a pool, one per spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @classmethod
    def of(cls, ndim: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Pool:
        def each(values: Any) -> tuple[int, ...]:
            values = (values,) if isinstance(values, int) else tuple(values)
            return values if len(values) == ndim else values * ndim

        return cls(each(kernel), each(stride) or each(kernel), each(padding), each(dilation), ceil_mode)

    def windows(self, ndim: int) -> dict[int, Window]:
        """The window of each of the last dims of a tensor."""
        parameters = zip(self.kernel, self.stride, self.padding, self.padding, self.dilation, strict=True)
        return {ndim - len(self.kernel) + i: Window(*each) for i, each in enumerate(parameters)}

    def within(self, task: Task, ndim: int) -> Pool:
        """The pool of a region, which along sharded dims holds the padding already or wants another."""
        own = dict(zip(task.dims, task.padding or [0] * len(task.dims), strict=True))
        first = ndim - len(self.kernel)
        return self._replace(padding=tuple(own.get(first + i, p) for i, p in enumerate(self.padding)))

    def pads(self, ndim: int) -> Pads:
        """What torch's kernels can pad by themselves: up to half a window; and they must not round up what is left over."""
        windows = self.windows(ndim)
        return lambda dim, padding, rest: padding <= windows[dim].extent // 2 and not (self.ceil_mode and rest)


def divided(sums: torch.Tensor, counts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """``sums`` over the product of the counts along the dims."""
    area = prod(count.view(-1, *[1] * (sums.ndim - 1 - dim)) for dim, count in counts.items())
    return torch.div(sums, area, rounding_mode=None if sums.is_floating_point() else "trunc")


def summed(dtype: torch.dtype) -> torch.dtype:
    """The type to add up in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def raise_dtype_errors(op: handlers.Op, input: DTensor) -> None:
    """Let the smallest plain pool object to a dtype: only torch's kernels check it, and a rank may have nothing to pool."""
    if input.dtype not in (torch.float32, torch.float64) and not tracing.is_tracing():
        _smallest(op, input.ndim, input.dtype, input.device.type)


@lru_cache(maxsize=256)
def _smallest(op: handlers.Op, ndim: int, dtype: torch.dtype, device: str) -> None:
    op(torch.ones([1] * ndim, dtype=dtype, device=device), [1] * spatial(op))


# Maximum.


@handlers.register(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, traffic="the halo of the input")
def max_pool(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Handler of ``aten.max_pool2d_with_indices`` and its like; the indices are those into the whole tensor."""
    input, *parameters = handlers.bind(op, args, kwargs)
    pool = Pool.of(spatial(op), *parameters)
    raise_dtype_errors(op, input)
    results = fake_tensors.plain_result(op, input, *pool)
    windows = pool.windows(input.ndim)
    sizes = [input.shape[dim] for dim in windows]

    def kernel(region: torch.Tensor, task: Task) -> tuple[torch.Tensor, ...]:
        if not region.numel():
            return tuple(region.new_empty(task.outputs.shape, dtype=result.dtype) for result in results)
        values, indices = op(region, *pool.within(task, region.ndim))
        held = [task.held(dim) for dim in windows]

        def move(dim: int, at: torch.Tensor) -> torch.Tensor:
            # Of a window with nothing but the lowest value the index is that of its first input, which may be padding here.
            at = at + held[dim].start
            return torch.where(at < 0, at % pool.dilation[dim], at)

        first = first_index(held, sizes)
        if first is not None:
            return values, indices.add_(first) if first else indices
        return values, reindexed(indices, [span.size for span in held], sizes, move)

    lowest = float("-inf") if input.dtype.is_floating_point else torch.iinfo(input.dtype).min
    return forward(kernel, input, windows, results, region=reach, fill=lowest, pads=pool.pads(input.ndim))


@handlers.register(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    traffic="the halo of the gradient of the input",
    limits="refuses a dilation that steps over the whole input",
)
def max_pool_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.max_pool2d_with_indices_backward`` and its like."""
    grad, input, *parameters, indices = handlers.bind(op, args, kwargs)
    pool = Pool.of(spatial(op), *parameters)
    windows = pool.windows(input.ndim)
    for dim, window in windows.items():
        if window.dilation > input.shape[dim]:
            raise NotImplementedError(
                f"{op}: a window with dilation (={window.dilation}) may step over all {input.shape[dim]} elements of dim {dim} "
                "and has no gradient then: pool with a smaller dilation"
            )
    grad, input, indices = dtensors.as_dtensors(str(op), grad_output=grad, self=input, indices=indices)
    (result,) = fake_tensors.plain_result(op, grad, input, *pool, indices)
    sizes, format = [input.shape[dim] for dim in windows], memory_format(result.shape, result.stride)

    def kernel(grad: torch.Tensor, task: Task, indices: torch.Tensor) -> torch.Tensor:
        if not grad.numel():
            return nothing(grad, [task.held(dim) for dim in windows])
        at = into_region(indices, sizes, list(_spanned(windows, task).values()))
        if task.padding:
            grad, at = _without_others(grad, indices, at, windows, sizes, task)
        return _gradient_of_region(op, grad, windows, task, format, *pool.within(task, grad.ndim), at)

    return adjoint(kernel, as_pooled(grad, input), windows, result, as_pooled(indices, input), pads=pool.pads(input.ndim))


def _spanned(windows: Mapping[int, Window], task: Task) -> dict[int, Span]:
    """What a kernel of a gradient gives along each dim: all that is reached where it is not to leave out the padding itself."""
    cut = () if task.padding else task.dims
    return {dim: window.reach(task.outputs.spans[dim]) if dim in cut else task.held(dim) for dim, window in windows.items()}


def _gradient_of_region(
    op: handlers.Op,
    grad: torch.Tensor,
    windows: Mapping[int, Window],
    task: Task,
    format: torch.memory_format,
    *arguments: Any,
) -> torch.Tensor:
    """What ``op``, the gradient of a pool, gives for the region of a task."""
    # By its strides, also along a batch of one, a CPU's kernel chooses its way.
    grad, *rest = (canonical(each, format) if isinstance(each, torch.Tensor) else each for each in (grad, *arguments))
    spans = _spanned(windows, task)
    sizes = [span.size for span in spans.values()]
    if len(sizes) == 3 or tracing.is_traced(grad):
        out = op(grad, unread(grad, sizes, format), *rest)
    else:
        # The kernels ask their input for its shape and memory alone, so that the result may stand for it. Not those of 3-d, of
        # which some write a result that they are given as if it were contiguous.
        shape = torch.Size((*grad.shape[: -len(sizes)], *sizes))
        out = grad.new_empty_strided(shape, strides(shape, format))
        op.overloadpacket.grad_input(grad, out, *rest, grad_input=out)
    cuts = [slice(None)] * grad.ndim
    for dim, span in spans.items():
        cuts[dim] = task.held(dim).within(span.start)
    return out[tuple(cuts)]


def unread(grad: torch.Tensor, sizes: Sequence[int], format: torch.memory_format) -> torch.Tensor:
    """For a backward kernel that wants no more of its input than its shape."""
    shape = *grad.shape[: -len(sizes)], *sizes
    if format == torch.contiguous_format:
        return grad.new_empty(()).expand(shape)  # a CPU's kernel never looks at it, so it takes no memory
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=format)


def first_index(held: Sequence[Span], sizes: Sequence[int]) -> int | None:
    """What the flat indices of a region are behind those of the whole tensor, if that is one number.

    It is where the region is cut along the first dim alone, which is the usual case and saves a division per index and dim.
    """
    if held[0].start < 0 or any(span != Span(0, size) for span, size in zip(held[1:], sizes[1:], strict=True)):
        return None
    return held[0].start * prod(sizes[1:])


def as_pooled(tensor: DTensor, input: DTensor) -> DTensor:
    """``tensor`` sharded as the result of a pool of ``input`` is."""
    return with_placements(tensor, redistribution.reduced_placements(input.placements))


def into_region(indices: torch.Tensor, sizes: Sequence[int], spans: Sequence[Span]) -> torch.Tensor:
    """Flat indices into a tensor as those into a region of it; only where that is narrower is an index taken apart.

    >>> into_region(torch.tensor([6, 9]), [3, 4], [Span(1, 3), Span(1, 3)])
    tensor([1, 2])
    """
    narrow, moved = [span.size for span in spans], None
    for i in range(1, len(sizes)):
        if narrow[i] != sizes[i]:
            lines = torch.div(indices, prod(sizes[i:]), rounding_mode="floor")
            lines.mul_((narrow[i] - sizes[i]) * prod(narrow[i + 1 :]))
            moved = lines if moved is None else moved.add_(lines)
    first = sum(span.start * prod(narrow[i + 1 :]) for i, span in enumerate(spans))
    if moved is None:
        return indices - first if first else indices
    return moved.add_(indices).sub_(first)


def _without_others(
    grad: torch.Tensor, indices: torch.Tensor, at: torch.Tensor, windows: Mapping[int, Window], sizes: Sequence[int], task: Task
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient and the indices into the region of a bulk, without what maxima outside of it got.

    Such maxima are only in windows that cross the edge.

    Args:
        indices: Into the whole tensor.
        at: Those into the region.
    """
    grad, at = grad.clone(), at.clone() if at is indices else at
    for place, (dim, window) in enumerate(windows.items()):
        if dim in task.dims:
            outputs, held = task.outputs.spans[dim], task.held(dim)
            inside = window.inside(outputs, held, sizes[place])
            edges = Span(outputs.start, min(inside.start, outputs.stop)), Span(max(inside.stop, outputs.start), outputs.stop)
            for edge, first, bound in zip(edges, (True, False), held[:2], strict=True):
                if edge.size:
                    cut = (slice(None),) * dim + (edge.within(outputs.start),)
                    along, step = indices[cut], prod(sizes[place + 1 :])
                    if place:
                        along, step = along // step % sizes[place], 1
                    others = along < bound * step if first else along >= bound * step
                    grad[cut].masked_fill_(others, 0)
                    at[cut].masked_fill_(others, 0)
    return grad, at


def nothing(grad: torch.Tensor, held: Sequence[Span]) -> torch.Tensor:
    """The gradient that an empty shard of ``grad`` gives to what a rank held."""
    return depend_on(grad.new_zeros(*grad.shape[: -len(held)], *(span.size for span in held)), grad)


# Average.


class Average(NamedTuple):
    """The arguments of an average pool."""

    pool: Pool
    include_pad: bool
    divisor: int | None

    @classmethod
    def of(
        cls,
        ndim: int,
        kernel: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        include_pad: bool,
        divisor: int | None,
    ) -> Average:
        return cls(Pool.of(ndim, kernel, stride, padding, 1, ceil_mode), include_pad, divisor)

    def spread(self) -> tuple[Any, ...]:
        """As the aten ops take them."""
        pool = self.pool
        return pool.kernel, pool.stride, pool.padding, pool.ceil_mode, self.include_pad, self.divisor

    def sums(self, task: Task, ndim: int, divisor: int | None) -> tuple[Any, ...]:
        """The same for a region, and for sums if there is no one divisor."""
        return self._replace(pool=self.pool.within(task, ndim), divisor=divisor or 1).spread()

    def counted(self, window: Window, size: int) -> Span:
        """What counts along one dim where a window meets it."""
        return Span(-window.before, size + window.after) if self.include_pad else Span(0, size)

    def common_divisor(self, windows: Mapping[int, Window], input: Sequence[int], output: Sequence[int]) -> int | None:
        """What all averages are divided by, if that is one number."""
        whole = all(
            self.counted(window, input[dim]).contains(window.reach(Span(0, output[dim]))) for dim, window in windows.items()
        )
        return prod(self.pool.kernel) if self.divisor is None and whole else self.divisor

    def counts(self, windows: Mapping[int, Window], input: Sequence[int], task: Task, device: Any) -> dict[int, torch.Tensor]:
        """For each dim, how many elements count in the windows of the rank's outputs."""
        counts = {}
        for dim, window in windows.items():
            counted, outputs = self.counted(window, input[dim]), task.outputs.spans[dim]
            first = torch.arange(outputs.start, outputs.stop, device=device) * window.stride - window.before
            counts[dim] = (first + window.kernel).clamp(max=counted.stop) - first.clamp(min=counted.start)
        return counts


@handlers.register(aten.avg_pool2d.default, aten.avg_pool3d.default, traffic="the halo of the input")
def avg_pool(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.avg_pool2d`` and its like."""
    input, *parameters = handlers.bind(op, args, kwargs)
    average = Average.of(spatial(op), *parameters)
    raise_dtype_errors(op, input)
    (result,) = fake_tensors.plain_result(op, input, *average.spread())
    windows = average.pool.windows(input.ndim)
    divisor = average.common_divisor(windows, input.shape, result.shape)

    def kernel(region: torch.Tensor, task: Task) -> torch.Tensor:
        if not region.numel():
            return region.new_empty(task.outputs.shape)
        arguments = average.sums(task, region.ndim, divisor)
        if divisor is not None:
            return op(region, *arguments)
        counts = average.counts(windows, input.shape, task, region.device)
        return divided(op(region.to(summed(region.dtype)), *arguments), counts).to(region.dtype)

    return forward(kernel, input, windows, [result], region=reach, pads=average.pool.pads(input.ndim))[0]


@handlers.register(
    aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default, traffic="the halo of the gradient of the input"
)
def avg_pool_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.avg_pool2d_backward`` and its like."""
    grad, input, *parameters = handlers.bind(op, args, kwargs)
    grad, input = dtensors.as_dtensors(str(op), grad_output=grad, self=input)
    average = Average.of(spatial(op), *parameters)
    (result,) = fake_tensors.plain_result(op, grad, input, *average.spread())
    windows = average.pool.windows(input.ndim)
    divisor = average.common_divisor(windows, input.shape, grad.shape)
    format = memory_format(result.shape, result.stride)

    def kernel(grad: torch.Tensor, task: Task) -> torch.Tensor:
        if not grad.numel():
            return nothing(grad, [task.held(dim) for dim in windows])
        share = grad
        if divisor is None:
            counts = average.counts(windows, input.shape, task, grad.device)
            share = divided(grad.to(summed(grad.dtype)), counts)
        out = _gradient_of_region(op, share, windows, task, format, *average.sums(task, grad.ndim, divisor))
        return out.to(grad.dtype)

    return adjoint(kernel, as_pooled(grad, input), windows, result, pads=average.pool.pads(input.ndim))


# Composites.


handlers.register_composites(
    __name__,
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    aten.max_pool1d_with_indices.default,
    aten.avg_pool1d.default,
    aten.adaptive_avg_pool1d.default,
    aten.adaptive_avg_pool2d.default,
    aten.adaptive_avg_pool3d.default,
    aten.adaptive_max_pool1d.default,
    traffic="as the pool that it is made of",
)
