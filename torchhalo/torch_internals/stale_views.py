"""Views that DTensor cannot keep as views: where a tensor came from, and which ones are stale after a write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.weak import TensorWeakRef


class Origin:
    """Where a tensor comes from; a copy of the tensor, or one that is loaded from a file, comes from nowhere."""

    def __reduce__(self) -> Any:
        return type(None), ()


class _Relatives(list[Any], Origin):
    """Weak references to the tensors that remember a tensor, or a view of it, as their origin."""


def set_origin(tensor: DTensor, origin: Origin, base: DTensor) -> DTensor:
    """``tensor``, which from now on knows that it comes from ``base``, and how."""
    setattr(tensor, "_torchhalo_origin", origin)  # noqa: B010
    root = _root(base)
    known = [ref for ref in getattr(root, "_torchhalo_relatives", None) or () if ref() is not None]
    setattr(root, "_torchhalo_relatives", _Relatives([*known, TensorWeakRef(tensor)]))  # noqa: B010
    return tensor


def get_origin(tensor: torch.Tensor) -> Any:
    """What was given to `set_origin`, or None."""
    return getattr(tensor, "_torchhalo_origin", None)


def living_views(tensor: DTensor) -> list[DTensor]:
    """The living tensors that remember this one as their base, or one that it shares memory with."""
    found = getattr(_root(tensor), "_torchhalo_relatives", None)
    return [other for ref in found if (other := ref()) is not None] if found else []


def _root(tensor: DTensor) -> torch.Tensor:
    base = tensor._base
    return tensor if base is None else base


class _StaleSpec:
    """In the place of a tensor's spec, which every op asks: an error for all but what is written over the whole tensor."""

    def __init__(self, spec: DTensorSpec, reason: str):
        self.kept, self.reason = spec, reason

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self.reason)


def mark_stale(tensor: DTensor, reason: str) -> None:
    """Make every op on ``tensor`` raise ``reason``."""
    if not isinstance(tensor._spec, _StaleSpec):
        setattr(tensor, "_spec", _StaleSpec(tensor._spec, reason))  # noqa: B010


def clear_stale(tensor: DTensor) -> None:
    """Undo `mark_stale`."""
    spec: Any = tensor._spec
    if isinstance(spec, _StaleSpec):
        tensor._spec = spec.kept


@contextmanager
def version_counters() -> Iterator[None]:
    """Inside, new tensors are ones whose versions are counted, also in inference mode; still below autograd."""
    with torch.inference_mode(False), torch._C._AutoDispatchBelowADInplaceOrView(), torch.no_grad():
        yield
