"""Compile all Triton kernels for a GPU that need not be here: the interpreter accepts what the compiler does not.

Run as a script, with TRITON_INTERPRET=0, as Triton decides when it is imported whether it interprets. It calls what calls the
kernels, with tensors of the CPU, so that they are compiled for just the arguments that they are given; nothing is launched.
"""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import torch

from torchhalo.geometry import Box, Span, Window
from torchhalo.kernels import draws, edges, group_norm, random_numbers
from torchhalo.kernels.triton import launches

LAST, USUAL = torch.channels_last, torch.contiguous_format


class NoDriver:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def of_edges(transposed: bool, depthwise: bool, dtype: torch.dtype, format: torch.memory_format) -> None:
    """Both strips of a shard, forward and of the input's gradient, and the pairs across, in one sum and in several."""
    channels = (32, 1) if depthwise else (16, 32) if transposed else (32, 16)
    weight = torch.ones(*channels, 3, 3, dtype=dtype)
    source, target = channels if transposed and not depthwise else (32, 32) if depthwise else channels[::-1]
    windows = (Window(3, 1, 1, 1),) * 2
    x, y = (torch.ones(1, size, 8, 32, dtype=dtype).to(memory_format=format) for size in (source, target))
    own, ends = Span(8, 16), (Span(8, 9), Span(15, 16))
    bias = torch.ones(target, dtype=dtype)
    for out, given, mirrored, added in ((y, x, transposed, bias), (x, y, not transposed, None)):
        edge = edges.Edge(2, windows, mirrored, own, Span(7, 8), Span(16, 17), own, ends)
        halo = edges.Halo(given[:, :, :1], given[:, :, :1])
        edges.write_strips(out, given, halo, weight, added, edge)
    for batch in (1, 8):
        halo = edges.Halo(*(each.expand(batch, *each.shape[1:]) for each in halo))
        edges.add_pairs(weight, x.expand(batch, *x.shape[1:]), halo, edge)


def of_group_norm(dtype: torch.dtype, format: torch.memory_format, shares: Any) -> None:
    groups = group_norm.Groups(Span(0, 32), 4, 8)
    x = torch.ones(2, 32, 16, 32, dtype=dtype).to(memory_format=format)
    weight = bias = torch.ones(32)
    parts = torch.stack([group_norm.statistics(x, groups)] * 2)
    _, mean, rstd = group_norm.normalize(x, parts, shares, weight, bias, 1e-5, groups)
    sums = group_norm.products(x, x, mean, rstd, weight, groups)
    group_norm.input_gradient(x, x, mean, rstd, weight, sums, 512, groups)


def of_draws(dtype: torch.dtype, format: torch.memory_format) -> None:
    out = torch.ones(2, 16, 8, 32, dtype=dtype).to(memory_format=format)
    part = draws.Part(Box(tuple(Span(0, size) for size in out.shape)), tuple(out.shape), torch.tensor(7))
    draws.fill(out, random_numbers.bernoulli, part, 0.3)
    if dtype != torch.bool:
        draws.fill(out, random_numbers.uniform, part)
        draws.fill(out, random_numbers.normal, part, 1.1, 2.3)
        draws.dropout(out, 0.3, part, out.stride())


def compile_all() -> None:
    import triton

    run = triton.JITFunction.run

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **{**kwargs, "warmup": True})

    triton.runtime.driver.set_active(NoDriver())
    with mock.patch.object(triton.JITFunction, "run", compiled), mock.patch.object(launches, "_runner"):
        with mock.patch.object(draws, "usable", lambda tensor: True):
            for dtype, format in ((torch.bfloat16, LAST), (torch.float32, USUAL), (torch.float64, USUAL), (torch.bool, LAST)):
                of_draws(dtype, format)
        for (dtype, format), shares in product(
            ((torch.bfloat16, LAST), (torch.float32, USUAL), (torch.float64, LAST)), ((0.5, 0.5), ((0.5,) * 8,) * 2)
        ):
            of_group_norm(dtype, format, shares)
        for transposed, depthwise in product((False, True), (False, True)):
            for dtype, format in ((torch.bfloat16, LAST), (torch.float32, USUAL), (torch.float64, USUAL)):
                if depthwise or dtype != torch.float64:
                    of_edges(transposed, depthwise, dtype, format)


if __name__ == "__main__":
    compile_all()
