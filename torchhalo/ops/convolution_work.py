"""What one rank computes of a convolution: all at once, or the bulk of its shard first and then the strips along its edges.

Integers alone, from the windows and the exchange; the kernels are called elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from torchhalo.exchange.assembly import recipe
from torchhalo.exchange.parts import strips_beyond
from torchhalo.exchange.plan import Exchange, Index, Plan, Recipe, index
from torchhalo.geometry import Box, Mirror, Span, Window, crop, overhang
from torchhalo.kernels import edges

aten = torch.ops.aten

#: Up to how many products pairs across the edges are added to the gradient of the weight one by one, in place: a 3x3 kernel has
#: 6, or 16 with both dims sharded. More of them cost more than one convolution, which needs a second such gradient.
PRODUCTS = 16
#: How many times what a strip reads must fit into a shard for another one of it in memory not to matter.
TINY = 128


class Convolution(NamedTuple):
    """The arguments of a convolution that are not tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, ndim: int, args: Sequence[Any]) -> Convolution:
        stride, padding, dilation, transposed, output_padding, groups = args

        def each(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values) if len(values) == ndim else tuple(values) * ndim

        return cls(each(stride), each(padding), each(dilation), transposed, each(output_padding), groups)

    def windows(self, kernel: Sequence[int], mirrored: bool) -> dict[int, Window | Mirror]:
        """The window of each spatial dim; its output is the sparse side, or the dense one if ``mirrored``."""
        parameters = zip(kernel, self.stride, self.padding, self.padding, self.dilation, strict=True)
        windows = (Window(*parameter) for parameter in parameters)
        return {dim: window.mirror if mirrored else window for dim, window in enumerate(windows, start=2)}

    def check_output_padding(self) -> None:
        """Let the smallest plain convolution object to an output padding that torch checks in its kernels only."""
        if any(extra >= max(s, d) for extra, s, d in zip(self.output_padding, self.stride, self.dilation, strict=True)):
            one = torch.ones([1] * (len(self.stride) + 2))
            aten.convolution(one, one, None, *self._replace(padding=(0,) * len(self.stride), groups=1).spread())

    def spread(self) -> tuple[Any, ...]:
        """As the aten ops take them."""
        return tuple(list(value) if isinstance(value, tuple) else value for value in self)


