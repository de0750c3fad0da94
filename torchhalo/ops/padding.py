"""Constant padding and its backward, cropping: a window of one element that is shifted by the padding."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchhalo import dispatch
from torchhalo.exchange import Plan
from torchhalo.geometry import Box, Window
from torchhalo.layout import layout
from torchhalo.windowed import exchange_between, memory_format, run

aten = torch.ops.aten


@dispatch.register(aten.constant_pad_nd.default)
def constant_pad_nd(op: dispatch.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.constant_pad_nd``: ``1234 -> 0012340``; negative padding crops."""
    input, padding, value = (*args, 0)[:3]
    (result,) = dispatch.plain_result(op, input, padding, value)
    mesh = input.device_mesh
    input = dispatch.redistribute(input, [Replicate() if isinstance(p, Partial) else p for p in input.placements])
    if dispatch.coordinate(mesh) is None:
        return dispatch.wrap(dispatch.local(input).new_empty(0), mesh, input.placements, result)
    # aten lists the last dim first
    ends = {input.ndim - 1 - i // 2: (padding[i], padding[i + 1]) for i in range(0, len(padding), 2)}
    windows = {dim: Window(1, before=before, after=after) for dim, (before, after) in ends.items()}
    target = layout(result.shape, mesh, input.placements)
    exchange = exchange_between(layout(input.shape, mesh, input.placements), target, windows)
    whole = [end for dim in reversed(range(input.ndim)) for end in ((0, 0) if dim in exchange.dims else ends.get(dim, (0, 0)))]

    def fit(plan: Plan, coordinate: tuple[int, ...]) -> tuple[Box, None]:
        own = target.owned(coordinate)
        return Box(tuple(windows[dim].reach(own.spans[dim]) for dim in exchange.dims)), None

    def kernel(region: torch.Tensor, word: None, coordinate: tuple[int, ...]) -> torch.Tensor:
        return aten.constant_pad_nd(region, whole, value)

    shard = dispatch.local(input).contiguous(memory_format=memory_format(input.shape, input.stride()))
    out = run(kernel, shard, exchange, mesh, fit, fill=value)
    out = out.contiguous(memory_format=memory_format(result.shape, result.stride))
    return dispatch.wrap(out, mesh, input.placements, result)
