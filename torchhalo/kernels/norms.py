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


#: Where torch has the kernels of a batch norm whose statistics are merged: half a dozen launches each way.
FUSED = {"cuda"}


def fused(input: torch.Tensor) -> bool:
    """Whether the functions below serve ``input``; a compiler fuses simple ops itself. The same on every rank."""
    return input.device.type in FUSED and not tracing.is_traced(input)


def fused_statistics(input: torch.Tensor, dtype: torch.dtype, eps: float) -> torch.Tensor:
    """Of each channel of one rank's part the mean and one over the standard deviation, in ``dtype``: ``[2, C]``."""
    if not input.numel():  # counts for nothing, but must be a number
        return input.new_ones(2, input.shape[1], dtype=dtype)
    return torch.stack(torch.batch_norm_stats(input, eps))


def fused_batch_norm(
    input: torch.Tensor,
    parts: torch.Tensor,
    counts: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One rank's output, the mean of each channel, and one over its standard deviation.

    Args:
        parts: What all ranks made by `fused_statistics`.
        counts: How many elements of a channel each has, as `parts` in dtype; that of the first is not zero.
        running_mean, running_var: Are updated.
    """
    means, rstds = parts.unbind(1)
    if not means.shape[1]:
        return torch.empty_like(input), means[0], rstds[0]
    running = running_mean, running_var
    updated = [None if buffer is None else buffer.to(means.dtype) for buffer in running]  # the kernel takes no other dtype
    mean, rstd = torch.batch_norm_gather_stats_with_counts(input, means, rstds, *updated, momentum, eps, counts)
    for buffer, value in zip(running, updated, strict=True):
        if buffer is not None and value is not None and value is not buffer:
            buffer.copy_(value)
    if not input.numel():
        return torch.empty_like(input), mean, rstd
    return torch.batch_norm_elemt(input, weight, bias, mean, rstd, eps), mean, rstd


def fused_sums(grad: torch.Tensor, input: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Of each channel of one rank's part the sums of the gradient and of its product with the deviations: ``[2, C]``."""
    if not input.numel():
        return mean.new_zeros(2, len(mean))
    return torch.stack(torch.batch_norm_backward_reduce(grad, input, mean, rstd, None, True, False, False)[:2])


def fused_input_gradient(
    grad: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    sums: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """The gradient of one rank's part, from the ``sums`` of all; ``count`` is how many elements a channel has, an int32."""
    if not input.numel():
        return torch.empty_like(input)
    weight = None if weight is None else weight.to(mean.dtype)
    return torch.batch_norm_backward_elemt(grad, input, mean, rstd, weight, sums[0], sums[1], count)


def per_channel(tensor: torch.Tensor, ndim: int) -> torch.Tensor:
    """A parameter of each channel in the shape of the input."""
    return tensor.view(1, -1, *[1] * (ndim - 2))
