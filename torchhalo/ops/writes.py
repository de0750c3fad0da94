"""Ops that write: fill, copy, and the scatters that write to a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.layout import has_layout
from torchhalo.ops.inplace import LATER, Cut, known_everywhere, write
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, redistribution

aten = torch.ops.aten


@handlers.register(
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    traffic="nothing",
    limits=LATER,
)
def fill(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.fill_`` and ``aten.zero_``."""
    input, *value = args
    plain = isinstance(args[-1], torch.Tensor) and not isinstance(args[-1], DTensor)
    fake_tensors.plain_result(op, input, *(dtensors.replicated(v, input.device_mesh) if plain else v for v in value))
    value = [dtensors.local(redistribution.whole(v)) if isinstance(v, DTensor) else v for v in value]
    if redistribution.is_partial(input):  # the summands must add up to the value
        filled = known_everywhere(op, (input, *value))
        assert filled is not None
        aten.copy_(dtensors.local(input), dtensors.local(redistribution.redistribute(filled, input.placements)))
    else:
        op(dtensors.local(input), *value)
    return input


@handlers.register(
    aten.copy_.default,
    traffic="into a piece along a cut dim, what changes owner on its way back; nothing if the value is replicated",
    limits=LATER,
)
def copy(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.copy_``."""
    target, source, *rest = handlers.bind(op, args, kwargs)
    if not isinstance(target, DTensor) or not all(has_layout(t) for t in (target, source) if isinstance(t, DTensor)):
        return handlers.stock(op, args, kwargs)
    if not isinstance(source, DTensor) and source.numel() == 1:
        source = dtensors.replicated(source, target.device_mesh)
    target, source = dtensors.as_dtensors("copy_", self=target, src=source)
    fake_tensors.plain_result(op, target, source)
    source = source if source.shape == target.shape else source.expand(target.shape)
    aten.copy_(dtensors.local(target), dtensors.local(redistribution.redistribute(source, target.placements, op)), *rest)
    return target


@handlers.register(
    aten.slice_scatter.default,
    aten.select_scatter.default,
    traffic="what changes owner; nothing if `src` is replicated",
    limits="a plain `src` is taken as replicated",
)
def scatter(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.slice_scatter`` and ``aten.select_scatter``: writing to a copy."""
    input, src, dim, *where = handlers.bind(op, args, kwargs)
    mesh = dtensors.mesh_of(input, src)
    tensors = (dtensors.replicated(t, mesh) for t in (input, src))
    input, src = dtensors.as_dtensors(op.overloadpacket.__name__, **dict(zip(("input", "src"), tensors, strict=True)))
    fake_tensors.plain_result(op, input, src, dim, *where)
    dim %= input.ndim
    size, selected = input.shape[dim], op is aten.select_scatter.default
    first, last, step = (where[0] % size, where[0] % size + 1, 1) if selected else slice(*where).indices(size)
    out = aten.clone(redistribution.reduce_partial(input))
    write(Cut(out, dim, first, step, len(range(first, last, step)), selected), src)
    return out
