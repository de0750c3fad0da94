"""Flattened tokens of a sharded image: an op meets them unflattened, where each rank has a box of them, or moved to a `Shard`.

``(batch, height, width, channels)`` that is cut along its width and flattened to ``(batch, height * width, channels)`` stays
where it is: the placement is a `GridShard`. Views know it, DTensor's own matrix products and pointwise ops do not mind it, and
the handlers of ops named here get the image back, with its dims renumbered. All others get tokens that were moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.grids import unfold, unfolded
from torchhalo.exchange.relayout import viewed, without_grids
from torchhalo.ops.attention import FUSED, FUSED_BACKWARD
from torchhalo.ops.inplace import VIEWS, WRITERS, Moved
from torchhalo.ops.randomness import FILLS, LIKES
from torchhalo.torch_internals import fake_tensors, handlers, stale_views
from torchhalo.torch_internals.grid_shard import GridShard, is_blind, is_grid

aten, c10d = torch.ops.aten, torch.ops.c10d


class Named(NamedTuple):
    """Which arguments of an op are dims, or sizes, of a tensor argument.

    Attributes:
        dims: One dim, or several.
        sizes: All sizes of a tensor with as many dims.
        inserts: The dim is one that the tensors do not have, and these sizes do.
        tensors: Those that are tokens, by name, where others are not of their shape.
        kept: So many dims, the first, are what they are by their number, as that of the channels.
    """

    dims: str | None = None
    sizes: str | None = None
    inserts: bool = False
    tensors: tuple[str, ...] = ()
    kept: int = 0


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
    named, about = handlers.named(op, args, kwargs), _ALONG.get(op)
    widest = max(grids, key=DTensor.numel)
    dims = unfolded(tuple(map(int, widest.shape)), tuple(widest.placements)).dims
    shape = tuple(map(int, unfold(widest).shape))
    if op is aten.index_put.default:
        return _unfolded_rows(args, kwargs, grids)
    changed: dict[str, Any] = {}
    if about is not None:
        if any(len(group) > 1 for group in dims[: about.kept]):
            return None
        groups = _inserted(dims, named[about.dims]) if about.inserts and about.dims else dims
        grids_apart = [shape[group.start : group.stop] for group in dims if len(group) > 1]
        for name, renumber in ((about.dims, _renumbered), (about.sizes, partial(_resized, apart=grids_apart))):
            if name is not None:
                changed[name] = renumber(named[name], groups)
                if changed[name] is None:
                    return None
    normalized = named.get("normalized_shape")
    if normalized is not None and any(len(group) > 1 for group in dims[-len(normalized) :]):
        return None
    given: dict[int, DTensor] = {}
    for name, value in named.items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        if not any(isinstance(part, torch.Tensor) for part in parts):
            continue
        if about is not None and about.tensors and name not in about.tensors:
            continue
        apart: list[Any] = []
        for part in parts:
            new = _apart(part, widest, dims, shape) if isinstance(part, torch.Tensor) else part
            if new is None:
                return None
            if new is not part:
                given[id(new)] = part
            apart.append(new)
        changed[name] = apart if isinstance(value, (list, tuple)) else apart[0]
    places = {argument.name: place for place, argument in enumerate(op._schema.arguments)}
    new_args, new_kwargs = list(args), dict(kwargs)
    for name, value in changed.items():
        if places[name] < len(args):
            new_args[places[name]] = value
        else:
            new_kwargs[name] = value
    return _Call(tuple(new_args), new_kwargs, given)


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
    return _Call((table, [index], apart, *rest), kwargs, {})


def _inserted(groups: Sequence[range], dim: int) -> list[range]:
    """The dims of the unfolded tensor for each of the folded one, both with one more at ``dim`` of the latter."""
    dim %= len(groups) + 1
    at = groups[dim].start if dim < len(groups) else groups[-1].stop
    return [*groups[:dim], range(at, at + 1), *(range(group.start + 1, group.stop + 1) for group in groups[dim:])]


def _resized(sizes: Sequence[int], groups: Sequence[range], apart: Sequence[Sequence[int]]) -> list[int] | None:
    """Sizes of a folded tensor as those of the unfolded one; None if they are not those of its grids, which are ``apart``."""
    if len(sizes) != len(groups):
        return None
    grids = iter(apart)
    found: list[int] = []
    for group, size in zip(groups, sizes, strict=True):
        parts = (size,) if len(group) == 1 else next(grids)
        if size not in (prod(parts), -1):
            return None
        found += parts
    return found


def _renumbered(dims: Any, groups: Sequence[range]) -> Any:
    """One dim, or several, of the folded tensor as those of the unfolded one; None if one dim would be several."""
    if isinstance(dims, int):
        group = groups[dims]
        return group.start if len(group) == 1 else None
    return dims and [dim for each in dims for dim in groups[each]]


def _apart(tensor: torch.Tensor, widest: DTensor, groups: Sequence[range], shape: Sequence[int]) -> torch.Tensor | None:
    """``tensor``, which broadcasts to the shape of ``widest``, with the dims of the grids apart; None if it does not."""
    more = widest.ndim - tensor.ndim
    sizes: list[int] = []
    for dim, group in list(enumerate(groups))[max(0, more) :]:
        size = int(tensor.shape[dim - more])
        whole = shape[group.start : group.stop]
        if len(group) > 1 and size not in (1, widest.shape[dim]):
            return None
        sizes += [size] if len(group) == 1 else [1] * len(group) if size == 1 else whole
    if more < 0:
        return None
    if not isinstance(tensor, DTensor):
        return tensor if len(sizes) == tensor.ndim else tensor.reshape(sizes)
    if is_grid(tensor) and tuple(unfold(tensor).shape) != tuple(sizes):
        return None
    if is_grid(tensor):
        return unfold(tensor)
    return tensor if len(sizes) == tensor.ndim else aten.view.default(tensor, sizes)


def _folded(op: handlers.Op, out: Any, call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The results with the dims of the grids joined again."""
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    if all(id(each) in call.given for each in outs if isinstance(each, DTensor)):  # written in place
        outs = [call.given.get(id(each), each) for each in outs]
    else:
        metas = (fake_tensors.plain_view(op, *args),) if op in _VIEWS else fake_tensors.plain_result(op, *args, **kwargs)
        outs = [viewed(each, meta)[0] if isinstance(each, DTensor) else each for each, meta in zip(outs, metas, strict=True)]
    return outs[0] if not isinstance(out, (list, tuple)) else type(out)(outs)
