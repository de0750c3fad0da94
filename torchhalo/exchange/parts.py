"""Bulk and strips: whether, and how, a rank computes its outputs in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torchhalo.exchange.memory import croppable
from torchhalo.exchange.plan import Exchange, Plan
from torchhalo.exchange.task import Task
from torchhalo.geometry import Box, Mirror, Window, crop, shell

#: Whether a kernel can pad a dim by so much at both ends, leaving the last so many elements over.
Pads = Callable[[int, int, int], bool]

#: How many bytes of shard make bulk and strips the faster way. Measured with the halo given, for 3x3 and 7x7 kernels of 16 to
#: 256 channels, forward and backward. On an H200, in bf16, parts take less of its time than a copy of the shard with its halo
#: from 4 MiB (3x3, 64 channels) or 16 MiB (the others) on: 1.09 against 1.53 of the plain kernel's at 64 MiB. On one core of a
#: CPU, in float32, from 4 MiB (3x3) or 8 MiB (7x7) on: 0.9 against 1.06 at 8 MiB, but 1.4 against 1.2 at 1 MiB.
ENOUGH = {"cpu": 2**22, "cuda": 2**24}


_forced: bool | None = None


@contextmanager
def in_parts(on: bool) -> Iterator[None]:
    """Inside, ops are computed in parts, bulk and strips, wherever they can be, or never; for tests and measurements."""
    global _forced
    before, _forced = _forced, on
    try:
        yield
    finally:
        _forced = before


def forced_parts() -> bool | None:
    """What `in_parts` asks for, or None."""
    return _forced


def worthwhile(size: int, device: str) -> bool:
    """Whether a shard of ``size`` bytes is better computed in parts than put together with its halo in a copy."""
    return size >= ENOUGH.get(device, ENOUGH["cuda"])


def strips_beyond(exchange: Exchange, own: Box, region: Box) -> list[Box] | None:
    """What of ``own`` is wrong if it is computed from ``region`` alone; None where that is more than half of it."""
    inside = []
    for dim, window, outputs, inputs in zip(exchange.dims, exchange.windows, own.spans, region.spans, strict=True):
        assert isinstance(window, (Window, Mirror))
        inside.append(window.inside(outputs, inputs, exchange.source.shape[dim]))
    strips = [strip for strip in shell(own, Box(tuple(inside))) if not region.contains(exchange.needs(strip))]
    return None if 2 * sum(strip.size for strip in strips) > own.size else strips


def bulk_and_strips(
    exchange: Exchange, plan: Plan, task: Task, like: torch.Tensor, format: torch.memory_format, pads: Pads
) -> tuple[Task | None, list[Task]]:
    """The bulk and the strips of what a rank computes; None and none to compute it at once.

    Args:
        like: A tensor of the source's kind.
        format: The source's.
    """
    own = Box(tuple(task.outputs.spans[dim] for dim in task.dims))
    wanted = worthwhile(task.owned.size * like.element_size(), like.device.type) if _forced is None else _forced
    if not (wanted and task.owned.size and own.size and plan.receives):
        return None, []
    fitted = []
    for dim, window, outputs, held in zip(task.dims, exchange.windows, own.spans, plan.owned.spans, strict=True):
        assert isinstance(window, Window)
        found = crop(window, held, outputs, False)
        if found is None or not pads(dim, *found[1:]) or (found[0] != held and dim not in croppable(task.owned.shape, format)):
            return None, []
        fitted.append(found)
    region = Box(tuple(span for span, _, _ in fitted))
    strips = strips_beyond(exchange, own, region)
    if strips is None:
        return None, []
    reached = [Box(tuple(w.reach(span) for w, span in zip(exchange.windows, s.spans, strict=True))) for s in strips]
    bulk = task.part(own, region, tuple(padding for _, padding, _ in fitted))
    return bulk, [task.part(strip, each) for strip, each in zip(strips, reached, strict=True)]
