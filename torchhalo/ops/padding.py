"""Constant padding and its backward, cropping: a window of one element that is shifted by the padding."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo import dispatch
from torchhalo.geometry import Window
from torchhalo.windowed import Here, forward, reach

aten = torch.ops.aten


@dispatch.register(aten.constant_pad_nd.default, traffic="what changes owner")
def constant_pad_nd(op: dispatch.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.constant_pad_nd``: ``1234 -> 0012340``; negative padding crops."""
    input, padding, value = (*args, 0)[:3]
    (result,) = dispatch.plain_result(op, input, padding, value)
    # aten lists the last dim first
    ends = {input.ndim - 1 - i // 2: (padding[i], padding[i + 1]) for i in range(0, len(padding), 2)}
    windows = {dim: Window(1, before=before, after=after) for dim, (before, after) in ends.items()}

    def kernel(region: torch.Tensor, here: Here) -> torch.Tensor:
        rest = [(0, 0) if dim in here.dims else ends.get(dim, (0, 0)) for dim in reversed(range(region.ndim))]
        return aten.constant_pad_nd(region, [end for pair in rest for end in pair], value)

    return forward(kernel, input, windows, [result], region=reach, fill=value)[0]
