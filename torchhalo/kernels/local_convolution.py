"""A convolution of plain tensors, and its gradients: torch's own kernels, but never the slow nor the wrong ones.

Of a volume on a CPU torch takes oneDNN's kernels only if batch, channels and the first two spatial sizes multiply to more than
20,480, and shards come below that sooner than the whole. What it takes there took 3 to 6 times as long on one core of a Xeon,
forward and backward, for 3x3x3 kernels, 16 to 128 channels and 0.1 to 0.7 million elements.

To an output one element wide, with a stride and in bfloat16, what torch 2.11 takes on CPUs with AMX gives garbage. So does
plain torch, but shards are that thin where the whole is not. That is computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from torchhalo.torch_internals import tracing

aten = torch.ops.aten

#: Up to which product torch takes its own kernel.
SMALL = 20480
#: From how many channels, and elements per step of the stride, on oneDNN's is the faster one: of 81 such random convolutions in
#: all forward and all but 11 backward. With one or three channels, or fewer elements, its backward takes longer.
CHANNELS, ENOUGH = 8, 8192


def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Sequence[Any]) -> torch.Tensor:
    """As ``aten.convolution``, whose other arguments are ``call``.

    >>> ones = torch.ones(1, 2, 4, 4, 4)
    >>> forward(ones, torch.ones(1, 2, 3, 3, 3), None, ([1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1)).unique()
    tensor([54.])
    """
    if _thin(input, weight, call):
        return forward(input.float(), weight.float(), None if bias is None else bias.float(), call).to(input.dtype)
    if _slow(input, weight, call):
        stride, padding, dilation, _, _, groups = call
        # `aten.convolution` would make these dense; oneDNN reads beyond the end of a bias that is sliced or expanded.
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        return aten.mkldnn_convolution(input, weight, bias, padding, stride, dilation, groups)
    return aten.convolution(input, weight, bias, *call)


def backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: Sequence[int] | None,
    call: Sequence[Any],
    mask: list[bool],
) -> list[torch.Tensor]:
    """As ``aten.convolution_backward``; ``bias`` is the sizes of the bias, and gradients that ``mask`` leaves out are None."""
    if _thin(input, weight, call):
        wide = backward(grad.float(), input.float(), weight.float(), bias, call, mask)
        return [each if each is None else each.to(input.dtype) for each in wide]
    if _slow(input, weight, call):
        grad, input = grad.to_mkldnn(), input.to_mkldnn()
    found = aten.convolution_backward(grad, input, weight, bias, *call, mask)
    return [each.to_dense() if each is not None and each.is_mkldnn else each for each in found]


def _thin(input: torch.Tensor, weight: torch.Tensor, call: Sequence[Any]) -> bool:
    """Whether torch's kernel may read beyond its tensors."""
    if input.device.type != "cpu" or input.dtype not in (torch.bfloat16, torch.float16):
        return False
    stride, padding, dilation, transposed, _, _ = call
    sizes = zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return any(s > 1 and (size == 1 if transposed else size + 2 * p < d * (k - 1) + 1 + s) for size, k, s, p, d in sizes)


def _slow(input: torch.Tensor, weight: torch.Tensor, call: Sequence[Any]) -> bool:
    """Whether torch would take its own kernel and oneDNN's is faster."""
    *_, transposed, _, groups = call
    return bool(
        input.ndim == 5
        and input.device.type == "cpu"
        and input.dtype == torch.float32
        and input.shape[0] == groups == 1
        and not transposed
        and input.shape[1] >= CHANNELS
        and input.numel() >= ENOUGH * prod(call[0])
        and prod(input.shape[:4]) <= SMALL
        and min(weight.shape[3:]) <= 3 < prod(weight.shape[2:])
        and tracing.is_plain(input)
        and tracing.no_dispatch_modes()
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )
