"""Which inputs an output of an interpolation reads, and with which weights, in the arithmetic of plain torch's kernels."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torchhalo.geometry import Intervals, Span


def counting(
    mode: str, inputs: Sequence[int], outputs: Sequence[int], scales: Sequence[float | None], plain: bool, on_cpu: bool
) -> list[float | None]:
    """The scale factors that plain torch's kernels heed: where a size stays, or is doubled, some go by the sizes instead."""
    sizes = list(zip(map(int, inputs), map(int, outputs), strict=True))
    same = [n == m for n, m in sizes]
    if mode.startswith("nearest"):
        if on_cpu:
            by_size = [mode == "nearest" and plain and m in (n, 2 * n) for n, m in sizes]
        else:
            by_size = same if len(sizes) == 2 else [False] * len(sizes)
    elif on_cpu:
        by_size = [False] * len(sizes) if mode == "cubic" else same
    else:  # CUDA's copy what they need not change at all
        by_size = [all(same) and mode not in _FILTERS] * len(sizes)
    return [None if size else scale for size, scale in zip(by_size, scales, strict=True)]


def _single(value: float) -> float:
    """``value`` rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _triangle(x: float) -> float:
    return max(0.0, 1 - abs(x))


def _cubic(x: float, a: float) -> float:
    """The cubic convolution filter."""
    x = abs(x)
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0


def _lanczos(x: float) -> float:
    def sinc(x: float) -> float:
        return math.sin(math.pi * x) / (math.pi * x) if x else 1.0

    return sinc(x) * sinc(x / 3) if abs(x) < 3 else 0.0


# The filters of the antialiased modes, and how far they reach where nothing shrinks.
_FILTERS: dict[str, tuple[Callable[[float], float], int]] = {
    "bilinear_aa": (_triangle, 1),
    "bicubic_aa": (lambda x: _cubic(x, -0.5), 2),
    "lanczos_aa": (_lanczos, 3),
}


@dataclass(frozen=True)
class Taps(Intervals):
    """Which inputs an output reads, and their weights, in the arithmetic of plain torch's kernels.

    Attributes:
        mode: ``nearest``, ``nearest_exact``, ``linear``, ``cubic``, or one of the antialiased ones.
        align_corners: Whether the centres of the outermost elements coincide, not their outer edges.
        scale_factor: Outputs per input, where it was given and counts; else it follows from the sizes.
        single: Whether coordinates are computed in float32, or in float64.
        plain: Whether nearest modes compute the coordinate in one step; one of torch's kernels takes a detour.
    """

    mode: str
    align_corners: bool
    scale_factor: float | None
    single: bool
    plain: bool = True

    @property
    def nearest(self) -> bool:
        return self.mode.startswith("nearest")

    def round(self, value: float) -> float:
        return _single(value) if self.single else value

    @cached_property
    def scale(self) -> float:
        """Inputs per output."""
        if self.align_corners:
            return self.round((self.inputs - 1) / (self.outputs - 1)) if self.outputs > 1 else 0.0
        return self.round(1 / self.scale_factor if self.scale_factor else self.inputs / self.outputs)

    @cached_property
    def ratio(self) -> int | None:
        """How many outputs there are per input, if a part of the inputs gives just the same for its part of the outputs.

        That is so if coordinates in the part are those in the whole but for a shift, to the bit: for a power of two, and,
        since nearest modes round them, for other ratios there.
        """
        ratio, rest = divmod(self.outputs, self.inputs)
        if rest or self.align_corners or self.scale != self.round(1 / ratio):
            return None
        if ratio & (ratio - 1) == 0:
            return ratio
        variants = [Taps(self.inputs, self.outputs, self.mode, False, None, *v) for v in ((True, True), (self.single, False))]
        alike = self.nearest and all(v.interval(o).start == o // ratio for v in variants for o in range(self.outputs))
        return ratio if alike else None

    def source(self, output: int) -> float:
        """Where the centre of an output lies among those of the inputs."""
        if self.align_corners:
            return self.round(self.scale * output)
        return self.round(self.scale * (output + 0.5) - 0.5)  # rounded once: most builds fuse the steps

    def taps(self, output: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The inputs that ``output`` reads, in ascending order, and their weights."""
        last = self.inputs - 1
        if self.mode in _FILTERS:
            return self._filtered(output)
        if self.nearest:
            if self.mode == "nearest":
                found = self.round(self.scale * output)
            elif self.plain:
                found = self.round(self.scale * (output + 0.5))
            else:
                found = self.round(max(self.source(output), 0) + 0.5)
            return (min(math.floor(_single(found)), last),), (1.0,)
        source = self.source(output) if self.mode == "cubic" else max(self.source(output), 0.0)
        first = min(math.floor(_single(source)), last)
        past = min(max(self.round(source - first), 0.0), 1.0)
        if self.mode == "linear":
            return (first, min(first + 1, last)), (1 - past, past)
        reads = tuple(min(max(first + k, 0), last) for k in (-1, 0, 1, 2))
        return reads, tuple(_cubic(past - k, -0.75) for k in (-1, 0, 1, 2))

    def _filtered(self, output: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        filter, reach = _FILTERS[self.mode]
        stretch = max(self.scale, 1.0)
        centre, support = self.round(self.scale * (output + 0.5)), self.round(reach * stretch)
        first = max(int(self.round(self.round(centre - support) + 0.5)), 0)
        last = min(int(self.round(self.round(centre + support) + 0.5)), self.inputs)
        weights = [filter((i - centre + 0.5) / stretch) for i in range(first, last)]
        total = sum(weights) or 1.0
        return tuple(range(first, last)), tuple(weight / total for weight in weights)

    def interval(self, output: int) -> Span:
        reads, _ = self.taps(output)
        return Span(reads[0], reads[-1] + 1)

    def reads(self, outputs: Span) -> tuple[Span, ...]:
        # Where nothing shrinks there are no gaps.
        return (self.reach(outputs),) if outputs.size and self.scale <= 1 else super().reads(outputs)

    def table(self, outputs: Span) -> list[tuple[list[int], list[float]]]:
        """For each tap, where each of ``outputs`` reads and with which weight."""
        return _table(self, outputs)


@lru_cache(maxsize=64)  # each is as long as the outputs
def _table(taps: Taps, outputs: Span) -> list[tuple[list[int], list[float]]]:
    found = [taps.taps(output) for output in range(outputs.start, outputs.stop)]
    most = max((len(reads) for reads, _ in found), default=0)
    return [
        (
            [reads[min(k, len(reads) - 1)] for reads, _ in found],
            [weights[k] if k < len(weights) else 0.0 for _, weights in found],
        )
        for k in range(most)
    ]
