"""One training step of a U-Net: one process with all threads against gloo ranks that share the same cores.

Time: from the first rank that starts a step to the last that ends it; the median over steps and rounds, the ways in turns.
The C library's heap, as it is, gives large tensors back to the system when they are freed, and fresh pages then cost the larger
ones of one process more; `--heap kept` has it keep them, for all ways. Memory: what training adds to the peak of a process, in
runs of their own with a heap that gives freed memory back; the largest rank counts. Sent: the bytes of all exchanges of a step,
over all ranks; bound: what the windows of convolutions and pools need at least.

JAX (`pip install jax`) and PhysicsNeMo (`pip install nvidia-physicsnemo`) are measured where they are installed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import torchhalo
from benchmarks import common, unet_others
from benchmarks.common import MIB, Column, Heap, Record, Row, generous_heap, key, say, usual_heap
from benchmarks.unet_model import Shape, UNet, layers, least_elements
from torchhalo.exchange.transfer import counted
from torchhalo.tools import launch

WARM_UP = 2
HEAPS: dict[str, Heap] = {"usual": usual_heap, "kept": generous_heap}
SHAPES = {"2d": Shape(2, 768, 16, 3), "3d": Shape(3, 96, 8, 3)}
QUICK = {"2d": Shape(2, 32, 4, 2), "3d": Shape(3, 16, 4, 1)}
#: float32, some million elements per sum, four steps of training
TOLERANCE = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, nargs="+", help="which (default: both)")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="how many ranks (default: 2 4)")
    parser.add_argument("--size", type=int, metavar="N", help="of the image along each dim (default: 768 in 2-d, 96 in 3-d)")
    parser.add_argument("--norm", choices=("batch", "group"), default="batch", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="measured per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="of all ways in turns (default: %(default)s)")
    parser.add_argument("--heap", choices=HEAPS, default="usual", help="what becomes of freed memory (default: %(default)s)")
    parser.add_argument("--no-others", action="store_true", help="only torchhalo")


class Report(NamedTuple):
    """What one rank saw: the time of each step, the peak memory that training added, bytes sent per step, the last loss."""

    starts: list[float]
    ends: list[float]
    memory: int
    sent: int
    loss: float


def run(arguments: argparse.Namespace, record: Record) -> None:
    quick = arguments.quick
    shapes = QUICK if quick else SHAPES
    for name in arguments.model or (["2d"] if quick else list(shapes)):
        shape = shapes[name]._replace(norm=arguments.norm)
        shape = shape._replace(size=arguments.size or shape.size)
        ranks = arguments.ranks or ([2] if quick else [2, 4])
        rounds, steps = (1, 2) if quick else (arguments.rounds, arguments.steps)
        say(str(shape))
        for row in measure(shape, [1, *ranks], rounds, steps, HEAPS[arguments.heap], memory=not quick):
            record.add({"model": str(shape), **row})
        if not arguments.no_others:
            for row in unet_others.measure(shape, ranks, rounds, steps, HEAPS[arguments.heap]):
                least = {"bound": bound(shape, row["ranks"])} if "ranks" in row else {}
                record.add({"model": str(shape), **row, **least})


def measure(shape: Shape, ways: Sequence[int], rounds: int, steps: int, heap: Heap, memory: bool) -> list[Row]:
    """A row for each number of ranks; ``memory`` takes runs of its own."""
    times: dict[int, list[float]] = {ranks: [] for ranks in ways}
    reports: dict[int, list[Report]] = {}
    for turn in range(rounds):
        for ranks in ways:
            say(f"  round {turn + 1} of {rounds}: {called(ranks)}")
            with heap():
                reports[ranks] = launch.on_ranks(train, ranks, shape, steps)
            times[ranks] += durations(reports[ranks])
    first = reports[ways[0]][0].loss
    rows = []
    for ranks in ways:
        worst = max((report.loss for report in reports[ranks]), key=lambda loss: abs(loss - first))
        if abs(worst - first) > TOLERANCE * abs(first):
            raise AssertionError(f"{called(ranks)}: the loss is {worst}, that of one process {first}")
        rows.append(
            {
                "way": called(ranks),
                "ranks": ranks,
                "ms": median(times[ranks]) * 1e3,
                "memory": peak(shape, ranks) if memory else None,
                "sent": sum(report.sent for report in reports[ranks]),
                "bound": bound(shape, ranks),
            }
        )
    return rows


def peak(shape: Shape, ranks: int) -> float:
    """The memory that training adds to the largest rank, in MiB."""
    say(f"  memory: {called(ranks)}")
    return max(report.memory for report in launch.on_ranks(train, ranks, shape, 1)) / MIB


def called(ranks: int) -> str:
    return "one process" if ranks == 1 else f"{ranks} ranks"


def durations(reports: Sequence[Report]) -> list[float]:
    """Of each step, from the first rank that starts to the last that ends: they are on one clock."""
    starts, ends = ([getattr(report, name) for report in reports] for name in ("starts", "ends"))
    return [max(end) - min(start) for start, end in zip(zip(*starts, strict=True), zip(*ends, strict=True), strict=True)]


def bound(shape: Shape, ranks: int) -> int:
    """The fewest bytes of halos that a step must send."""
    with torch.device("meta"):
        model = UNet(shape)
    return sum(least_elements(layer, ranks) for layer in layers(model, shape.input)) * 4


class Wave:
    """An image of any size that is made where it is read, the same wherever it is cut; an array for `torchhalo.shard`."""

    def __init__(self, shape: Sequence[int], period: int):
        self.shape, self.period = tuple(shape), period

    def __getitem__(self, cuts: Sequence[slice]) -> torch.Tensor:
        spans = [torch.arange(size)[cut] for size, cut in zip(self.shape, cuts, strict=True)]
        value = torch.ones([1] * len(spans))
        for dim, span in enumerate(spans):
            value = value * torch.cos(span * (dim + 1) / self.period).view([-1 if d == dim else 1 for d in range(len(spans))])
        return value


def sample(shape: Sequence[int], mesh: DeviceMesh | None) -> list[torch.Tensor]:
    """Image and target, of which each rank makes only its own box."""
    waves = Wave(shape, 7), Wave(shape, 19)
    if mesh is None:
        return [wave[[slice(None)] * len(shape)] for wave in waves]
    return [torchhalo.shard(wave, mesh) for wave in waves]


def train(shape: Shape, steps: int) -> Report:
    """Some steps on this rank, after a warm-up."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    with counted() as sent:
        step = stepper(shape._replace(size=2**shape.depth * max(ranks, 2)), mesh)
        step()
        before = launch.peak_memory()
        step = stepper(shape, mesh)
        if steps > 1:
            for _ in range(WARM_UP):
                step()
        starts, ends, loss = [], [], 0.0
        sent.clear()
        for _ in range(steps):
            dist.barrier()
            starts.append(time.monotonic())
            loss = step()
            ends.append(time.monotonic())
    return Report(starts, ends, launch.peak_memory() - before, sum(sent) // steps, loss)


def stepper(shape: Shape, mesh: DeviceMesh | None) -> Any:
    """A function that trains one step and returns its loss."""
    torch.manual_seed(0)
    model: torch.nn.Module = UNet(shape)
    if mesh is not None:
        model = torchhalo.parallelize(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    image, target = sample(shape.input, mesh)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(image), target)
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)

    return step


def table(rows: list[Row]) -> str:
    """With ratios to one process of the same framework."""
    found = {(row["model"], row["way"]): row for row in rows}

    def ratio(name: str) -> Any:
        def value(row: Row) -> float | None:
            base = found.get((row["model"], row.get("base", "one process")), {})
            return row[name] / base[name] if row.get(name) and base.get(name) else None

        return value

    def kib(name: str) -> Any:
        return lambda row: row[name] / 1024 if row.get(name) is not None else None

    return common.table(
        rows,
        [
            key("model"),
            key("way"),
            key("ms", "ms per step", "{:.0f}"),
            Column("of one process", ratio("ms"), "{:.2f}x"),
            key("memory", "MiB per rank", "{:.1f}"),
            Column("of one process", ratio("memory"), "{:.2f}x"),
            Column("sent KiB", kib("sent"), "{:.1f}"),
            Column("bound KiB", kib("bound"), "{:.1f}"),
            key("note"),
        ],
    )
