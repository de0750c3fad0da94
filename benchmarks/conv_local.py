"""What sharding costs one rank: a convolution with its halos given, beside the plain one on the same shard.

This process is a middle rank, with a halo on both sides, whose exchanges end at once: the figures hold all that
torchhalo does on a rank, its launches and host time included, and nothing of the network. "concat" joins the halos to the
shard and then convolves, as is usual elsewhere. Backward is the gradients of input and weight, the halo of the gradient
given too.

gpu: time of the kernels alone, from the replay of a CUDA graph. wall: time per call with many calls in a row, in which
host time shows where it is the longer. host: until the call returns. MiB: peak memory above what was there before, results
included. Ratios are to plain.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torchhalo
from benchmarks import common
from benchmarks.common import Call, Column, Record, Row, key, middle_rank, peak_memory, ratio, say, timed


class Shape(NamedTuple):
    """What one rank holds; it is cut along its first spatial dim, which the stride divides."""

    channels: tuple[int, int]
    sizes: tuple[int, ...]
    kernel: int
    batch: int = 1
    stride: int = 1
    groups: int = 1

    def smaller(self, factor: int) -> Shape:
        """Of fewer rows and columns, but some."""
        return self._replace(sizes=tuple(max(16, size // factor) for size in self.sizes))


SHAPES = {
    "64ch": Shape((64, 64), (1024, 4096), 3),
    "128ch": Shape((128, 128), (512, 2048), 3),
    "512ch": Shape((512, 512), (128, 512), 3),
    "depthwise": Shape((256, 256), (128, 128), 7, batch=7, groups=256),
    "stem": Shape((3, 64), (1024, 1024), 7, stride=2),
    "3d": Shape((32, 32), (128, 128, 128), 3),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
#: Of the largest value; sums of some thousand products, which cuDNN rounds to TF32 or bf16.
TOLERANCE = {"bf16": 3e-2, "fp32": 1e-2}
WAYS = ("plain", "sharded", "concat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES), help="which shapes (default: all)")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES), help="which dtypes (default: both)")
    formats = ("NHWC", "NCHW")
    parser.add_argument("--format", choices=formats, nargs="+", default=formats, help="which memory formats (default: both)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where (default: cuda, if there is one)")
    parser.add_argument(
        "--smaller", type=int, metavar="N", help="divide rows and columns by it (default: 1 on cuda, 16 on cpu)"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements per figure (default: %(default)s)")


def run(arguments: argparse.Namespace, record: Record) -> None:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    factor = arguments.smaller or (64 if arguments.quick else 16 if device == "cpu" else 1)
    repeats, seconds = (1, 0.001) if arguments.quick else (arguments.repeats, 0.1)
    with middle_rank(device) as mesh, torchhalo.enable():
        for name in arguments.shape:
            shape = SHAPES[name].smaller(factor) if factor > 1 else SHAPES[name]
            for dtype in arguments.dtype:
                for format in arguments.format:
                    say(f"{describe(shape)} {dtype} {format}")
                    # One stream for all, as a graph is captured from the stream on which the forward ran.
                    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
                        for row in measure(shape, dtype, format, mesh, repeats, seconds):
                            record.add({"shape": describe(shape), "dtype": dtype, "format": format, **row})
                    gc.collect()
                    if device == "cuda":
                        torch.cuda.empty_cache()


def describe(shape: Shape) -> str:
    first, last = shape.channels
    channels = f"{first}ch" if first == last else f"{first}->{last}ch"
    sizes = "x".join(map(str, shape.sizes))
    marks = [f"k{shape.kernel}", *[f"s{shape.stride}"] * (shape.stride > 1), *["depthwise"] * (shape.groups > 1)]
    marks += [f"batch {shape.batch}"] * (shape.batch > 1)
    return " ".join([channels, sizes, *marks])


def measure(shape: Shape, dtype: str, format: str, mesh: DeviceMesh, repeats: int, seconds: float) -> list[Row]:
    """A row for forward and one for backward; the ways are measured in turns, after a look that they agree."""
    device = mesh.device_type
    passes = {way: make(shape, DTYPES[dtype], format, mesh) for way, make in MAKERS.items()}
    rows = []
    for step in ("forward", "backward"):
        calls = {way: calls[step] for way, calls in passes.items()}
        expected = calls["plain"]()
        for way in WAYS[1:]:
            agree(way, step, calls[way](), expected, TOLERANCE[dtype])
        del expected
        row: Row = {"pass": step}
        for way, found in timed(calls, device, repeats, seconds).items():
            row |= {f"{way} wall": found.wall, f"{way} gpu": found.device, f"{way} host": found.host}
        row |= {f"{way} memory": peak_memory(call, device) for way, call in calls.items()}
        rows.append(row)
    return rows


def agree(way: str, step: str, found: Any, expected: Any, tolerance: float) -> None:
    """With zeros in the halos all ways give what the plain one gives, which pads with zeros."""
    pairs = [(found, expected)] if isinstance(found, torch.Tensor) else zip(found, expected, strict=True)
    for ours, plain in pairs:
        ours = ours.to_local() if isinstance(ours, DTensor) else ours
        difference, most = (ours.detach().float() - plain.float()).abs().max().item(), plain.float().abs().max().item()
        if not difference <= tolerance * most:
            raise AssertionError(f"{way} {step}: differs from plain by {difference:.2g}, the largest value is {most:.2g}")


def operands(shape: Shape, dtype: torch.dtype, format: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Shard and weight, the same at every call."""
    ndim = len(shape.sizes)
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
    x = torch.randn(shape.batch, shape.channels[0], *shape.sizes, **options)
    w = torch.randn(shape.channels[1], shape.channels[0] // shape.groups, *[shape.kernel] * ndim, **options)
    layout = memory_format(format, ndim)
    return x.contiguous(memory_format=layout), w.contiguous(memory_format=layout)


def memory_format(format: str, ndim: int) -> torch.memory_format:
    return {2: torch.channels_last, 3: torch.channels_last_3d}[ndim] if format == "NHWC" else torch.contiguous_format


def convolution(shape: Shape, padding: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    kind = {2: F.conv2d, 3: F.conv3d}[len(shape.sizes)]
    return partial(kind, stride=shape.stride, padding=padding, groups=shape.groups)


def forward(op: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return op(x, w)


def plain(shape: Shape, dtype: torch.dtype, format: str, mesh: DeviceMesh) -> dict[str, Call]:
    x, w = (tensor.requires_grad_() for tensor in operands(shape, dtype, format, mesh.device_type))
    op = convolution(shape, (shape.kernel // 2,) * len(shape.sizes))
    y = op(x, w)
    backward = partial(torch.autograd.grad, y, (x, w), gradient(y), retain_graph=True)
    return {"forward": partial(forward, op, x, w), "backward": backward}


def sharded(shape: Shape, dtype: torch.dtype, format: str, mesh: DeviceMesh) -> dict[str, Call]:
    def whole(part: torch.Tensor) -> DTensor:
        size = torch.Size([*part.shape[:2], part.shape[2] * mesh.size(), *part.shape[3:]])
        stride = torch.empty(size, device="meta").contiguous(memory_format=memory_format(format, part.ndim - 2)).stride()
        return DTensor.from_local(part, mesh, [Shard(2)], run_check=False, shape=size, stride=stride)

    part, weight = operands(shape, dtype, format, mesh.device_type)
    x, w = whole(part).requires_grad_(), DTensor.from_local(weight, mesh, [Replicate()], run_check=False).requires_grad_()
    op = convolution(shape, (shape.kernel // 2,) * len(shape.sizes))
    y = op(x, w)
    backward = partial(torch.autograd.grad, y, (x, w), whole(gradient(y.to_local())), retain_graph=True)
    return {"forward": partial(forward, op, x, w), "backward": backward}


def concat(shape: Shape, dtype: torch.dtype, format: str, mesh: DeviceMesh) -> dict[str, Call]:
    x, w = (tensor.requires_grad_() for tensor in operands(shape, dtype, format, mesh.device_type))
    pad = shape.kernel // 2
    before, after = (torch.zeros_like(x[:, :, :rows]).requires_grad_() for rows in (pad, shape.kernel - shape.stride - pad))
    op = convolution(shape, (0, *[pad] * (len(shape.sizes) - 1)))

    def joined(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return op(torch.cat([before, x, after], 2), w)

    y = joined(x, w)
    grad, zeros = gradient(y), (before.detach(), after.detach())

    def backward() -> tuple[torch.Tensor, ...]:
        # What the other ranks would send back for their halos is added to the edges; here it is zeros.
        _, middle, _, weight = torch.autograd.grad(y, (before, x, after, w), grad, retain_graph=True)
        middle[:, :, : after.shape[2]].add_(zeros[1])
        middle[:, :, middle.shape[2] - before.shape[2] :].add_(zeros[0])
        return middle, weight

    return {"forward": partial(forward, joined, x, w), "backward": backward}


def gradient(y: torch.Tensor) -> torch.Tensor:
    """The same values whatever the memory format, which is that of ``y``."""
    generator = torch.Generator(y.device).manual_seed(1)
    return torch.empty_like(y).copy_(torch.randn(y.shape, dtype=y.dtype, device=y.device, generator=generator))


MAKERS = {"plain": plain, "sharded": sharded, "concat": concat}


def table(rows: list[Row]) -> str:
    columns = [key(name) for name in ("shape", "dtype", "format", "pass")]
    for kind, unit in (("gpu", "ms"), ("wall", "ms")):
        columns.append(key(f"plain {kind}", f"{kind} {unit}"))
        columns += [ratio(way, f"{way} {kind}", f"plain {kind}") for way in WAYS[1:]]
    columns += [
        Column(f"host us {way}", lambda row, way=way: row[f"{way} host"] and row[f"{way} host"] * 1e3, "{:.0f}") for way in WAYS
    ]
    columns.append(key("plain memory", "MiB", "{:.1f}"))
    columns += [ratio(way, f"{way} memory", "plain memory") for way in WAYS[1:]]
    return common.table(rows, columns)
