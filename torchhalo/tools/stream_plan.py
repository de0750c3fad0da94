"""What streaming a model on one device will take, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchhalo.parallel.streaming.overlap import BUS
from torchhalo.parallel.streaming.prepare import search
from torchhalo.parallel.streaming.trace import Call
from torchhalo.tools.explain import inputs_of
from torchhalo.tools.fake_run import without_values_of
from torchhalo.tools.observe import named
from torchhalo.tools.text import readable, size_text


class StreamPlan(NamedTuple):
    """What one device will do.

    Attributes:
        shards: How many there are along each dim that is cut.
        resident: Bytes that are always on the device.
        peak: The most bytes on the device at a time, those included.
        moved: Bytes that are loaded from the host and saved there.
        host: The most bytes that wait on the host at a time.
        flops: Operations of matrix products and convolutions.
    """

    shards: tuple[int, ...]
    resident: int
    peak: int
    moved: int
    host: int
    flops: int

    def seconds(self, flops: float, bandwidth: float = BUS) -> float:
        """A lower bound of the time of the call, on a device that does so many operations per second."""
        return max(self.flops / flops, self.moved / bandwidth)

    def json(self) -> str:
        """For programs."""
        return json.dumps(self._asdict())

    def __str__(self) -> str:
        rows = [
            ("shards", size_text(self.shards)),
            ("peak on the device", f"{readable(self.peak)}, of which {readable(self.resident)} are always there"),
            ("host memory", readable(self.host)),
            ("moved over the bus", readable(self.moved)),
            ("operations", f"{self.flops:.2g}"),
        ]
        return "\n".join(f"{name:<24}{value}" for name, value in rows)


def plan_stream(
    model: Any,
    sample: Sequence[Any],
    *,
    memory: float = float("inf"),
    shards: Sequence[int] | None = None,
    dims: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    train: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> StreamPlan:
    """What `torchhalo.stream` would do with a model on shapes alone.

    Args:
        model, sample, dtype, train, progress: As for `explain`.
        memory, shards, dims: As for `stream`, in bytes and as tuples.

    Example:
        >>> plan_stream(torch.nn.Conv2d(3, 8, 3, padding=1), (1, 3, 256, 64), shards=(4,)).shards
        (4,)
    """
    progress("one program per shard")
    inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs_of(sample, dtype))
    net = without_values_of(named(model) if isinstance(model, str) else model).to(dtype).train(train)
    wanted = frozenset(number for number, x in enumerate(inputs) if train and x.requires_grad)
    found = search(Call(net, "forward", inputs, {}, torch.device("cpu"), train, wanted), shards, dims, memory)
    flops = sum(step.flops for each in found.steps for step in each.steps)
    schedule = found.schedule
    return StreamPlan(found.shards, found.resident, schedule.peak + found.resident, schedule.moved, schedule.host, flops)
