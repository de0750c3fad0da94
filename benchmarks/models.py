"""A step of a whole model on one rank of four, beside the plain model on the same shard.

This process is rank 1 of 4, alone: the shapes are those of its shard, and the whole input is four times as long along the
sharded dim. Nothing travels; each collective is one launch (see `benchmarks.still`). A step is forward, loss, backward and
optimizer (momentum SGD, foreach), or a decoder's forward; under bf16 autocast and channels-last on a GPU. Both sides are
measured in turns.

wall: many steps in a row. kernels: what the device is busy, summed over launches, from the profiler. host: until the call
returns; on a CPU, the time of one core that the shortest of ten steps takes, and launches are the ops that compute or copy.
memory: by how much a step raises the peak; of a graph, what capturing it raised; compiled, what stays reserved.
differs: by how much the gradients differ from the plain model's, relative, where zeros in the halo make them equal: of the
case of `--quick` in float64, on the device; and as measured.

ways: `eager`; `graph`, the whole step as one CUDA graph; `compiled`, by `torch.compile(mode="reduce-overhead")` on both sides.
`--profile MODEL` prints where the time of an eager step goes.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import gc
import io
import json
import pstats
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import torchhalo
from benchmarks import common
from benchmarks.common import MIB, Call, Column, Record, Row, key, ratio, say
from benchmarks.launches import count_launches
from benchmarks.model_cases import CASES, Case, loss_of
from benchmarks.still import still_line

WAYS = ("eager", "graph", "compiled")
#: Relative, of gradients in float64; ResNet-50's batch norms of few elements magnify rounding errors the most.
TOLERANCE = 1e-9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models", nargs="+", choices=CASES, default=list(CASES), metavar="MODEL", help=f"some of: {', '.join(CASES)}"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="(default: eager graph; on a CPU eager)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="(default: a GPU if there is one)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements per figure (default: %(default)s)")
    parser.add_argument(
        "--profile", choices=CASES, metavar="MODEL", help="print kernels and host functions of one model instead"
    )


class Side(NamedTuple):
    """One of the two that are compared: the model, its input and its optimizer."""

    case: Case
    model: nn.Module
    x: torch.Tensor
    optimizer: torch.optim.Optimizer | None

    def result(self, forward: Callable[..., torch.Tensor]) -> torch.Tensor:
        mixed = self.x.device.type == "cuda" and self.x.dtype == torch.float32
        with torch.autocast("cuda", torch.bfloat16) if mixed else nullcontext():
            return forward(self.model, self.x)

    def step(self, forward: Callable[..., torch.Tensor]) -> Call:
        """A function that runs one step and gives the loss or the result."""

        def decode() -> torch.Tensor:
            with torch.no_grad():
                return self.result(forward)

        def train() -> torch.Tensor:
            assert self.optimizer is not None
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.result(forward)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        return train if self.case.train else decode

    def forward(self) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
        """What `step` wants: from the model and its input to the loss, or to the result."""
        case = self.case
        return (lambda model, x: loss_of(case.forward(model, x))) if case.train else case.forward


def sides(case: Case, mesh: DeviceMesh, device: str, quick: bool, dtype: torch.dtype = torch.float32) -> dict[str, Side]:
    """Both of one case, with the same weights and the same shard."""
    options, shape = case.quick if quick else ({}, case.shard)
    torch.manual_seed(0)
    plain = case.make(**options).to(device, dtype).train(case.train)
    x = torch.randn(shape, device=device, dtype=dtype)
    if device == "cuda":
        format = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
        x = x.contiguous(memory_format=format)
        for parameter in plain.parameters():  # a video model has some of images too, which `plain.to` refuses
            if parameter.ndim == x.ndim:
                parameter.data = parameter.data.contiguous(memory_format=format)
    sharded = torchhalo.parallelize(copy.deepcopy(plain), mesh, dims=case.dim)
    shard = DTensor.from_local(x, mesh, [Shard(case.dim)], run_check=False)

    def side(model: nn.Module, x: torch.Tensor) -> Side:
        wanted = {"lr": 1e-3, "momentum": 0.9, "foreach": True}
        return Side(case, model, x, torch.optim.SGD(model.parameters(), **wanted) if case.train else None)

    return {"plain": side(plain, x), "sharded": side(sharded, shard)}


def run(arguments: argparse.Namespace, record: Record) -> None:
    device = arguments.device or ("cuda" if torch.cuda.is_available() and not arguments.quick else "cpu")
    ways = arguments.ways or (("eager", "graph") if device == "cuda" else ("eager",))
    # On a stream of its own throughout: that of a backward is the stream of the first forward, and the default one cannot be
    # captured.
    stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
    with still_line(device) as mesh, stream:
        if arguments.profile:
            for name, each in sides(CASES[arguments.profile], mesh, device, arguments.quick).items():
                profile(name, each.step(each.forward()), device)
            return
        for at, name in enumerate(arguments.models):
            failed = False
            for row in measured(CASES[name], ways, mesh, device, arguments):
                record.add(row)
                failed = failed or "error" in row
            rest = arguments.models[at + 1 :]
            if failed and rest and device == "cuda":
                for row in elsewhere(rest, ways, arguments.repeats, arguments.quick):
                    record.add(row)
                return


def elsewhere(models: list[str], ways: Sequence[str], repeats: int, quick: bool) -> list[Row]:
    """The rows of ``models`` from a fresh process: a failed capture may leave this one's allocator or device unusable."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks", "models", "--models", *models, "--ways", *ways, "--device", "cuda"]
        command += ["--repeats", str(repeats), "--output", str(output), *["--quick"] * quick]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        return json.loads(output.read_text())["rows"] if output.exists() else []


