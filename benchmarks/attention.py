"""What attention over sharded tokens costs one rank: keys and values in a ring, or gathered, beside a plain attention.

This process is rank 1 of a line of 4, whose collectives end at once: what it would receive is a copy of what it sends. So the
figures hold all that torchhalo does on a rank, and nothing of the network. Plain is the attention of the rank's queries, a
quarter, over all keys and values, which it holds; its backward gives the gradients of all of them.

gpu: time of the kernels alone. wall: time per call with many calls in a row. MiB: peak memory above what was there before,
results included; plain's excludes the keys and values of the others. Ratios are to plain.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchhalo
from benchmarks import common
from benchmarks.common import Call, Record, Row, key, peak_memory, ratio, say, timed
from benchmarks.still import Still, still_line
from torchhalo.ops import attention_work

RANKS = 4
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
#: From how many bytes on keys travel in a ring.
WAYS = {"ring": -1, "gathered": 1 << 62}
PASSES = ("forward", "backward")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, metavar="N", help="of the whole image (default: 65536 on cuda, 4096 on cpu)")
    parser.add_argument("--heads", type=int, default=8, metavar="N", help="of each token (default: %(default)s)")
    parser.add_argument("--size", type=int, default=64, metavar="N", help="of each head (default: %(default)s)")
    parser.add_argument("--kernel", choices=KERNELS, nargs="+", help="torch's (default: all on cuda, flash on cpu)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where (default: cuda, if there is one)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements per figure (default: %(default)s)")


def run(arguments: argparse.Namespace, record: Record) -> None:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokens = arguments.tokens or (256 if arguments.quick else 65536 if device == "cuda" else 4096)
    repeats, seconds = (1, 0.001) if arguments.quick else (arguments.repeats, 0.1)
    with still_line(device, RANKS) as mesh, torchhalo.enable(), mock.patch.object(Still, "alltoall_base", _copied):
        for kernel in arguments.kernel or (KERNELS if device == "cuda" else ["flash"]):
            say(f"{tokens} tokens, {kernel}")
            with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext(), sdpa_kernel(KERNELS[kernel]):
                for row in measure((1, arguments.heads, tokens, arguments.size), mesh, repeats, seconds):
                    shape = f"{tokens} tokens, {arguments.heads}x{arguments.size}"
                    record.add({"shape": shape, "kernel": kernel, **row})
            gc.collect()


def _copied(self: Still, output: torch.Tensor, input: torch.Tensor, *rest: Any) -> object:
    """Blocks of other ranks with the values of what is sent: zeros would draw less power, and change the clock."""
    flat, given = output.view(-1), input.reshape(-1)
    common_size = min(flat.numel(), given.numel())
    flat[common_size:].zero_()
    flat[:common_size].copy_(given[:common_size])
    return self._done


def measure(shape: tuple[int, ...], mesh: DeviceMesh, repeats: int, seconds: float) -> list[Row]:
    """A row for forward and one for backward; the ways are measured in turns, after a look that they agree."""
    ways = {"plain": plain(shape, mesh), **{way: sharded(shape, mesh, limit) for way, limit in WAYS.items()}}
    rows = []
    for step in PASSES:
        calls = {way: calls[step] for way, calls in ways.items()}
        agree(step, calls)
        row: Row = {"pass": step}
        for way, found in timed(calls, mesh.device_type, repeats, seconds).items():
            row |= {f"{way} wall": found.wall, f"{way} gpu": found.device, f"{way} host": found.host}
        rows.append(row | {f"{way} memory": peak_memory(call, mesh.device_type) for way, call in calls.items()})
    return rows


def agree(step: str, calls: dict[str, Call]) -> None:
    """All ranks hold the same keys here, so that the output and the gradient of the queries are those of plain attention."""
    expected, *others = (call() if step == "forward" else call()[0] for call in calls.values())
    for way, found in zip(WAYS, others, strict=True):
        difference = (found.to_local().float() - expected.float()).abs().max().item()
        if not difference <= 3e-2 * expected.float().abs().max().item():
            raise AssertionError(f"{way} {step}: differs from plain by {difference:.2g}")


def operands(shape: tuple[int, ...], device: str) -> list[torch.Tensor]:
    """A rank's queries, keys, values, and the gradient of its output, the same at every call."""
    generator = torch.Generator(device).manual_seed(0)
    batch, heads, tokens, size = shape
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "generator": generator}
    return [torch.randn(batch, heads, tokens // RANKS, size, **options) for _ in range(4)]


def passes(call: Callable[..., torch.Tensor], tensors: list[torch.Tensor], grad: torch.Tensor) -> dict[str, Call]:
    def forward() -> torch.Tensor:
        with torch.no_grad():
            return call(*tensors)

    for tensor in tensors:
        tensor.requires_grad_()
    y = call(*tensors)
    return {"forward": forward, "backward": partial(torch.autograd.grad, y, tensors, grad, retain_graph=True)}


def plain(shape: tuple[int, ...], mesh: DeviceMesh) -> dict[str, Call]:
    query, *pair, grad = operands(shape, mesh.device_type)
    return passes(F.scaled_dot_product_attention, [query, *(t.repeat(1, 1, RANKS, 1) for t in pair)], grad)


def sharded(shape: tuple[int, ...], mesh: DeviceMesh, limit: int) -> dict[str, Call]:
    stride = torch.empty(shape, device="meta").stride()
    *tensors, grad = (
        DTensor.from_local(t, mesh, [Shard(2)], run_check=False, shape=torch.Size(shape), stride=stride)
        for t in operands(shape, mesh.device_type)
    )

    def limited(call: Call) -> Call:
        def inside() -> Any:
            with mock.patch.object(attention_work, "RING_BYTES", limit):
                return call()

        return inside

    with mock.patch.object(attention_work, "RING_BYTES", limit):
        calls = passes(F.scaled_dot_product_attention, tensors, grad)
    return {step: limited(call) for step, call in calls.items()}


def table(rows: list[Row]) -> str:
    columns = [key(name) for name in ("shape", "kernel", "pass")]
    for kind in ("gpu", "wall"):
        columns.append(key(f"plain {kind}", f"{kind} ms"))
        columns += [ratio(way, f"{way} {kind}", f"plain {kind}") for way in WAYS]
    columns.append(key("plain memory", "plain MiB", "{:.1f}"))
    columns += [key(f"{way} memory", f"{way} MiB", "{:.1f}") for way in WAYS]
    return common.table(rows, columns)
