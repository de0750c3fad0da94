"""Strides of Fourier transforms: fake tensors tell others than those of the kernels.

On CPUs those of torch before 2.13 do; for CUDA they mistake the order of the dims, and some raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchhalo.torch_internals.calls import Op

aten = torch.ops.aten
_OPS = (aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default)
_TOLD_WRONGLY = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13) and torch.backends.mkl.is_available()


def with_kernel_strides(op: Op, args: Sequence[Any], out: Any) -> Any:
    """``out``, a fake tensor that ``op`` made of fake ones, with the strides that the kernel of ``op`` gives.

    The dims that are not transformed lie outermost, in the order of the input; then those that are: the kernel may sort them,
    but for the one that is halved, which comes last.
    """
    if not _TOLD_WRONGLY or op not in _OPS or out.device.type != "cpu":
        return out
    stride, dims = args[0].stride(), [dim % out.ndim for dim in args[1]]
    if op == aten._fft_c2r.default and len(dims) > 1:  # the other dims are transformed first
        stride = _strides(args[0].shape, stride, dims[:-1])
    if op == aten._fft_c2c.default:
        return out.as_strided(out.shape, _strides(out.shape, stride, dims))
    first = [] if op == aten._fft_c2r.default else dims[:-1]
    return out.as_strided(out.shape, _strides(out.shape, stride, first, dims[-1:]))


def _strides(shape: Sequence[int], stride: Sequence[int], dims: Sequence[int], last: Sequence[int] = ()) -> tuple[int, ...]:
    """Dense strides of a transform of a tensor with ``stride`` along ``dims``, which it sorts, and then ``last``."""

    def outermost_first(dims: Sequence[int]) -> list[int]:
        return sorted(dims, key=lambda dim: stride[dim], reverse=True)

    others = [dim for dim in range(len(shape)) if dim not in dims and dim not in last]
    found, step = [0] * len(shape), 1
    for dim in reversed([*outermost_first(others), *outermost_first(dims), *last]):
        found[dim], step = step, step * shape[dim]
    return tuple(found)


#: Dims that cuFFT transforms at once.
_AT_ONCE = 3


def cuda_strides(
    op: Op, input: Sequence[int], stride: tuple[int, ...], dims: Sequence[int], result: Sequence[int]
) -> tuple[int, ...]:
    """The strides of what CUDA's kernels make of a tensor of sizes ``input``; they transform up to three dims at once."""
    if op == aten._fft_c2c.default:
        return _by_steps(input, stride, dims)
    others, last = list(dims[:-1]), dims[-1:]
    at_once = len(dims) <= _AT_ONCE and tuple(dims[:2]) != (0, 1)
    if op == aten._fft_r2c.default:
        return _transformed(result, stride, dims) if at_once else _by_steps(result, _transformed(result, stride, last), others)
    if at_once or not others:  # of a contiguous copy
        return _transformed(result, tuple(range(len(input), 0, -1)), dims)
    return _transformed(result, _by_steps(input, stride, others), last)


def _by_steps(shape: Sequence[int], stride: tuple[int, ...], dims: Sequence[int]) -> tuple[int, ...]:
    """From complex to complex: the innermost dims first."""
    rest = list(dims)
    while rest:
        rest.sort(key=lambda dim: stride[dim], reverse=True)
        stride, rest = _transformed(shape, stride, rest[-_AT_ONCE:]), rest[:-_AT_ONCE]
    return stride


def _transformed(shape: Sequence[int], stride: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """Dense strides of ``shape``: dims that are not transformed outermost, as in the input, then ``dims`` in their order."""
    others = sorted((dim for dim in range(len(shape)) if dim not in dims), key=lambda dim: stride[dim], reverse=True)
    found, step = [0] * len(shape), 1
    for dim in reversed([*others, *dims]):
        found[dim], step = step, step * shape[dim]
    return tuple(found)