def measured(case: Case, ways: Sequence[str], mesh: DeviceMesh, device: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """The rows of one model; what fails is in them."""
    shape = case.quick[1] if arguments.quick else case.shard
    about: Row = {"model": case.title, "shard": "x".join(map(str, shape)) + f", dim {case.dim}"}
    about["step"] = "training" if case.train else "decode"
    say(f"{case.title}: {about['shard']}")
    try:
        if case.exact:
            about["differs"] = difference(sides(case, mesh, device, True, torch.float64))
        both = sides(case, mesh, device, arguments.quick)
        if case.exact:
            about["as measured"] = difference(both)
    except Exception as error:
        yield {**about, "error": told(error)}
        return
    for way in ways:
        begin = time.perf_counter()
        try:
            row = about | {"way": way} | figures(both, way, device, arguments)
        except Exception as error:
            row = about | {"way": way, "error": told(error)}
        if not row.get("differs", 0.0) < TOLERANCE:
            row["error"] = "; ".join(["not the numbers of plain", *([row["error"]] if "error" in row else [])])
        yield row | {"seconds": time.perf_counter() - begin}


def told(error: Exception) -> str:
    """The error, short enough for a cell; all of it on stderr."""
    say("".join(traceback.format_exception(error)[-12:]))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:100] if lines else ''}".replace("|", "/")


