"""Host time of one op on tiny tensors: plain torch, stock DTensor and torchhalo.

The tensors are so small that kernels take no time to speak of, and this process is a middle rank whose exchanges end at
once: what is left is the Python and C++ around them. Stock DTensor runs on a process group that moves nothing, but where it
communicates the call itself still takes time; the last column says where it does, where it raises, and where its result is
wrong: missing, or not of the shape that its placements give it. "conv-batch" is sharded along the batch, where nothing
travels. The clock is that of the thread, which stands still while others run.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import torchhalo
from benchmarks import common
from benchmarks.common import Call, Column, Record, Row, host_seconds, key, middle_rank, say
from torchhalo.exchange.layout import layout

CHANNELS, SIZE = 4, 8  # of a shard; a square


class Tensors(NamedTuple):
    """What an op is given: plain tensors of the size of a shard, or DTensors."""

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor
    grad: torch.Tensor


def conv(t: Tensors) -> torch.Tensor:
    return F.conv2d(t.x, t.weight, t.scale, padding=1)


def batch_norm(t: Tensors) -> torch.Tensor:
    return F.batch_norm(t.x, None, None, t.scale, t.scale, training=True)


FORWARD: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "conv": conv,
    "max_pool": lambda t: F.max_pool2d(t.x, 3, stride=2, padding=1),
    "batch_norm": batch_norm,
    "group_norm": lambda t: F.group_norm(t.x, 2, t.scale, t.scale),
    "interpolate": lambda t: F.interpolate(t.x, scale_factor=2, mode="bilinear"),
    "slice": lambda t: t.x[..., 1:-1],
    "cat": lambda t: torch.cat([t.x, t.x], 1),
    "add": lambda t: t.x + t.x,
    "relu": lambda t: t.x.relu(),
    "view": lambda t: t.x.view(1, 2, CHANNELS // 2, *t.x.shape[2:]),
    "permute": lambda t: t.x.permute(0, 2, 3, 1),
}
BOTH = {"conv": conv, "batch_norm": batch_norm}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", nargs="+", metavar="OP", help=f"some of: {', '.join(cases())} (default: all)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="measurements per figure (default: %(default)s)")


def cases() -> dict[str, tuple[Callable[[Tensors], torch.Tensor], int, bool]]:
    """By name: the function, the dim that is sharded, and whether its gradients are taken too."""
    found = {name: (function, 3, False) for name, function in FORWARD.items()}
    found |= {f"{name}+backward": (function, 3, True) for name, function in BOTH.items()}
    return found | {"conv-batch": (conv, 0, False), "conv-batch+backward": (conv, 0, True)}


def run(arguments: argparse.Namespace, record: Record) -> None:
    chosen = cases()
    unknown = sorted(set(arguments.op or ()) - set(chosen))
    if unknown:
        raise SystemExit(f"overhead: no op {', '.join(unknown)}; there are {', '.join(chosen)}")
    repeats, seconds = (1, 0.001) if arguments.quick else (arguments.repeats, 0.05)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a kernel of a few elements gains nothing by waking others
    try:
        with middle_rank("cpu") as mesh:
            for name in arguments.op or chosen:
                say(name)
                record.add({"op": name, **measure(*chosen[name], mesh, repeats, seconds)})
    finally:
        torch.set_num_threads(threads)


def measure(
    function: Callable[[Tensors], torch.Tensor], dim: int, backward: bool, mesh: DeviceMesh, repeats: int, seconds: float
) -> Row:
    """Microseconds per call in each of the three ways, and what stock DTensor does beside computing."""
    row: Row = {}
    calls: dict[str, Call] = {"plain": call_of(function, tensors(), backward)}
    with torchhalo.enable():
        calls["torchhalo"] = call_of(function, tensors(mesh, dim), backward)
    try:
        calls["stock"] = call_of(function, tensors(mesh, dim), backward)
        row["stock does"] = habits(calls["stock"], calls["plain"])
    except Exception as error:
        calls.pop("stock", None)
        row["stock does"] = f"raises {type(error).__name__}"
    found: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(repeats):
        for way, call in calls.items():
            with torchhalo.enable() if way == "torchhalo" else nullcontext(), warnings.catch_warnings(action="ignore"):
                for _ in range(3):
                    call()
                found[way] += host_seconds({way: call}, 1, seconds, time.thread_time).values()
    return row | {way: median(times) * 1e6 for way, times in found.items()}


def tensors(mesh: DeviceMesh | None = None, dim: int = 0) -> Tensors:
    """Plain ones, or, with a mesh, DTensors of which this process holds as much as the plain ones have."""

    def made(shape: tuple[int, ...], placement: Placement) -> torch.Tensor:
        tensor = torch.randn(shape)
        return tensor if mesh is None else DTensor.from_local(tensor, mesh, [placement], run_check=False)

    image = (1, CHANNELS, SIZE, SIZE)
    x, grad = made(image, Shard(dim)), made(image, Shard(dim))
    weight, scale = made((CHANNELS, CHANNELS, 3, 3), Replicate()), made((CHANNELS,), Replicate())
    return Tensors(x.requires_grad_(), weight.requires_grad_(), scale.requires_grad_(), grad)


def call_of(function: Callable[[Tensors], torch.Tensor], given: Tensors, backward: bool) -> Call:
    """Calls ``function`` without a graph, or with one that is gone through."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return function(given)

    def both() -> tuple[torch.Tensor, ...]:
        y = function(given)
        wanted = (given.x, given.weight, given.scale)
        return torch.autograd.grad(y, wanted, given.grad, allow_unused=True)

    return both if backward else forward


class _Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name.split("::")[1]
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor") and "wait" not in name and "wrap" not in name:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def habits(call: Call, plain: Call) -> str:
    """The collectives that a call runs, and whether something that the plain call returns is missing or misshapen, to read."""
    with warnings.catch_warnings(action="ignore"):
        call()
        with _Collectives() as mode:
            found = call()
        pairs = zip(*(out if isinstance(out, tuple) else (out,) for out in (found, plain())), strict=True)
    wrong = any(expected is not None and not fits(tensor) for tensor, expected in pairs)
    return ", ".join([f"{count} {name}" for name, count in mode.seen.items()] + ["wrong result"] * wrong)


def fits(tensor: torch.Tensor | None) -> bool:
    """Whether this rank holds a shard of the shape that the placements give it."""
    if not isinstance(tensor, DTensor):
        return False
    owned = layout(tensor.shape, tensor.device_mesh, tensor.placements).owned(tensor.device_mesh.get_coordinate() or ())
    return tuple(tensor.to_local().shape) == owned.shape


def table(rows: list[Row]) -> str:
    def added(under: str) -> Callable[[Row], Any]:
        return lambda row: row["torchhalo"] - row[under] if under in row else None

    return common.table(
        rows,
        [
            key("op"),
            *(key(way, f"{way} us", "{:.0f}") for way in ("plain", "stock", "torchhalo")),
            Column("over stock", added("stock"), "{:+.0f}"),
            Column("over plain", added("plain"), "{:+.0f}"),
            key("stock does"),
        ],
    )
