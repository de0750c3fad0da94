"""Small tensors of known values, kept on their device: each copy from the host would stall a GPU, and forbid CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torchhalo.torch_internals.tracing import is_plain, no_dispatch_modes

#: How many constants are kept; then all are let go.
MOST = 1024

_kept: dict[object, torch.Tensor] = {}


def constant(values: Sequence[Any] | int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``like.new_tensor(values)``, not to be written to; the same tensor each time.

    While a program is traced or simulated it is a new one, which that program alone knows.
    """
    dtype = dtype or like.dtype
    if not is_plain(like) or not no_dispatch_modes():
        return like.new_tensor(values, dtype=dtype)
    key = _hashable(values), dtype, like.device
    if key not in _kept:
        if len(_kept) >= MOST:
            _kept.clear()
        with _disable_current_modes(), torch.inference_mode(False):
            _kept[key] = torch.tensor(values, dtype=dtype, device=like.device)
    return _kept[key]


def _hashable(values: Any) -> Any:
    """``values`` as a key; a tuple is one, and must hold none but tuples and numbers."""
    return tuple(map(_hashable, values)) if isinstance(values, list) else values
