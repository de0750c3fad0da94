"""What the benchmarks share: timing, peak memory, simulated ranks, tables and JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchhalo
from torchhalo.tools import launch
from torchhalo.torch_internals import collectives

Heap = Callable[[], AbstractContextManager[None]]
Call = Callable[[], Any]
Row = dict[str, Any]
MIB = 2**20


class Record:
    """The rows of one run; every row is on disk as soon as it is measured.

    Args:
        name: Of the benchmark.
        arguments: The words after ``python -m benchmarks``.
        output: The file.
    """

    def __init__(self, name: str, arguments: Sequence[str], output: Path):
        self.name, self.output = name, output
        self.rows: list[Row] = []
        self.about = {
            "command": " ".join(["python -m benchmarks", *arguments]),
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "machine": machine(),
        }

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps({"name": self.name, **self.about, "rows": self.rows}, indent=1) + "\n")
        say("  " + ", ".join(f"{key} {_short(value)}" for key, value in row.items() if value is not None))

    def heading(self) -> str:
        return f"{self.about['date']}, {self.about['machine']}, torch {self.about['torch']}: `{self.about['command']}`"


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def machine() -> str:
    """The GPU, or the CPU and its threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{_cpu()}, {torch.get_num_threads()} threads"


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class Column(NamedTuple):
    """One column of a table.

    Attributes:
        title: What stands above it.
        value: From a row to a number, a text or None.
        form: How a number is written.
    """

    title: str
    value: Callable[[Row], Any]
    form: str = "{:.3f}"


def key(name: str, title: str | None = None, form: str = "{:.3f}") -> Column:
    """The column of ``row[name]``."""
    return Column(title or name, lambda row: row.get(name), form)


def ratio(title: str, over: str, under: str) -> Column:
    """The column of ``row[over] / row[under]``."""

    def value(row: Row) -> float | None:
        above, below = row.get(over), row.get(under)
        return above / below if above is not None and below else None

    return Column(title, value, "{:.2f}x")


def table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The rows as a Markdown table that also reads well as it is; columns without any value are left out."""
    cells = [[_cell(column, row) for row in rows] for column in columns]
    kept = [(column, cell) for column, cell in zip(columns, cells, strict=True) if any(text != "-" for text in cell)]
    lines = [[column.title for column, _ in kept], *zip(*(cell for _, cell in kept), strict=True)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(kept))]
    words = [all(isinstance(column.value(row), str | None) for row in rows) for column, _ in kept]
    written = [
        "| "
        + " | ".join(f"{text:{'<' if word else '>'}{width}}" for text, word, width in zip(line, words, widths, strict=True))
        + " |"
        for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if word else ":") for word, width in zip(words, widths, strict=True)) + "|"
    return "\n".join([written[0], rule, *written[1:]]) if kept else "nothing was measured"


def _cell(column: Column, row: Row) -> str:
    value = column.value(row)
    if value is None:
        return "-"
    return value if isinstance(value, str) else column.form.format(value)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def middle_rank(device: str, ranks: int = 4) -> Iterator[DeviceMesh]:
    """This process as rank 1 of a line of ``ranks`` that nobody else is in: what it asks of the others is there at once.

    Halos are zeros in a buffer that is kept, so nothing is sent, awaited or allocated; statistics of the others equal its own.
    torchhalo is not enabled by it.
    """
    halos: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def all_to_all(
        tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any, about: object = None
    ) -> torch.Tensor:
        kind = sum(received), tensor.dtype
        if kind not in halos:
            halos[kind] = tensor.new_zeros(kind[0])
        return halos[kind]

    def all_gather(tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
        return tensor.unsqueeze(0).expand(ranks, *tensor.shape)

    def all_reduce(
        tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], reduction: str = "sum", in_place: bool = False
    ) -> torch.Tensor:
        return tensor

    given: dict[str, Callable[..., torch.Tensor]] = {
        "all_to_all": all_to_all,
        "all_gather": all_gather,
        "all_reduce": all_reduce,
        "wait": lambda tensor: tensor,
    }
    dist.init_process_group("fake", rank=1, world_size=ranks)
    try:
        with mock.patch.multiple(collectives, **given):
            yield init_device_mesh(device, (ranks,))
    finally:
        torchhalo.disable()
        dist.destroy_process_group()


@contextmanager
def usual_heap() -> Iterator[None]:
    """Processes started inside have the heap that the C library gives to those that ask for nothing."""
    with mock.patch.object(launch, "_frugal_heap", nullcontext):
        yield


@contextmanager
def generous_heap() -> Iterator[None]:
    """Processes started inside keep the memory of freed tensors, so that no step waits for fresh pages."""
    kept = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
    with usual_heap(), mock.patch.dict(os.environ, kept):
        yield


class Time(NamedTuple):
    """Milliseconds of one call.

    Attributes:
        wall: With many calls in a row, as in training: the longer of what the host and the device take.
        device: What its kernels take on the device, without gaps; None on a CPU.
        host: Until the call returns, the device still busy; None on a CPU.
    """

    wall: float
    device: float | None = None
    host: float | None = None


def timed(calls: Mapping[str, Call], device: str, repeats: int = 5, seconds: float = 0.2) -> dict[str, Time]:
    """The medians of interleaved repeats, so that what else the machine does meets all calls alike.

    Args:
        calls: By name.
        repeats: How often each call is measured.
        seconds: How long a measurement takes, roughly.
    """
    for call in calls.values():
        for _ in range(3):
            call()
    if device == "cpu":
        return {name: Time(wall * 1e3) for name, wall in host_seconds(calls, repeats, seconds).items()}
    graphs = {name: captured(call) for name, call in calls.items()}

    def kernels(name: str) -> float:
        graph = graphs[name]
        return _profiled(calls[name]) if graph is None else device_milliseconds(graph, seconds)

    measures = {
        "wall": lambda name: device_milliseconds(calls[name], seconds),
        "device": kernels,
        "host": lambda name: host_milliseconds(calls[name]),
    }
    found: dict[str, dict[str, float]] = {name: {} for name in calls}
    # One kind after the other: a GPU that was kept busy runs at a lower clock than one that rested.
    for kind, measure in measures.items():
        for name, values in _interleaved({name: partial(measure, name) for name in calls}, repeats).items():
            found[name][kind] = median(values)
    return {name: Time(**times) for name, times in found.items()}


def _interleaved(measures: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """What each gives, measured in turns; the order alternates."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(repeats):
        for name in list(measures)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(measures[name]())
    return found


