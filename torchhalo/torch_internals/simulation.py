"""Simulated ranks: LocalTensor mode, and a fake process group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed._local_tensor import local_tensor_mode, maybe_run_for_local_tensor
from torch.utils._python_dispatch import _disable_current_modes

from torchhalo.torch_internals.caching import R, clear_stock_caches
from torchhalo.torch_internals.tracing import is_tracing


def per_rank(function: Callable[..., R], *args: object) -> R:
    """Call ``function`` with the plain tensors and integers of one rank; in LocalTensor mode, once for each of the ranks.

    The function may not communicate. It returns a tensor, or a flat tuple of tensors and integers.
    """
    return maybe_run_for_local_tensor(function)(*args) if local_tensor_mode() else function(*args)


def without_modes(function: Callable[[], R]) -> R:
    """Call ``function`` on plain tensors, once for all simulated ranks; under torch.compile it is recorded as any other."""
    if is_tracing():
        return function()
    with _disable_current_modes():
        return function()


@contextmanager
def fake_world(ranks: int, rank: int) -> Iterator[None]:
    """Inside, this process is one rank of a fake process group: its collectives return at once and bring nothing.

    Raises:
        RuntimeError: The process is in a real world already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group already; call it before `init_process_group`")
    # They know meshes by equality, and worlds before and after may have an equal one, seen from another rank.
    clear_stock_caches()
    hook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    sys.excepthook = hook  # torch puts "[rank N]:" before each line of an error from now on
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_stock_caches()


def simulated() -> bool:
    """Whether there are no other ranks to talk to now: they are simulated here, or torch.compile is recording."""
    return is_tracing() or local_tensor_mode() is not None or dist.get_backend() == "fake"