def difference(both: dict[str, Side]) -> float:
    """Of the gradients, if there are any, else of the results: relative, of all together."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, side in both.items():
        if side.case.train:
            side.result(side.forward()).backward()
            values = [parameter.grad for parameter in side.model.parameters() if parameter.grad is not None]
        else:
            with torch.no_grad():
                values = [side.result(side.forward())]
        found[name] = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    pairs = list(zip(*found.values(), strict=True))
    apart, size = (
        torch.stack(norms).norm() for norms in zip(*(((a - b).norm().float(), a.norm().float()) for a, b in pairs), strict=True)
    )
    return float(apart / size)


def figures(both: dict[str, Side], way: str, device: str, arguments: argparse.Namespace) -> Row:
    """Both sides in one way, in turns."""
    row: Row = {}
    calls: dict[str, Call] = {}
    errors = []
    torch._dynamo.reset()
    for name, side in both.items():
        try:
            calls[name], memory = ready(side, way, device)
            row[f"{name} memory"] = memory
        except Exception as error:
            errors.append(f"{name}: {told(error)}")
        if device == "cuda":
            torch.cuda.synchronize()
    seconds = 0.0 if arguments.quick else 0.3
    repeats = 1 if arguments.quick else arguments.repeats
    try:
        for kind, measure in measures(device, seconds).items():
            for name, values in turns(calls, measure, repeats if kind in ("wall", "host") else 1).items():
                row |= {f"{name} {part}": median(each[part] for each in values) for part in values[0]}
    except Exception as error:
        errors.append(told(error))
    return row | ({"error": "; ".join(errors)} if errors else {})


def turns(calls: dict[str, Call], measure: Callable[[Call], Row], repeats: int) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(measure(calls[name]))
    return found


def ready(side: Side, way: str, device: str) -> tuple[Call, float]:
    """A step in one way, warm, and its memory in MiB."""
    if way == "compiled":
        before = _reserved()
        inner = side.step(torch.compile(side.forward(), mode="reduce-overhead"))

        def compiled() -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return inner()

        _warm(compiled, device)
        return compiled, (_reserved() - before) / MIB
    call = side.step(side.forward())
    _warm(call, device)
    if side.optimizer is not None:
        side.optimizer.zero_grad(set_to_none=True)
    if way == "eager":
        return call, common.peak_memory(call, device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        kept = call()
    memory = (torch.cuda.max_memory_allocated() - before) / MIB

    def replay() -> torch.Tensor:
        graph.replay()
        return kept

    _warm(replay, device)
    return replay, memory


def _warm(call: Call, device: str) -> None:
    for _ in range(3 if device == "cuda" else 1):
        call()
    if device == "cuda":
        torch.cuda.synchronize()


def _reserved() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


# What is measured, in milliseconds.


def measures(device: str, seconds: float) -> dict[str, Callable[[Call], Row]]:
    """By name; each gives some of the figures of one side."""
    if device == "cpu":
        return {
            "wall": lambda call: {"wall": common.host_seconds({"": call}, 1, seconds)[""] * 1e3},
            "host": _processor,
            "launches": lambda call: {"launches": count_launches(call)},
        }
    return {
        "wall": lambda call: {"wall": common.device_milliseconds(call, seconds)},
        "host": lambda call: {"host": common.host_milliseconds(call, 1)},
        "kernels": _kernels,
    }


def _processor(call: Call, count: int = 10) -> Row:
    """The time of one core of a CPU that the shortest of some steps takes: others on the machine do not count."""
    threads, times = torch.get_num_threads(), []
    torch.set_num_threads(1)
    gc.disable()
    try:
        for _ in range(count):
            begin = time.process_time()
            call()
            times.append(time.process_time() - begin)
    finally:
        gc.enable()
        torch.set_num_threads(threads)
    return {"host": min(times) * 1e3}


def _profiled(call: Call, count: int) -> list[Any]:
    """What the device did in ``count`` calls, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    averages = found.key_averages()
    return [
        each
        for each in averages
        if each.device_type == torch.autograd.DeviceType.CUDA and not getattr(each, "is_user_annotation", False)
    ]


def _kernels(call: Call, count: int = 2) -> Row:
    found = _profiled(call, count)
    busy = sum(each.self_device_time_total for each in found) / count / 1e3
    return {"kernels": busy, "launches": sum(each.count for each in found) / count}


def profile(name: str, call: Call, device: str, kernels: int = 40, functions: int = 60) -> None:
    """Print the kernels and the host functions of one side that take the most time."""
    _warm(call, device)
    print(f"\n== {name} ==")
    if device == "cuda":
        count = 2
        found = sorted(_profiled(call, count), key=lambda each: -each.self_device_time_total)
        total = sum(each.self_device_time_total for each in found) / count / 1e3
        print(f"kernels: {total:.2f} ms, {sum(each.count for each in found) / count:.0f} launches a step")
        for each in found[:kernels]:
            print(f"{each.self_device_time_total / count / 1e3:9.3f} ms {each.count / count:7.1f}x  {each.key[:120]}")
    # A function's time is shown without what it calls, then with it.
    for order in ("tottime", "cumtime"):
        host, text = cProfile.Profile(), io.StringIO()
        host.runcall(call)
        pstats.Stats(host, stream=text).strip_dirs().sort_stats(order).print_stats(functions)
        print("\n".join(line for line in text.getvalue().splitlines() if line.strip()))
    if device == "cuda":
        torch.cuda.synchronize()


def table(rows: list[Row]) -> str:
    def against(part: str, form: str) -> Column:
        def value(row: Row) -> str | None:
            found = [row.get(f"{side} {part}") for side in ("sharded", "plain")]
            return None if None in found else " / ".join(form.format(each) for each in found)

        return Column(f"{part}, of plain", value)

    def both(part: str, unit: str, form: str) -> list[Column]:
        return [ratio(part, f"sharded {part}", f"plain {part}"), key(f"plain {part}", f"of {unit}", form)]

    return common.table(
        rows,
        [
            *(key(name) for name in ("model", "shard", "step", "way")),
            *both("wall", "ms", "{:.2f}"),
            *both("kernels", "ms", "{:.2f}"),
            against("launches", "{:.0f}"),
            against("host", "{:.2f}"),
            *both("memory", "MiB", "{:.0f}"),
            key("differs", form="{:.0e}"),
            key("as measured", form="{:.0e}"),
            key("error"),
        ],
    )
