"""Planning time and predicted traffic of a U-Net step, from 2 to 4,096 ranks, without processes.

Every rank holds a shard of the same size, whatever their number. The plans of all exchanges of a step, forward and
backward, are made for the rank in the middle of a line or of a grid of ranks, which sends most: how long that takes with
nothing in the caches, and with all there; how many exchanges there are, how many messages the rank sends in them, to how many
peers, and how many bytes. These are the plans by which torchhalo runs.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from math import prod

import torch

from benchmarks import common
from benchmarks.common import MIB, Column, Record, Row, key
from benchmarks.unet_model import Layer, Shape, UNet, layers
from torchhalo.exchange.layout import Layout
from torchhalo.exchange.plan import Exchange, exchange_between
from torchhalo.geometry import Mirror, Window

RANKS = [2**power for power in range(1, 13)]
SHAPES = {"2d": Shape(2, 512, 32, 4), "3d": Shape(3, 96, 32, 4)}  # of a shard
BYTES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, nargs="+", help="which (default: both)")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="how many (default: 2 to 4096)")


def run(arguments: argparse.Namespace, record: Record) -> None:
    counts = arguments.ranks or (RANKS[::5] if arguments.quick else RANKS)
    for name in arguments.model or SHAPES:
        shape = SHAPES[name]
        measure(shape, (3,))  # so that no row pays for what is loaded when it is first used
        for ranks in counts:
            for mesh in meshes(ranks):
                record.add({"shard": str(shape), "ranks": ranks, "mesh": "x".join(map(str, mesh)), **measure(shape, mesh)})


def meshes(ranks: int) -> list[tuple[int, ...]]:
    """A line, and the squarest grid if it is one."""
    side = max(n for n in range(1, int(ranks**0.5) + 1) if ranks % n == 0)
    return [(ranks,), (ranks // side, side)] if side > 1 else [(ranks,)]


def measure(shape: Shape, mesh: tuple[int, ...]) -> Row:
    sizes = [shape.size * mesh[axis] if axis < len(mesh) else shape.size for axis in range(shape.dims)]
    with torch.device("meta"):
        model = UNet(shape)
    found = layers(model, (1, 1, *sizes))
    middle = tuple(n // 2 for n in mesh)
    row: Row = {}
    for kind in ("first", "cached"):
        gc.collect()
        gc.disable()
        begin = time.process_time()
        needed = [exchange for layer in found for exchange in exchanges(layer, mesh) if exchange.needed()]
        plans = [exchange.plan(middle) for exchange in needed]
        row[f"{kind} ms"] = (time.process_time() - begin) * 1e3
        gc.enable()
    peers: set[int] = set()
    row |= {"exchanges": len(plans), "messages": 0, "sent": 0}
    for exchange, plan in zip(needed, plans, strict=True):
        to = [rank for rank, count in enumerate(plan.sent) if count]
        rest = prod(size for dim, size in enumerate(exchange.source.shape) if dim not in exchange.dims)
        peers.update(to)
        row["messages"] += len(to)
        row["sent"] += sum(plan.sent) * rest * BYTES
    return row | {"peers": len(peers)}


def exchanges(layer: Layer, mesh: tuple[int, ...]) -> Iterator[Exchange]:
    """Forward and backward; the gradient of a pool folds back what it received, which is as much."""
    window = Window(layer.kernel, layer.stride, layer.padding, layer.padding)
    there, back = (window.mirror, window) if layer.kind == "transposed" else (window, window.mirror)
    source, target = (cut(shape, mesh) for shape in (layer.input, layer.output))
    yield between(source, target, there)
    yield between(source, target, there) if layer.kind == "pool" else between(target, source, back)


def cut(shape: Sequence[int], mesh: tuple[int, ...]) -> Layout:
    """Axis ``i`` of the mesh cuts spatial dim ``i``."""
    cuts = [(dim - 2,) if 0 <= dim - 2 < len(mesh) else () for dim in range(len(shape))]
    return Layout(tuple(shape), mesh, tuple(cuts))


def between(source: Layout, target: Layout, window: Window | Mirror) -> Exchange:
    return exchange_between(source, target, dict.fromkeys(range(2, len(source.shape)), window))


def table(rows: list[Row]) -> str:
    def mib(row: Row) -> float:
        return row["sent"] / MIB

    whole = "{:.0f}"
    columns = [
        key("shard"),
        key("mesh"),
        key("ranks", form=whole),
        key("first ms", "plan ms", "{:.1f}"),
        key("cached ms", form="{:.2f}"),
        key("exchanges", form=whole),
        key("messages", form=whole),
        key("peers", form=whole),
        Column("sent MiB", mib, "{:.2f}"),
    ]
    return common.table(rows, columns)
