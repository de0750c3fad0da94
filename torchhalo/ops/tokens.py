"""Flattened tokens of a sharded image: an op meets them unflattened, where each rank has a box of them, or moved to a `Shard`.

``(batch, height, width, channels)`` that is cut along its width and flattened to ``(batch, height * width, channels)`` stays
where it is: the placement is a `GridShard`. Views know it, DTensor's own matrix products and pointwise ops do not mind it, and
the handlers of ops named here get the image back, with its dims renumbered. All others get tokens that were moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.grids import unfold, unfolded
from torchhalo.exchange.relayout import viewed, without_grids
from torchhalo.ops.attention import FUSED, FUSED_BACKWARD
from torchhalo.ops.inplace import VIEWS, WRITERS, Moved
from torchhalo.ops.randomness import FILLS, LIKES
from torchhalo.ops.tokens_program import Named, Program, described
from torchhalo.torch_internals import fake_tensors, handlers, stale_views
from torchhalo.torch_internals.caching import cached_on_mesh
from torchhalo.torch_internals.grid_shard import GridShard, is_blind, is_grid

aten, c10d = torch.ops.aten, torch.ops.c10d


_ALONG: dict[handlers.Op, Named] = {
    aten._softmax.default: Named("dim"),
    aten._log_softmax.default: Named("dim"),
    aten._safe_softmax.default: Named("dim"),
    aten._softmax_backward_data.default: Named("dim"),
    aten._log_softmax_backward_data.default: Named("dim"),
    aten.slice.Tensor: Named("dim"),
    aten.slice_backward.default: Named("dim", "input_sizes"),
    aten.select.int: Named("dim"),
    aten.split.Tensor: Named("dim"),
    aten.split_with_sizes.default: Named("dim"),
    aten.unsafe_split.Tensor: Named("dim"),
    aten.unsafe_split_with_sizes.default: Named("dim"),
    aten.unbind.int: Named("dim"),
    aten.select_backward.default: Named("dim", "input_sizes", inserts=True),
    aten.cat.default: Named("dim"),
    aten.stack.default: Named("dim", inserts=True),
    aten.sum.dim_IntList: Named("dim"),
    aten.sum.default: Named(),
    aten.mean.dim: Named("dim"),
    aten.mean.default: Named(),
    aten.linalg_vector_norm.default: Named("dim"),
    aten.amax.default: Named("dim"),
    aten.amin.default: Named("dim"),
    aten.all.dim: Named("dim"),
    aten.any.dim: Named("dim"),
    aten.var.correction: Named("dim"),
    aten.var_mean.correction: Named("dim"),
    aten.expand.default: Named(None, "size"),
}

for _name, _tensors in (
    ("native_group_norm", ("input",)),
    ("native_group_norm_backward", ("grad_out", "input")),
    ("native_batch_norm", ("input",)),
    ("native_batch_norm_backward", ("grad_out", "input")),
):
    _ALONG[getattr(aten, _name).default] = Named(tensors=_tensors, kept=2)

#: Handlers that know grids themselves.
_KNOWING: set[handlers.Op] = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    *FUSED,
    *FUSED_BACKWARD,
    c10d.allgather_.default,
    c10d._allgather_base_.default,
    c10d.allreduce_.default,
    c10d.broadcast_.default,
    aten._native_multi_head_attention.default,
    aten._transformer_encoder_layer_fwd.default,
    aten.detach.default,
    aten.linear.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}

#: Beside pointwise ops: those whose tensors broadcast, and which give each element of the result what its place tells.
_BROADCASTING: set[handlers.Op] = {
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
    aten.native_dropout.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.bernoulli.default,
}

#: Beside pointwise ops: those whose handlers take windows where these are, along dims that the op does not work along.
_OF_WINDOWS: set[handlers.Op] = {
    *FILLS,
    aten._softmax.default,
    aten._log_softmax.default,
    aten._safe_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.slice.Tensor,
    aten.slice_backward.default,
    aten.select.int,
    aten.select_backward.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unbind.int,
    aten.cat.default,
    aten.stack.default,
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.linalg_vector_norm.default,
    aten.amax.default,
    aten.amin.default,
    aten.all.dim,
    aten.any.dim,
    aten.var.correction,
    aten.var_mean.correction,
    aten.expand.default,
    aten.masked_fill.Scalar,
    aten.masked_fill_.Scalar,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten._fused_rms_norm.default,
    aten._fused_rms_norm_backward.default,
    aten.native_dropout.default,
}

_VIEWS = {aten.slice.Tensor, aten.select.int, aten.expand.default}
_LINKED = {*WRITERS, *VIEWS}


@handlers.adapt_arguments
def adapt_tokens(op: handlers.Op, handler: handlers.Handler) -> handlers.Handler:
    """Give ``handler`` of ``op`` tokens in a form that it knows."""
    if op in _KNOWING or handler is handlers.decompose or (handler is handlers.stock and is_blind(op)):
        return handler
    apart = op in _ALONG or op in _BROADCASTING or op is aten.index_put.default or is_blind(op) or op in FILLS or op in LIKES

    @wraps(handler)
    def adapted(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if not GridShard.met:
            return handler(op, args, kwargs)
        grids = list(filter(is_grid, handlers.dtensors_in((*args, *kwargs.values()))))
        if not grids:
            return handler(op, args, kwargs)
        call = _unfolded(op, args, kwargs, grids) if apart else None
        if call is None:
            return _moved(op, handler, args, kwargs)
        out = handler(op, call.args, call.kwargs)
        return _folded(op, out, call, args, kwargs)

    return adapted


class _Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: dict[int, DTensor]  # by the identity of what the handler gets, what the caller gave
    program: Program | None  # None if the result is no tensor with grids


def _moved(op: handlers.Op, handler: handlers.Handler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Call ``handler`` with tokens that were moved, and move back what it writes to them."""
    linked = op in _LINKED
    known: dict[int, DTensor] = {}
    back: dict[int, DTensor] = {}

    def move(value: Any) -> Any:
        if not is_grid(value):
            return value
        if id(value) not in known:
            moved = known[id(value)] = without_grids(value)
            back[id(moved)] = value
            if linked:
                stale_views.set_origin(moved, Moved(value, tuple(value.shape)), value)
        return known[id(value)]

    out = handler(op, *_mapped(move, (args, kwargs)))
    for tensor in handlers.mutated_arguments(op, args, kwargs):
        if id(tensor) in known:
            Moved(tensor, tuple(tensor.shape)).write(known[id(tensor)])
    return _mapped(lambda value: back.get(id(value), value), out)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` of each thing in its lists and tables."""
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(_mapped(function, each) for each in value)
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    return function(value)


def _unfolded(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any], grids: Sequence[DTensor]) -> _Call | None:
    """The call with the dims of the grids apart; None if it works along one that is several then."""
    if any(not is_grid(tensor) for tensor in handlers.mutated_arguments(op, args, kwargs)):
        return None
    if op is aten.index_put.default:
        return _unfolded_rows(args, kwargs, grids)
    bound = handlers.bind(op, args, kwargs)
    program = cached_on_mesh(grids[0].device_mesh, Program, op, described(bound), _ALONG.get(op))
    if not program.fits or (program.windows and op not in _OF_WINDOWS and torch.Tag.pointwise not in op.tags):
        return None
    given: dict[int, DTensor] = {}

    def apart(tensor: Any, shape: tuple[int, ...] | None) -> Any:
        if shape is None:
            return tensor
        if not isinstance(tensor, DTensor):
            return tensor.reshape(shape)
        new = unfold(tensor) if is_grid(tensor) else aten.view.default(tensor, shape)
        given[id(new)] = tensor
        return new

    new_args, new_kwargs = list(args), dict(kwargs)
    for place, name, shapes in program.tensors:
        value = bound[place]
        value = apart(value, shapes) if isinstance(value, torch.Tensor) else list(map(apart, value, shapes))
        if place < len(args):
            new_args[place] = value
        else:
            new_kwargs[name] = value
    for place, name, value in program.values:
        if place < len(args):
            new_args[place] = value
        else:
            new_kwargs[name] = value
    return _Call(tuple(new_args), new_kwargs, given, program)


def _unfolded_rows(args: tuple[Any, ...], kwargs: dict[str, Any], grids: Sequence[DTensor]) -> _Call | None:
    """Of ``table[indices] = values``, by one list of indices, the values and indices with the dims of the grid apart."""
    table, indices, values, *rest = args
    if len(indices) != 1 or not isinstance(indices[0], torch.Tensor) or is_grid(table) or not is_grid(values):
        return None
    index, lead = indices[0], indices[0].ndim
    if is_grid(index) or tuple(values.shape[:lead]) != tuple(index.shape) or index.dtype == torch.bool:
        return None
    groups = unfolded(tuple(map(int, values.shape)), tuple(values.placements)).dims
    if any(len(group) > 1 for group in groups[lead:]):
        return None
    apart = unfold(values)
    shape = tuple(apart.shape[: groups[lead - 1].stop])
    index = aten.view.default(index, shape) if isinstance(index, DTensor) else index.reshape(shape)
    return _Call((table, [index], apart, *rest), kwargs, {}, None)


def _folded(op: handlers.Op, out: Any, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The results with the dims of the grids joined again."""
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    if all(id(each) in call.given for each in outs if isinstance(each, DTensor)):  # written in place
        outs = [call.given.get(id(each), each) for each in outs]
    else:
        if call.program is None:
            return out
        if call.program.metas is None:
            view = op in _VIEWS
            call.program.metas = (
                (fake_tensors.plain_view(op, *args),) if view else fake_tensors.plain_result(op, *args, **kwargs)
            )
        metas = call.program.metas
        outs = [viewed(each, meta)[0] if isinstance(each, DTensor) else each for each, meta in zip(outs, metas, strict=True)]
    return outs[0] if not isinstance(out, (list, tuple)) else type(out)(outs)
