"""Normalize one rank's part, and the gradient of that.

Statistics and parameters have a shape that fits the input: ``[1, C, 1, 1]`` of a batch norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchhalo.torch_internals import tracing

aten = torch.ops.aten

#: Below how many elements a few simple ops take a CPU less time than a borrowed kernel and what is put together for it.
SMALL = 2**13


def affine(input: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor, in_place: bool) -> torch.Tensor:
    """``input * factor + shift``, perhaps in the memory of ``input``.

    With one factor per channel that is batch norm in evaluation, whose kernel took one core 9 ms in place, `addcmul` 15, for 16
    contiguous channels of 768x1536 in float32; in channels-last `addcmul` was the faster one.
    """
    channels = input.shape[1] if input.ndim > 2 else 0
    if (
        input.device.type == "cpu"
        and input.numel() >= SMALL
        and input.is_contiguous()
        and factor.numel() == shift.numel() == factor.shape[1] == channels
        and input.dtype == factor.dtype == shift.dtype
        and not tracing.is_traced(input)
    ):
        factor, shift = factor.view(-1), shift.view(-1)
        plain = torch.zeros_like(factor), torch.ones_like(factor)
        if not in_place:
            return aten.native_batch_norm(input, factor, shift, *plain, False, 0.0, 0.0)[0]
        out = {"out": input, "save_mean": input.new_empty(0), "save_invstd": input.new_empty(0)}
        return aten.native_batch_norm.out(input, factor, shift, *plain, False, 0.0, 0.0, **out)[0]
    return torch.addcmul(shift, input, factor, out=input if in_place else None)


def normalize_(
    rest: torch.Tensor, shift: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """``(rest + shift) * rstd * weight + bias``, in the memory of ``rest``, which holds deviations from a rank's own mean."""
    apart = weight is not None and any(a > 1 and b == 1 for a, b in zip(weight.shape, rstd.shape, strict=True))
    if weight is not None and not apart:
        rstd = rstd * weight
    shift = shift * rstd
    if bias is not None and not apart:
        shift = shift + bias
    rest = affine(rest, rstd, shift, in_place=True)
    if apart:  # along different dims: the product of both factors would be as large as the input
        assert weight is not None
        rest.mul_(weight)
        rest = rest if bias is None else rest.add_(bias)
    return rest


def input_gradient(
    grad: torch.Tensor,
    input: torch.Tensor,
    sums: torch.Tensor | Sequence[torch.Tensor],
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    scale: torch.Tensor,
    factor: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """The gradient of the input.

    Args:
        grad: Gradient of the output.
        sums: Over all that share a statistic: of the gradient, and of its product with the input's deviation from the mean.
        mean: None, if it is not taken out.
        rstd: One over the standard deviation.
        scale: What the gradient is multiplied by: ``rstd``, with the weight if there is one.
        factor: The same for the sums, which may have the weight already.
        count: How many share a statistic.
    """
    factor = factor / -count
    first, slope = sums[0] * factor, sums[1] * factor * rstd.square()
    shift = first if mean is None else torch.addcmul(first, slope, mean, value=-1)
    return affine(input, slope, shift, in_place=False).addcmul_(grad.to(scale.dtype), scale)


def per_channel(tensor: torch.Tensor, ndim: int) -> torch.Tensor:
    """A parameter of each channel in the shape of the input."""
    return tensor.view(1, -1, *[1] * (ndim - 2))
