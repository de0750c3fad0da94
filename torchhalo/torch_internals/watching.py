"""Watchers: told of each collective before it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class Collective(NamedTuple):
    """A collective that torchhalo is about to start.

    Attributes:
        sent, received: How many elements go to and come from each member of the group, where that differs.
        about: The exchange that it is for, where it is for one.
    """

    kind: str
    tensor: torch.Tensor
    group: dist.ProcessGroup
    sent: Sequence[int] = ()
    received: Sequence[int] = ()
    about: object = None


class Redistribution(NamedTuple):
    """What ``op`` is about to do to one of its tensors: from the placements ``source`` to ``target``."""

    op: object
    shape: Sequence[int]
    dtype: torch.dtype
    mesh: DeviceMesh
    source: Sequence[Placement]
    target: Sequence[Placement]


class Watcher:
    """Told of collectives before they start; subclasses override the kinds that they want."""

    def collective(self, each: Collective) -> None:
        """One of torchhalo's own."""

    def redistribution(self, each: Redistribution) -> None:
        """Those by which DTensor redistributes a tensor."""


watchers: list[Watcher] = []
redistribution_listeners: list[Callable[[Redistribution], None]] = []


def announce(each: Redistribution) -> None:
    """Tell of a redistribution before its collectives start."""
    for listener in redistribution_listeners:
        listener(each)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Inside, ``watcher`` is told of every collective that an op starts."""
    listener = watcher.redistribution
    watchers.append(watcher)
    redistribution_listeners.append(listener)
    try:
        yield
    finally:
        watchers.remove(watcher)
        redistribution_listeners.remove(listener)
