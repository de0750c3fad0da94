"""Views that join or split dims: flatten, unflatten, reshape.

Most are a view of each rank's shard. Where a dim is cut that others are joined in front of, or into parts that end between the
rows of the new shape, what changes owner travels, and the result is cut as `torch.chunk` would cut it, like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchhalo.exchange.memory import strides
from torchhalo.exchange.relayout import relayout, view_placements, viewed
from torchhalo.exchange.task import Task
from torchhalo.exchange.windowed import adjoint, forward, reach
from torchhalo.geometry import Window
from torchhalo.ops.inplace import Moved
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, redistribution, stale_views
from torchhalo.torch_internals.grid_shard import GridShard
from torchhalo.torch_internals.tracing import depend_on

aten = torch.ops.aten


def _known(input: DTensor) -> bool:
    """Whether the placements are those that torchhalo knows; stock views and FSDP make others."""
    return all(isinstance(p, (Shard, GridShard, Replicate, Partial)) for p in input.placements)


@handlers.register(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    traffic="nothing if the outermost of the joined dims is cut and the parts end with rows, else what changes owner",
    limits="a view for which anything travelled is a copy, which is written back to the viewed tensor when it is written to",
)
def view(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.view`` and its kin."""
    input, size = args
    if not _known(input):
        return handlers.stock(op, args, kwargs)
    return _view(op, input, fake_tensors.plain_view(op, input, size))


def _view(op: handlers.Op, input: DTensor, result: dtensors.Meta) -> DTensor:
    out, moved = viewed(input, result)
    if moved and op in _VIEWS:
        stale_views.set_origin(out, Moved(input, result.shape), input)
    return out


@handlers.register(
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    traffic="nothing, but of a cut dim of size one all that the other ranks are to own",
)
def squeeze(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.squeeze``: DTensor's own where no cut dim goes."""
    input = args[0]
    cut = [p for p in input.placements if isinstance(p, (Shard, GridShard))]
    if not _known(input) or all(not isinstance(p, GridShard) and input.shape[p.dim] > 1 for p in cut):
        return handlers.stock(op, args, kwargs)
    return _view(op, input, fake_tensors.plain_view(op, *args))


# DTensor would run the shards as they are.
handlers.register_composites(
    __name__,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.ravel.default,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.repeat_interleave.self_int,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.moveaxis.int,
    aten.moveaxis.intlist,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.adjoint.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.expand_as.default,
    aten.broadcast_to.default,
    aten.tile.default,
    traffic="that of the views that it is made of",
)


_VIEWS = {aten.view.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}  # of which autograd knows the base


# Columns: windows side by side.


def _windows(ndim: int, parameters: Sequence[Sequence[int]]) -> dict[int, Window]:
    """The window of each of the last two dims, from kernel, dilation, padding and stride as torch takes them."""
    each = [tuple(values) * (1 if len(values) == 2 else 2) for values in parameters]
    return {
        ndim - 2 + i: Window(kernel, stride, padding, padding, dilation)
        for i, (kernel, dilation, padding, stride) in enumerate(zip(*each, strict=True))
    }


def _grid(size: Sequence[int], windows: dict[int, Window]) -> list[int]:
    """How many windows there are along each of the last two dims of a tensor of ``size``."""
    return [window.output_size(int(size[dim])) for dim, window in windows.items()]


@handlers.register(aten.im2col.default, traffic="the halo of the input, then that of a view that joins the last two dims")
def im2col(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.im2col``, which is `F.unfold` and the gradient of `F.fold`."""
    input, kernel, *rest = handlers.bind(op, args, kwargs)
    result = _dense(*fake_tensors.plain_result(op, input, kernel, *rest))
    windows = _windows(input.ndim, (kernel, *rest))
    taps = tuple(window.kernel for window in windows.values())
    shape = (*input.shape[:-2], *_grid(input.shape, windows), prod(taps))  # the taps last, so that dims keep their place

    def on_region(region: torch.Tensor, task: Task) -> torch.Tensor:
        count = [task.outputs.spans[dim].size for dim in windows]
        if not region.numel() or 0 in count:
            return depend_on(region.new_zeros([*region.shape[:-2], *count, prod(taps)]), region)
        padding = [0 if dim in task.dims else window.before for dim, window in windows.items()]
        steps = [[getattr(window, name) for window in windows.values()] for name in ("dilation", "stride")]
        columns = aten.im2col(region, taps, steps[0], padding, steps[1])
        return columns.unflatten(-1, count).unflatten(-3, (-1, prod(taps))).movedim(-3, -1)

    middle = _dense(result._replace(shape=shape))
    (columns,) = forward(on_region, input, windows, [middle], region=reach)
    columns = _taps(columns, -1, -3)
    out = relayout(columns, result, view_placements(columns, result.shape))
    return dtensors.wrap(dtensors.local(out).contiguous(), out.device_mesh, out.placements, result)


def _dense(meta: dtensors.Meta) -> dtensors.Meta:
    return meta._replace(stride=strides(meta.shape, torch.contiguous_format))


def _taps(columns: DTensor, source: int, target: int) -> DTensor:
    """The dim of the taps moved, by an op for which DTensor has a rule."""
    order = list(range(columns.ndim))
    order.insert(target % len(order), order.pop(source))
    return aten.permute.default(columns, order)


@handlers.register(aten.col2im.default, traffic="that of a view that splits the last dim, then what windows share")
def col2im(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.col2im``, which is `F.fold` and the gradient of `F.unfold`."""
    input, size, kernel, *rest = handlers.bind(op, args, kwargs)
    result = _dense(*fake_tensors.plain_result(op, input, size, kernel, *rest))
    windows = _windows(len(result.shape), (kernel, *rest))
    taps = tuple(window.kernel for window in windows.values())
    grid = _grid(result.shape, windows)
    split = _dense(result._replace(shape=(*result.shape[:-2], prod(taps), *grid)))
    between = len(split.shape) - 3
    placements = [Shard(between - 1) if p == Shard(between) else p for p in view_placements(input, split.shape)]
    columns = _taps(
        relayout(redistribution.reduce_partial(input), split, redistribution.reduced_placements(placements)), -3, -1
    )

    def on_columns(shard: torch.Tensor, task: Task) -> torch.Tensor:
        whole = [task.held(dim) for dim in windows]
        count = [task.outputs.spans[dim] for dim in windows]
        if not shard.numel() or not all(span.size for span in whole):
            return depend_on(shard.new_zeros([*shard.shape[:-3], *(span.size for span in whole)]), shard)
        reached = [window.reach(span) for window, span in zip(windows.values(), count, strict=True)]
        steps = [[getattr(window, name) for window in windows.values()] for name in ("dilation", "stride")]
        flat = shard.movedim(-1, -3).flatten(-2).flatten(-3, -2)
        image = aten.col2im(flat, [span.size for span in reached], taps, steps[0], [0, 0], steps[1])
        ends = [(a.start - b.start, b.stop - a.stop) for a, b in zip(reached, whole, strict=True)]
        return aten.constant_pad_nd(image, [end for pair in reversed(ends) for end in pair])

    return adjoint(on_columns, columns, windows, result)
