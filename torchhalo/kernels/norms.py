"""Normalize one rank's part, and the gradient of that.

Statistics and parameters have a shape that fits the input: ``[1, C, 1, 1]`` of a batch norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchhalo.geometry import Span
from torchhalo.kernels import group_norm
from torchhalo.kernels.group_norm import Groups
from torchhalo.torch_internals import tracing
from torchhalo.torch_internals.constants import constant

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

#: From how many elements on those of group norm are taken, which read memory faster, and take the host longer to launch.
LARGE = 2**24


def fused(input: torch.Tensor) -> bool:
    """Whether the functions below serve ``input``; a compiler fuses simple ops itself. The same on every rank."""
    return input.device.type in FUSED and not tracing.is_traced(input)


def fused_statistics(input: torch.Tensor, dtype: torch.dtype, eps: float) -> torch.Tensor:
    """Of each channel of one rank's part the mean and one over the standard deviation, in ``dtype``: ``[2, C]``."""
    if not input.numel():  # counts for nothing, but must be a number
        return input.new_ones(2, input.shape[1], dtype=dtype)
    if _walked(input):
        parts = group_norm.statistics(_sample(input, input), _channels(input))
        return group_norm.merged(parts.unsqueeze(0), (1.0,), eps, dtype)[:2].flatten(1)
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
    # The kernel takes no other dtype.
    wide_mean, wide_var = (None if each is None else each.to(means.dtype) for each in (running_mean, running_var))
    # Of its first argument the kernel takes the dtype of the counts alone, of which half types have too few digits.
    mean, rstd = torch.batch_norm_gather_stats_with_counts(means, means, rstds, wide_mean, wide_var, momentum, eps, counts)
    for buffer, value in ((running_mean, wide_mean), (running_var, wide_var)):
        if buffer is not None and value is not None and value is not buffer:
            buffer.copy_(value)
    if not input.numel():
        return torch.empty_like(input), mean, rstd
    if _walked(input):
        out = group_norm.applied(_sample(input, input), mean, rstd, None, weight, bias, _channels(input))
        return out.as_strided(input.shape, input.stride()), mean, rstd
    return torch.batch_norm_elemt(input, weight, bias, mean, rstd, eps), mean, rstd


def fused_sums(grad: torch.Tensor, input: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Of each channel of one rank's part the sums of the gradient and of its product with the deviations: ``[2, C]``."""
    if not input.numel():
        return mean.new_zeros(2, len(mean))
    if _walked(input):
        found = group_norm.products(_sample(grad, input), _sample(input, input), mean, rstd, None, _channels(input))
        return found[: 2 * len(mean)].view(2, -1)
    return torch.stack(torch.batch_norm_backward_reduce(grad, input, mean, rstd, None, True, False, False)[:2])


def fused_input_gradient(
    grad: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    sums: torch.Tensor,
    members: int,
) -> torch.Tensor:
    """The gradient of one rank's part, from the ``sums`` of all; a channel has ``members`` elements on all ranks."""
    if not input.numel():
        return torch.empty_like(input)
    if _walked(input):
        pair, channels = (_sample(grad, input), _sample(input, input)), _channels(input)
        out = group_norm.input_gradient(*pair, mean, rstd, weight, sums, members, channels, weighted=False)
        return out.as_strided(input.shape, input.stride())
    count = constant((members,), sums, torch.int32)
    weight = None if weight is None else weight.to(mean.dtype)
    return torch.batch_norm_backward_elemt(grad, input, mean, rstd, weight, sums[0], sums[1], count)


def _walked(input: torch.Tensor) -> bool:
    """Whether a shard is large, and group norm's kernels can take it, as one sample with a group for each channel."""
    dense = len(input) == 1 and input.is_contiguous()
    return input.numel() >= LARGE and (dense or _last(input)) and group_norm.usable(input)


def _last(input: torch.Tensor) -> bool:
    """Whether the channels are innermost in memory."""
    return input.ndim in _LAST and input.is_contiguous(memory_format=_LAST[input.ndim])


def _sample(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``tensor``, in the memory format of ``like``, as one sample."""
    channels, size = like.shape[1], like.numel()
    last = _last(like)
    tensor = tensor.contiguous(memory_format=_LAST[like.ndim] if last else torch.contiguous_format)
    length = size // channels
    return tensor.as_strided((1, channels, length), (size, 1, channels) if last else (size, length, 1))


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _channels(input: torch.Tensor) -> Groups:
    return Groups(Span(0, input.shape[1]), 1, input.shape[1])


def per_channel(tensor: torch.Tensor, ndim: int) -> torch.Tensor:
    """A parameter of each channel in the shape of the input."""
    return tensor.view(1, -1, *[1] * (ndim - 2))