def _fit(window: Window, needs: Span, own: Span, grow_sparse: bool) -> tuple[Span, int, int]:
    """Grow ``needs`` until the kernel's own padding can stand for what is missing at both ends.

    The kernel pads (a transposed one crops) both ends of the dense side alike, and tolerates less than a stride too much at
    the end: ``0 <= before - after < stride`` must hold. What is grown is filled with zeros when it is assembled, which is
    cheaper than to pad or crop the other side, a whole shard.

    Returns:
        The grown span, the kernel's padding, and what that is too much at the end, a transposed kernel's output padding.
    """
    stride = window.stride
    before, after = overhang(window, needs, own, grow_sparse)
    if grow_sparse:
        first = max(0, -(-max(-before, after - before) // stride))
        before += first * stride
        last = max(0, (before - after) // stride)
        after += last * stride
    else:
        last = max(0, after - before)
        after -= last
        first = max(0, before - after - stride + 1)
        before -= first
    return Span(needs.start - first, needs.stop + last), before, before - after


def plain_window(window: Window | Mirror) -> Window:
    return window.window if isinstance(window, Mirror) else window


class Part(NamedTuple):
    """A local convolution that gives a part of a rank's target.

    Attributes:
        target: The part, along the exchange's dims.
        region: What the kernel is given of the source.
        recipe: How that is put together.
        call: The arguments of the kernel that are not tensors.
        cut: Where the part is in the rank's target.
        known: Where in the region that is what the bulk has read.
    """

    target: Box
    region: Box
    recipe: Recipe
    call: tuple[Any, ...]
    cut: Index
    known: Index


class Product(NamedTuple):
    """What a piece of the halo of ``grad_output`` adds to the gradient of the weight at one tap of the kernel.

    Attributes:
        piece: The number of the piece.
        grad: Which part of it meets the shard of the input there.
        input: Which part of the shard that is.
        tap: Where in the gradient.
    """

    piece: int
    grad: Index
    input: Index
    tap: tuple[slice | int, ...]


class Work(NamedTuple):
    """What one rank computes.

    Either all at once, from the shard and its halo put together; or first the bulk, from the shard as it is, wrong along the
    edges, and then the strips that go there.

    Attributes:
        whole: The first way; None where there is nothing to compute.
        bulk: The second; None to go the first way.
        strips: In groups of one shape, which are stacked along the batch for one call.
        products: Backward, what the pairs across the edges add to the gradient of the weight; None to have the strips' own.
        edge: For kernels that compute strips, and those pairs, without a copy of what they read; None to go without.
    """

    whole: Part | None = None
    bulk: Part | None = None
    strips: tuple[tuple[Part, ...], ...] = ()
    products: tuple[Product, ...] | None = None
    edge: edges.Edge | None = None


class Local(NamedTuple):
    """A convolution on one rank.

    Attributes:
        config: The whole convolution, with this rank's share of the groups.
        exchange: Source and target, which are input and output forward, ``grad_output`` and input backward.
        sparse: Whether the source is the sparse side.
        plan: What the rank holds of the source.
        own: What it owns of the target, along the exchange's dims.
    """

    config: Convolution
    exchange: Exchange
    sparse: bool
    plan: Plan
    own: Box

    def work(self, in_parts: bool, croppable: Collection[int]) -> Work:
        """How to compute.

        Args:
            in_parts: Whether bulk and strips are worth it.
            croppable: Dims along which a part of the shard is dense in memory, so that the kernel takes it as it is.
        """
        whole = self._part(self.own)
        bulk = self._bulk(croppable) if in_parts and not whole.recipe.untouched else None
        if bulk is None:
            return Work(whole)
        strips = strips_beyond(self.exchange, self.own, bulk.region)
        if strips is None:
            return Work(whole)
        groups: dict[Any, list[Part]] = {}
        for strip in strips:
            part = self._part(strip, bulk.region)
            # On an H200 two strips of 64 to 512 channels take little longer one by one than together, up to 4% of a backward,
            # and hold half the memory, where they are large enough for that to matter; those of a depthwise convolution,
            # 33 us each and 19 together.
            together = self.config.groups > 1 or part.region.size * TINY <= self.plan.owned.size
            alone = None if together else strip
            groups.setdefault((alone, strip.shape, part.region.shape, str(part.call)), []).append(part)
        return Work(whole, bulk, tuple(map(tuple, groups.values())))

    def products(self, kernel: Sequence[int]) -> tuple[Product, ...] | None:
        """Backward: the pairs of ``grad_output`` and input of which another rank has the first, by piece and by tap.

        None where they are more than `PRODUCTS`, or rows in the halo are left out.
        """
        if any(span.step > 1 for piece in self.plan.receives for span in piece.spans):
            return None
        every = slice(None), slice(None)
        windows = [plain_window(window) for window in self.config.windows(kernel, self.sparse).values()]
        sparse, dense = (0, 1) if self.sparse else (1, 0)  # where each side is in (source, target), and the other way round
        sizes = zip(self.exchange.source.shape[2:], self.exchange.target.shape[2:], strict=True)
        whole = {dim: (Span(0, source), Span(0, target)) for dim, (source, target) in enumerate(sizes, start=2)}
        found = []
        for number, piece in enumerate(self.plan.receives):
            sides = whole | {dim: (held, own) for dim, _, own, held in self._lines(self.own, piece)}
            for tap in product(*map(range, kernel)):
                lines = zip(windows, tap, sides.values(), strict=True)
                meetings = [window.meeting(k, pair[sparse], pair[dense]) for window, k, pair in lines]
                if all(meetings):
                    grad, own = zip(*((pair[sparse], pair[dense]) for pair in meetings if pair), strict=True)
                    found.append(Product(number, every + grad, every + own, (*every, *tap)))
        return tuple(found) if len(found) <= PRODUCTS else None

    def edge(self, kernel: Sequence[int], strips: Iterable[Part]) -> edges.Edge | None:
        """What `kernels.edges` wants to know of ``strips``; None where it cannot help."""
        if len(self.exchange.dims) > 1:
            return None
        (dim,), (held,), (own,) = self.exchange.dims, self.plan.owned.spans, self.own.spans
        received = [piece for box in self.plan.receives for piece in box.spans]
        before = [piece for piece in received if piece.stop == held.start] or [Span(held.start, held.start)]
        after = [piece for piece in received if piece.start == held.stop] or [Span(held.stop, held.stop)]
        if before[0].size + after[0].size < sum(piece.stop - piece.start for piece in received):
            return None
        windows = tuple(map(plain_window, self.config.windows(kernel, self.sparse).values()))
        spans = tuple(sorted(strip.target.spans[0] for strip in strips))
        return edges.Edge(dim, windows, self.sparse, held, before[0], after[0], own, spans)

    def _lines(self, target: Box, source: Box) -> Iterator[tuple[int, Window | Mirror, Span, Span]]:
        for dim, window, own, held in zip(self.exchange.dims, self.exchange.windows, target.spans, source.spans, strict=True):
            assert isinstance(window, (Window, Mirror))
            yield dim, window, own, held

    def _part(self, target: Box, known: Box | None = None) -> Part:
        lines = self._lines(target, self.exchange.needs(target))
        return self._called(
            target, [_fit(plain_window(window), need, own, self.sparse) for _, window, own, need in lines], known
        )

    def _bulk(self, croppable: Collection[int]) -> Part | None:
        """All of ``own`` from what the rank holds, if the kernel can do that."""
        fitted = []
        for dim, window, own, held in self._lines(self.own, self.plan.owned):
            found = crop(plain_window(window), held, own, self.sparse)
            if found is None or (found[0] != held and dim not in croppable):
                return None
            fitted.append(found)
        return self._called(self.own, fitted, None)

    def _called(self, target: Box, fitted: Sequence[tuple[Span, int, int]], known: Box | None) -> Part:
        padding, output_padding = list(self.config.padding), list(self.config.output_padding)
        for dim, (_, pad, surplus) in zip(self.exchange.dims, fitted, strict=True):
            padding[dim - 2] = pad
            output_padding[dim - 2] = surplus if self.config.transposed else 0
        config = self.config._replace(padding=tuple(padding), output_padding=tuple(output_padding))
        region = Box(tuple(span for span, _, _ in fitted))
        return Part(
            target,
            region,
            recipe(self.exchange, self.plan, region),
            config.spread(),
            index(self.exchange, target, self.own),
            index(self.exchange, known & region, region) if known else (),
        )
