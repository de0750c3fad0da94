"""What is worked out once for each shape, and how it is let go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache

#: How many things are kept, of each kind, to be found again; then all are let go.
CACHE_SIZE = 4096


R = TypeVar("R")
_MISSING: Any = object()


def cached_on_mesh(mesh: DeviceMesh, make: Callable[..., R], *key: Any) -> R:
    """``make(mesh, *key)``, worked out once for each key.

    It is kept with the mesh, not by what the mesh is equal to: an equal one may have other process groups.
    """
    kept: dict[Any, R] = mesh.__dict__.setdefault("_torchhalo", _MeshCache())
    known = make, *key
    found = kept.get(known, _MISSING)
    if found is _MISSING:
        if len(kept) >= CACHE_SIZE:
            kept.clear()
        found = kept[known] = make(mesh, *key)
        _count_miss()
    return found


class _Misses(threading.local):
    new = 0


_misses = _Misses()


def _count_miss() -> None:
    """Let stock's caches go now and then. DTensor has one for each thread, so each thread counts what it prepares."""
    _misses.new += 1
    if _misses.new % CACHE_SIZE == 0:
        clear_stock_caches()


def clear_stock_caches() -> None:
    """Empty the caches of DTensor and of fake tensors, which never let go of a shape that they have met."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # imports the compiler: half a second

    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    FakeTensorMode.cache_clear()


class _MeshCache(dict[Any, Any]):
    """What was prepared for a mesh; a copy of the mesh, or one that is loaded from a file, starts anew."""

    def __reduce__(self) -> Any:
        return _MeshCache, ()