def host_seconds(
    calls: Mapping[str, Call], repeats: int = 7, seconds: float = 0.05, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The time until a call returns: medians of interleaved repeats."""

    def measure(call: Call) -> float:
        begin = clock()
        call()
        first = clock() - begin
        count = min(1000, int(seconds / max(1e-7, first)))
        if count < 2:
            return first
        begin = clock()
        for _ in range(count):
            call()
        return (clock() - begin) / count

    measures = {name: partial(measure, call) for name, call in calls.items()}
    return {name: median(times) for name, times in _interleaved(measures, repeats).items()}


def captured(call: Call) -> Call | None:
    """``call`` as a CUDA graph, whose replay has no host time in it; None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            call()
    except RuntimeError as error:
        say(f"  not a CUDA graph ({str(error).splitlines()[0]}): kernel times from the profiler")
        torch.cuda.synchronize()
        return None
    return graph.replay


def device_milliseconds(call: Call, seconds: float) -> float:
    """Of one call, with many in a row that take about ``seconds``."""

    def several(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    once = several(3)
    return several(max(3, min(300, int(seconds * 1e3 / max(1e-3, once)))))


def host_milliseconds(call: Call, count: int = 20) -> float:
    """Until a call returns. Few enough calls that the device's queue never fills, which would make the host wait."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    found = (time.perf_counter() - begin) / count * 1e3
    torch.cuda.synchronize()
    return found


def _profiled(call: Call, count: int = 5) -> float:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / count / 1e3


def peak_memory(call: Call, device: str) -> float:
    """By how many MiB a call raises the memory of tensors at its peak, its results included."""
    call()
    if device == "cpu":
        return _peak_on_cpu(call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    del kept
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


class _Live(TorchDispatchMode):
    """The memory of the tensors that are made inside, and its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                storage = leaf.untyped_storage()
                self.known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.known = {place: (ref, size) for place, (ref, size) in self.known.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.known.values()))
        return out


def _peak_on_cpu(call: Call) -> float:
    """After each op; what a kernel takes for itself while it runs is not seen."""
    with _Live() as live:
        call()
    return live.peak / MIB
