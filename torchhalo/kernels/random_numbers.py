"""Random numbers of a box of a tensor: a hash of the seed and of where an element is, turned into a distribution.

The hash is the finaliser of SplitMix64, in arithmetic of 64 bits that wraps. Each distribution gives as many numbers
as it is given bits, as a dtype that holds them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torchhalo.geometry import Box

STEP = 0x9E3779B97F4A7C15  # of SplitMix64, from one element to the next

Bits = Callable[[int], torch.Tensor]  # from the number of a stream to 64 random bits per element, to be overwritten


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """Hash 64-bit integers, in place: the finaliser of SplitMix64, in arithmetic that wraps."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z.bitwise_xor_(_shifted(z, shift)).mul_(_signed(factor))
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, places: int) -> torch.Tensor:
    """``z`` moved to the right, with zeros from the left, where torch has copies of the sign."""
    return (z >> places).bitwise_and_((1 << (64 - places)) - 1)


def _signed(word: int) -> int:
    """A 64-bit word as the integer that int64 has for it."""
    word %= 1 << 64
    return word - (1 << 64) if word >> 63 else word


def bits_of(box: Box, shape: Sequence[int], seed: torch.Tensor) -> Bits:
    """64 bits for each element of ``box`` of a tensor of ``shape``, independent for each stream."""
    index = seed.new_zeros(())
    scale = 1
    for dim, span in reversed(list(enumerate(box.spans))):
        line = torch.arange(span.start, span.stop, device=seed.device).mul_(scale)
        index = line.view(-1, *[1] * (len(shape) - 1 - dim)) + index
        scale *= shape[dim]

    def bits(stream: int) -> torch.Tensor:
        key = _mixed(seed + _signed(stream * 0xD1342543DE82EF95))
        # index * STEP + key; but the inductor would work out the products of the index with integers that do not wrap
        return _mixed((index + key.mul(_signed(pow(STEP, -1, 1 << 64)))).mul_(_signed(STEP)))

    return bits


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def digits_of(dtype: torch.dtype) -> int:
    """How many binary digits a uniform number of ``dtype`` gets, so that none is rounded up to 1."""
    return {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)


def _unit(bits: Bits, dtype: torch.dtype, stream: int = 0) -> torch.Tensor:
    """Uniform in [0, 1)."""
    digits = digits_of(dtype)
    words = bits(stream).bitwise_right_shift_(64 - digits).bitwise_and_((1 << digits) - 1)
    return words.to(_wide(dtype)).mul_(2.0**-digits)


def _log(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    """The logarithm of what is uniform in (0, 1]."""
    digits = 53 if dtype == torch.float64 else 32
    words = bits(0).bitwise_right_shift_(64 - digits).bitwise_and_((1 << digits) - 1).add_(1)
    return words.to(_wide(dtype)).mul_(2.0**-digits).log_()


def bernoulli(bits: Bits, dtype: torch.dtype, p: float | torch.Tensor) -> torch.Tensor:
    if isinstance(p, torch.Tensor):
        return _unit(bits, _wide(p.dtype)) < p
    return bits(0).bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1) < round(p * (1 << 53))


def uniform(bits: Bits, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return _unit(bits, dtype).mul_(high - low).add_(low)


def normal(bits: Bits, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """Box and Muller's way, of two numbers the first."""
    radius = _log(bits, dtype).mul_(-2).sqrt_()
    return radius.mul_(_unit(bits, _wide(dtype), stream=1).mul_(2 * math.pi).cos_()).mul_(std).add_(mean)


def log_normal(bits: Bits, dtype: torch.dtype, mean: float, std: float) -> torch.Tensor:
    return normal(bits, dtype, mean, std).exp_()


def exponential(bits: Bits, dtype: torch.dtype, rate: float) -> torch.Tensor:
    return _log(bits, dtype).div_(-rate)


def cauchy(bits: Bits, dtype: torch.dtype, median: float, sigma: float) -> torch.Tensor:
    return _unit(bits, _wide(dtype)).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)


def geometric(bits: Bits, dtype: torch.dtype, p: float) -> torch.Tensor:
    return _log(bits, dtype).div_(math.log1p(-p) if p < 1 else -math.inf).ceil_().clamp_(min=1)


def integer(bits: Bits, dtype: torch.dtype, low: int, high: int | None = None) -> torch.Tensor:
    """In [low, high), or up to the largest of ``dtype``; the bias is at most one in 2**63 over the size of the interval."""
    size = (_largest(dtype) + 1 if high is None else high) - low
    if size > 1 << 63:
        raise NotImplementedError(f"random integers between {low} and {high}: at most 2**63 different ones can be drawn")
    words = bits(0).bitwise_and_((1 << 63) - 1)
    return (words if size == 1 << 63 else words.remainder_(size)).add_(low)


def below(bits: Bits, dtype: torch.dtype, high: int) -> torch.Tensor:
    return integer(bits, dtype, 0, high)


def any_integer(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    return integer(bits, dtype, 0)


def _largest(dtype: torch.dtype) -> int:
    """Of the integers that ``dtype`` holds, all of those below it too, the largest."""
    if dtype == torch.bool:
        return 1
    return round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
