"""A rank's part of a draw, written where it belongs: on a GPU by one Triton kernel, elsewhere slice by slice by torch's ops.

Both give the same integers, so the same uniform numbers and the same choices, to the bit; normal ones differ by what the
devices' logarithms and cosines differ, a few units in the last place.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

import torch

from torchhalo.geometry import Box, Span
from torchhalo.kernels import random_numbers, triton
from torchhalo.kernels.triton.launches import launch
from torchhalo.torch_internals import tracing
from torchhalo.torch_internals.constants import constant

# Elements that torch's ops draw at a time: the integers in between take 24 bytes for each of them. A CPU is fastest where these
# fit in its cache; an H200 took 136, 25, 6.4 and 5.8 ms for 67 million numbers with slices of 2**18, 2**20, 2**22 and 2**24.
SLICE = {"cpu": 1 << 18, "other": 1 << 22}
#: How many elements a program of the kernels draws.
BLOCK = 1024

Draw = Callable[..., torch.Tensor]

_KINDS: dict[Draw, str] = {
    random_numbers.bernoulli: "bernoulli",
    random_numbers.uniform: "uniform",
    random_numbers.normal: "normal",
}
DTYPES = {torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64}


class Part(NamedTuple):
    """What is drawn: ``box`` of a tensor of ``shape``, from one seed."""

    box: Box
    shape: tuple[int, ...]
    seed: torch.Tensor


def fill(out: torch.Tensor, draw: Draw, part: Part, *parameters: Any) -> None:
    """Write a part of a draw into ``out``, which has the shape of the box.

    Args:
        draw: One of `random_numbers`.
        parameters: What ``draw`` takes after the dtype: numbers, or tensors of the shape of the box.

    Example:
        The lower half of a matrix::

            fill(out, random_numbers.uniform, Part(Box((Span(2, 4), Span(0, 8))), (4, 8), torch.tensor(7)))
    """
    if not (draw in _KINDS and _writable(out) and not any(isinstance(each, torch.Tensor) for each in parameters)):
        _fill_in_slices(out, draw, part, parameters)
    elif out.numel():
        kind, threshold, numbers = _KINDS[draw], 0, parameters or (0.0, 1.0)
        if kind == "bernoulli":
            threshold, numbers = round(parameters[0] * (1 << 53)), (0.0, 1.0)
        elif kind == "uniform":
            numbers = numbers[0], numbers[1] - numbers[0]
        digits = random_numbers.digits_of(out.dtype)
        _launch("draw", (out,), part, threshold, *map(_bits, numbers), options=(kind, digits))


def dropout(input: torch.Tensor, p: float, part: Part, strides: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What dropout leaves of ``input``, scaled, and which elements it keeps.

    Args:
        strides: Those of both results, where a kernel gives them.

    Example:
        Of a whole matrix::

            out, kept = dropout(x, 0.5, Part(Box((Span(0, 4), Span(0, 8))), (4, 8), torch.tensor(7)), (8, 1))
    """
    scale = 0.0 if p == 1 else 1 / (1 - p)
    kept = input.new_empty_strided(part.box.shape, strides, dtype=torch.bool)
    if not (_writable(kept) and input.dtype in DTYPES - {torch.bool} and not input.is_neg()):
        fill(kept, random_numbers.bernoulli, part, 1 - p)
        return input * kept * scale, kept
    out = torch.empty_like(kept, dtype=input.dtype)
    if out.numel():
        _launch("dropout", (kept, out, input), part, round((1 - p) * (1 << 53)), _bits(scale))
    return out, kept


def _fill_in_slices(out: torch.Tensor, draw: Draw, part: Part, parameters: Sequence[Any]) -> None:
    seed = part.seed.to(out.device, non_blocking=True)
    for box in _slices(part.box, SLICE.get(out.device.type, SLICE["other"])):
        cut = box.within(part.box)
        along = [other.expand(out.shape)[cut] if isinstance(other, torch.Tensor) else other for other in parameters]
        out[cut].copy_(draw(random_numbers.bits_of(box, part.shape, seed), out.dtype, *along))


def _slices(box: Box, most: int) -> Iterator[Box]:
    """``box`` in parts of ``most`` elements or less; whole under torch.compile, which fuses what comes between."""
    if box.size <= most or tracing.is_tracing():
        yield box
        return
    dim = max(range(len(box.spans)), key=lambda dim: box.spans[dim].size)
    span = box.spans[dim]
    step = max(1, most * span.size // box.size)
    for start in range(span.start, span.stop, step):
        some = Span(start, min(start + step, span.stop))
        yield from _slices(Box((*box.spans[:dim], some, *box.spans[dim + 1 :])), most)


def usable(tensor: torch.Tensor) -> bool:
    """Whether the kernels here can run on a tensor."""
    return tensor.is_cuda and tracing.is_plain(tensor) and triton.compiles()


def _writable(out: torch.Tensor) -> bool:
    """Whether a kernel can write to ``out``; of elements that share memory, torch's ops complain."""
    return out.dtype in DTYPES and usable(out) and 0 not in out.stride() and not out.is_neg()


def _launch(kernel: str, tensors: Sequence[torch.Tensor], part: Part, *parameters: int, options: tuple[Any, ...] = ()) -> None:
    out = tensors[0]
    start, sizes, steps, strides = _walk(part.box, part.shape, tuple(tensor.stride() for tensor in tensors))
    cols = min(BLOCK, 1 << (sizes[-1] - 1).bit_length())
    rows, count = BLOCK // cols, prod(sizes[:-1])
    # One kernel for both: a CUDA graph, whose seeds are the device's, could not load another while it records.
    seed, drawn = (0, part.seed.to(out.device)) if part.seed.is_cuda else (int(part.seed), constant(0, out, torch.int64))
    along = strides if len(tensors) > 1 else strides[0]
    launch(
        getattr(_kernels(), kernel),
        (-(-count // rows) * -(-sizes[-1] // cols),),
        (*tensors, drawn),
        (start, count, sizes, steps, along, *options, len(sizes), rows, cols, out.numel() >= 2**31),
        (seed, *parameters),
        enable_fp_fusion=False,  # a product and a sum are rounded one after the other, as on a CPU
    )


@lru_cache(maxsize=1024)
def _walk(box: Box, shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...]) -> tuple[Any, ...]:
    """How to walk through a box in the order of memory, by as few dims as possible.

    Returns:
        Where in the whole tensor the first element is; for each dim its size and its step in the whole tensor; and for each
        tensor its strides.
    """
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(span.start * step for span, step in zip(box.spans, steps, strict=True))
    dims: list[tuple[int, ...]] = []
    for size, *along in sorted(zip(box.shape, steps, *strides, strict=True), key=lambda dim: -dim[2]):
        if dims and all(outer == inner * size for outer, inner in zip(dims[-1][1:], along, strict=True)):
            dims[-1] = dims[-1][0] * size, *along
        elif size > 1:
            dims.append((size, *along))
    sizes, along_whole, *along_each = zip(*(dims or [(1, *[0] * (1 + len(strides)))]), strict=True)
    return start, sizes, along_whole, tuple(along_each)


def _bits(number: float) -> int:
    """Of a double; a launch would round the number to single precision."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


@lru_cache(maxsize=1)
def _kernels() -> Any:
    return import_module("torchhalo.kernels.triton.draws")
