"""Windows: what a convolution or a pool reads along one dim, seen from either side.

A window relates the two sides of an op along one dim. Output ``o`` of a convolution reads the inputs
``o * stride - before + k * dilation`` for ``k`` in ``range(kernel)``; for a transposed convolution the same relation holds
with the sides exchanged, which is why one class and its mirror image serve both, forward and backward.
"""

from __future__ import annotations

from typing import NamedTuple

from torchhalo.geometry.spans import Span, hull, merge


class Window(NamedTuple):
    """Kernel, stride, padding (``before`` and ``after``, may be negative) and dilation along one dim.

    >>> window = Window(kernel=3, stride=2, before=1, after=1)
    >>> window.output_size(8), window.reads(Span(2, 4))
    (4, (Span(start=3, stop=8, step=1),))
    """

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def extent(self) -> int:
        """How many inputs one output spans, gaps included."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def mirror(self) -> Mirror:
        """The window of the adjoint op, whose input is this one's output."""
        return Mirror(self)

    def output_size(self, size: int) -> int:
        return (size + self.before + self.after - self.extent) // self.stride + 1

    def reach(self, outputs: Span) -> Span:
        """The span from the first to the last input that ``outputs`` read, not clipped to the tensor."""
        if not outputs.size:
            return Span(0, 0)
        first, last = outputs.start * self.stride - self.before, (outputs.stop - 1) * self.stride - self.before
        return Span(first, last + self.extent)

    def reads(self, outputs: Span) -> tuple[Span, ...]:
        """Exactly the inputs that ``outputs`` read, not clipped to the tensor, as disjoint spans.

        >>> Window(kernel=1, stride=2).reads(Span(3, 6))
        (Span(start=6, stop=11, step=2),)
        """
        if not outputs.size:
            return ()
        if self.dilation == 1 and self.kernel >= self.stride:
            return (self.reach(outputs),)
        # Taps that differ by a multiple of the stride read from the same comb, one from another of its teeth.
        combs: dict[int, list[Span]] = {}
        for k in range(self.kernel):
            shift, offset = divmod(k * self.dilation - self.before, self.stride)
            combs.setdefault(offset, []).append(Span(outputs.start + shift, outputs.stop + shift))
        return tuple(
            Span(teeth.start * self.stride + offset, (teeth.stop - 1) * self.stride + offset + 1, self.stride)
            for offset in sorted(combs)
            for teeth in merge(combs[offset])
        )

    def inside(self, outputs: Span, inputs: Span, size: int) -> Span:
        """Those of ``outputs`` that read nothing but ``inputs`` and what lies outside a tensor of ``size``.

        >>> Window(kernel=3, before=1, after=1).inside(Span(4, 8), Span(4, 8), size=8)
        Span(start=5, stop=8, step=1)
        """
        first = -(-(inputs.start + self.before) // self.stride) if inputs.start > 0 else outputs.start
        stop = (inputs.stop + self.before - self.extent) // self.stride + 1 if inputs.stop < size else outputs.stop
        return outputs & Span(first, stop)

    def meeting(self, tap: int, outputs: Span, inputs: Span) -> tuple[slice, slice] | None:
        """Where in ``outputs`` and ``inputs``, which are intervals, are those of them that meet in one tap of the kernel.

        >>> Window(kernel=3, before=1, after=1).meeting(2, Span(3, 4), Span(4, 8))
        (slice(0, 1, None), slice(0, 1, 1))
        """
        shift = tap * self.dilation - self.before
        first = max(outputs.start, -((shift - inputs.start) // self.stride))
        last = min(outputs.stop - 1, (inputs.stop - 1 - shift) // self.stride)
        if first > last:
            return None
        start, stop = (each * self.stride + shift - inputs.start for each in (first, last))
        return slice(first - outputs.start, last + 1 - outputs.start), slice(start, stop + 1, self.stride)

    def touches(self, inputs: Span) -> tuple[Span, ...]:
        """Exactly the outputs that read any of ``inputs``, not clipped to the tensor.

        >>> Window(kernel=3, before=1, after=1).touches(Span(4, 6))
        (Span(start=3, stop=7, step=1),)
        """
        if not inputs.size:
            return ()
        shifts = (self.before - k * self.dilation for k in range(self.kernel))
        return merge(
            Span(-(-(inputs.start + shift) // self.stride), -(-(inputs.stop + shift) // self.stride)) for shift in shifts
        )


class Mirror(NamedTuple):
    """A window seen from its other side: transposed convolution forward, convolution backward.

    >>> Window(kernel=3, stride=2, before=1, after=1).mirror.reads(Span(0, 3))
    (Span(start=0, stop=2, step=1),)
    """

    window: Window

    @property
    def mirror(self) -> Window:
        return self.window

    def output_size(self, size: int, output_padding: int = 0) -> int:
        w = self.window
        return (size - 1) * w.stride - w.before - w.after + w.extent + output_padding

    def reach(self, outputs: Span) -> Span:
        return hull(self.window.touches(outputs))

    def reads(self, outputs: Span) -> tuple[Span, ...]:
        return self.window.touches(outputs)

    def touches(self, inputs: Span) -> tuple[Span, ...]:
        return self.window.reads(inputs)

    def inside(self, outputs: Span, inputs: Span, size: int) -> Span:
        first = self.window.reach(Span(0, inputs.start)).stop if inputs.start > 0 else outputs.start
        stop = self.window.reach(Span(inputs.stop, size)).start if inputs.stop < size else outputs.stop
        return outputs & Span(first, stop)


def overhang(window: Window, source: Span, target: Span, source_is_sparse: bool) -> tuple[int, int]:
    """By how much the windows of the sparse side reach beyond the dense one, before and after it."""
    sparse, dense = (source, target) if source_is_sparse else (target, source)
    reach = window.reach(sparse)
    return dense.start - reach.start, reach.stop - dense.stop


def crop(window: Window, held: Span, own: Span, crop_sparse: bool) -> tuple[Span, int, int] | None:
    """Cut ``held`` until a kernel that pads both ends alike gives as much as ``own`` from it, right where that reads no more.

    Returns:
        None where the kernel's own padding cannot stand for what is missing.
    """
    stride = window.stride
    before, after = overhang(window, held, own, crop_sparse)
    if crop_sparse:
        first, last = max(0, (before - after) // stride), max(0, -((before - after) // stride))
        before, after = before - first * stride, after - last * stride
    else:
        first = max(0, -before, after - before)
        before += first
        last = max(0, before - after - stride + 1)
        after += last
    left = Span(held.start + first, held.stop - last)
    return (left, before, before - after) if left.size and 0 <= before < window.extent else None
