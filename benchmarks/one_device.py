"""A decoder and a training step on one device within a budget: plain, streamed, and, for the decoder, diffusers' tiles.

Each row runs by itself, so `--rows` can choose a few; a row that fails says why and the others go on. What plain rows found
stays in `--kept`, and the others are compared with it. `first s` is a first call, which plans and takes pinned memory; `plan s`
is its planning; `s` is a later call. `peak` is what the device's allocator counted, parameters included; `host` is the most
that waits on the host, `bus` what is loaded and saved.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import torchhalo
from benchmarks import common, one_device_smoke
from benchmarks.common import Record, Row, key
from benchmarks.model_cases import CASES, loss_of
from torchhalo.parallel.streaming import stream
from torchhalo.parallel.streaming.prepare import Prepared
from torchhalo.tools import picture

GIB = 2**30
#: Side of the error pictures.
PICTURE = 512


class Case(NamedTuple):
    """Decode an image, or take a training step on a volume, without the optimizer.

    Attributes:
        kind: "decode" or "train".
        size: Of a side of the image or volume.
        memory: A budget, or a word: "tiled", or "float32" for the same parameters in it, by which one sees what plain's own
            rounding comes to. Without one the model is as it is.
        shards: With a budget.
    """

    kind: str
    size: int
    memory: str | None = None
    shards: int | None = None

    @property
    def of(self) -> str:
        return f"{self.kind}-{self.size}"


ROWS: dict[str, Case] = {
    "decode-4096-plain": Case("decode", 4096),
    "decode-4096-float32": Case("decode", 4096, "float32"),
    "decode-4096-tiled": Case("decode", 4096, "tiled"),
    "decode-4096-7GiB": Case("decode", 4096, "7GiB", 16),
    "decode-8192-plain": Case("decode", 8192),
    "decode-8192-tiled": Case("decode", 8192, "tiled"),
    "decode-8192-24GiB": Case("decode", 8192, "24GiB", 16),
    "decode-8192-8GiB": Case("decode", 8192, "8GiB", 32),
    "train-256-plain": Case("train", 256),
    "train-256-8GiB": Case("train", 256, "8GiB", 8),
    "train-384-plain": Case("train", 384),
    "train-384-24GiB": Case("train", 384, "24GiB", 8),
    "train-512-80GiB": Case("train", 512, "80GiB", 16),
}
QUICK: dict[str, Case] = {
    "decode-128-plain": Case("decode", 128),
    "decode-128-tiled": Case("decode", 128, "tiled"),
    "decode-128-1MiB": Case("decode", 128, "1MiB", 4),
    "train-16-plain": Case("train", 16),
    "train-16-16MiB": Case("train", 16, "16MiB", 2),
}


class Bench:
    """What all rows share."""

    def __init__(self, arguments: argparse.Namespace):
        self.device, self.quick, self.kept = arguments.device, arguments.quick, arguments.kept
        self.repeats = arguments.repeats
        self.channels_last = arguments.channels_last
        # Of two dtypes at hand, the CPU's kernels make the wide one faster.
        self.dtype = torch.float32 if arguments.quick else torch.bfloat16
        self.kept.mkdir(parents=True, exist_ok=True)

    def measure(self, row: Case) -> Row:
        torch.manual_seed(0)
        work = self.decoding(row) if row.kind == "decode" else self.training(row)
        with watched_planning() as plans:
            seconds, peaks, found = [], [], None
            for _ in range(1 + self.repeats):
                del found
                gc.collect()
                self.settle()
                begin = time.perf_counter()
                found = work()
                self.wait()
                seconds.append(time.perf_counter() - begin)
                peaks.append(self.peak())
                common.say(f"  {seconds[-1]:.2f} s")
        assert found is not None
        once = seconds[0] - sum(planning for planning, _ in plans)
        result = {"first s": seconds[0], "s": min(seconds[1:], default=once), "peak": max(peaks) / GIB or None}
        return {**result, **planned(plans), **self.compared(row, found)}

    def decoding(self, row: Case) -> Callable[[], dict[str, torch.Tensor]]:
        options = CASES["autoencoder"].quick[0] if self.quick else {}
        vae: Any = CASES["autoencoder"].make(**options).eval().to(self.device, self.dtype)
        vae = vae.to(memory_format=torch.channels_last) if self.channels_last else vae
        scale = 2 ** (len(vae.config.block_out_channels) - 1)
        latent = torch.randn(1, 4, row.size // scale, row.size // scale).to(self.dtype)
        if row.memory == "tiled":
            vae.enable_tiling()
            vae.tile_sample_min_size = 32 if self.quick else 512  # as Stable Diffusion's configuration has it
            vae.tile_latent_min_size = vae.tile_sample_min_size // scale
        elif row.memory == "float32":
            vae, latent = vae.float(), latent.float()
        elif row.memory is not None:
            torchhalo.stream(vae, memory=row.memory, shards=row.shards, progress=False)

        @torch.no_grad()
        def work() -> dict[str, torch.Tensor]:
            given = latent if streamed(row) else latent.to(self.device)
            return {"image": vae.decode(given, return_dict=False)[0]}

        return work

    def training(self, row: Case) -> Callable[[], dict[str, torch.Tensor]]:
        case = CASES["segresnet"]
        net = WithLoss(case.make(**(case.quick[0] if self.quick else {}))).to(self.device)
        volume = torch.randn(1, 4, *[row.size] * 3)
        if streamed(row):
            torchhalo.stream(net, memory=row.memory, shards=row.shards, progress=False)

        def work() -> dict[str, torch.Tensor]:
            net.zero_grad()
            given = volume if streamed(row) else volume.to(self.device)
            # Not on a CPU, whose rounding in half types differs from run to run of the same kernels.
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
                loss = net(given)
            loss.backward()
            return {"loss": loss.detach(), **{name: p.grad for name, p in net.named_parameters() if p.grad is not None}}

        return work

    def compared(self, row: Case, found: dict[str, torch.Tensor]) -> Row:
        """Differences from what the plain row of the same kind has kept."""
        found = {name: value.cpu() for name, value in found.items()}
        path = self.kept / f"{row.of}.pt"
        if row.memory is None:
            torch.save(found, path)
            return {"largest": max(float(value.abs().max()) for value in found.values())}
        if not path.exists():
            return {"note": f"{row.of}-plain has not run"}
        expected = torch.load(path)
        if row.kind == "train":
            given, wanted = (
                torch.cat([x.double().flatten() for n, x in each.items() if n != "loss"]) for each in (found, expected)
            )
            loss = float((found["loss"] - expected["loss"]).abs() / expected["loss"].abs())
            return {"loss differs": loss, "gradient differs": float((given - wanted).norm() / wanted.norm())}
        error = differences(found["image"], expected["image"])
        largest = {"differs": float(error.max()), "largest": float(expected["image"].abs().max())}
        if row.memory == "float32":
            return largest
        torch.save(error, self.kept / f"{row.of}-{'tiled' if row.memory == 'tiled' else 'streamed'}.error.pt")
        return {**largest, "picture": draw(self.kept, row.of)}

    def settle(self) -> None:
        self.wait()
        if self.device != "cpu":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def peak(self) -> int:
        return 0 if self.device == "cpu" else torch.cuda.max_memory_allocated()


class WithLoss(nn.Module):
    """A network whose output stays where it is: of the call there is but a number."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return loss_of(self.net(x).float())


def streamed(row: Case) -> bool:
    return row.memory not in (None, "tiled", "float32")


class watched_planning:
    """The plans that are made inside, and their seconds."""

    def __enter__(self) -> list[tuple[float, Prepared]]:
        self._search, found = stream.search, []

        def search(*args: Any) -> Prepared:
            begin = time.perf_counter()
            prepared = self._search(*args)
            found.append((time.perf_counter() - begin, prepared))
            common.say(f"  planned in {found[-1][0]:.1f} s")
            return prepared

        stream.search = search
        return found

    def __exit__(self, *exc: object) -> None:
        stream.search = self._search


def planned(plans: list[tuple[float, Prepared]]) -> Row:
    if not plans:
        return {}
    ((seconds, prepared),) = plans
    schedule = prepared.schedule
    return {
        "shards": "x".join(map(str, prepared.shards)),
        "plan s": seconds,
        "planned peak": (schedule.peak + prepared.resident) / GIB,
        "bus": schedule.moved / GIB,
        "host": schedule.host / GIB,
        "estimated s": schedule.seconds,
        "computes again": prepared.programs is not prepared.traced,
    }


def differences(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest difference in each square of an image, in a few rows at a time."""
    height = found.shape[2]
    cell = max(1, height // PICTURE)
    rows = [
        torch.nn.functional.max_pool2d(
            (found[:, :, at : at + cell].float() - expected[:, :, at : at + cell].float()).abs(), cell
        )
        for at in range(0, height, cell)
    ]
    return torch.cat(rows, 2)[0].amax(0)


def draw(folder: Path, of: str) -> str | None:
    """The errors of tiles beside those of streaming, once both are known, on one scale."""
    paths = [folder / f"{of}-{way}.error.pt" for way in ("tiled", "streamed")]
    if not all(path.exists() for path in paths):
        return None
    tiled, ours = (torch.load(path) for path in paths)
    scale = float(tiled.max().clamp(min=1e-12))
    panels = [
        (f"TILES: OFF BY UP TO {tiled.max():.2f}", picture.heat(tiled / scale)),
        (f"TORCHHALO.STREAM: {ours.max():.4f}", picture.heat(ours / scale)),
    ]
    path = folder / f"{of}.png"
    picture.save(path, panels)
    return str(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ["smoke", *ROWS]
    parser.add_argument(
        "--rows", nargs="+", metavar="ROW", help=f"these alone: {', '.join(names)}; or the start of their names"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=1, help="calls after the first one (default: %(default)s)")
    parser.add_argument("--kept", type=Path, metavar="FOLDER", default=Path(__file__).parent / "results" / "one_device")
    parser.add_argument("--channels-last", action="store_true", help="decoders in that memory format")


def run(arguments: argparse.Namespace, record: Record) -> None:
    rows = QUICK if arguments.quick else ROWS
    wanted = tuple(arguments.rows or ["smoke", *rows])
    bench = Bench(arguments)
    calls: dict[str, Callable[[], Row]] = dict(one_device_smoke.cases(arguments.device))
    calls |= {name: partial(bench.measure, row) for name, row in rows.items()}
    for name, call in calls.items():
        if not name.startswith(wanted):
            continue
        common.say(name)
        try:
            found = call()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        record.add({"row": name, **found})
        bench.settle()


def table(rows: list[Row]) -> str:
    sizes = [key(name, f"{name}, GiB", "{:.2f}") for name in ("peak", "planned peak", "host", "bus")]
    numbers = [key(name, form="{:.1e}") for name in ("differs", "loss differs", "gradient differs")]
    times = [key(name, form="{:.2f}") for name in ("s", "first s", "plan s")]
    return common.table(
        rows, [key("row"), key("shards"), *times, *sizes, *numbers, key("largest", form="{:.2f}"), key("error")]
    )
