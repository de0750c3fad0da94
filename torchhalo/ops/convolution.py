"""Convolution and transposed convolution, 1-d to 3-d, forward and backward.

Along each spatial dim two sides are related by ``dense = sparse * stride - padding + k * dilation``: a convolution reads the
dense side and writes the sparse one, a transposed convolution the reverse. Forward, the ranks exchange halos of the input;
backward, of ``grad_output``, and each rank takes the gradients of the (input, output) pairs whose input it owns. So every pair
is counted on one rank, the input's halo is sent once and never saved, and the same local call serves all four cases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.assembly import recipe
from torchhalo.exchange.layout import layout
from torchhalo.exchange.memory import croppable, dense, laid_out, memory_format, strides
from torchhalo.exchange.parts import edges, forced_parts, worthwhile
from torchhalo.exchange.plan import Exchange, Index, Plan, Recipe, exchange_between, index
from torchhalo.exchange.source import Source, run, stacked_view
from torchhalo.geometry import Box, Mirror, Span, Window, crop, overhang
from torchhalo.kernels import depthwise, local_convolution
from torchhalo.torch_internals import caching, dtensors, fake_tensors, handlers, process_groups, redistribution, streams
from torchhalo.torch_internals.tracing import depend_on

aten = torch.ops.aten

#: Up to how many products pairs across the edges are added to the gradient of the weight one by one, in place: a 3x3 kernel has
#: 6, or 16 with both dims sharded. More of them cost more than one convolution, which needs a second such gradient.
PRODUCTS = 16
#: How many times the weight, or what a strip reads, must fit into a shard for another one of it in memory not to matter.
LIGHT, TINY = 64, 128
#: From how many bytes on gradients of channels-last images are computed in parts on a CPU, sooner than all else: with its halo
#: joined a shard takes one core 1.6 to 3 times as long as plain (2.96 for 128 channels on 42x170), in parts 1.2 to 1.6 (1.17).
LAST = 2**19


class Role(NamedTuple):
    """What one mesh axis does in a convolution: the placement along it of every tensor involved."""

    input: Placement
    weight: Placement
    bias: Placement
    output: Placement
    grad_output: Placement
    grad_input: Placement
    grad_weight: Placement
    grad_bias: Placement


def _roles(
    input: Sequence[Placement], weight: Sequence[Placement], mesh: DeviceMesh, config: _Convolution
) -> tuple[list[Role], int]:
    """What each axis does, with as little moved as its placements allow, and how many groups are left to each rank."""
    r, s, p = Replicate(), Shard, Partial()
    from_channels, to_channels = (0, 1) if config.transposed else (1, 0)
    groups = config.groups
    whole = Role(r, r, r, r, r, r, r, r)
    by_input = Role(s(1), s(from_channels), r, p, r, s(1), s(from_channels), r)
    by_output = Role(r, s(to_channels), s(0), s(1), s(1), p, s(to_channels), s(0))
    by_group = Role(s(1), s(0), s(0), s(1), s(1), s(1), s(0), s(0))
    roles = []
    for axis, (x, w) in enumerate(zip(input, weight, strict=True)):
        if isinstance(x, Shard) and x.dim != 1:
            role = Role(x, r, r, x, x, x, p, p)
        elif groups > 1:
            divisible = groups % mesh.size(axis) == 0
            role = by_group if divisible and (x == s(1) or w == s(0)) else whole
        elif x == s(1) or w == s(from_channels):
            role = by_input
        else:
            role = by_output if w == s(to_channels) else whole
        if role is by_group:
            groups //= mesh.size(axis)
        roles.append(role)
    return roles, groups


class _Convolution(NamedTuple):
    """The arguments of a convolution that are not tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, ndim: int, args: Sequence[Any]) -> _Convolution:
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


def _plain(window: Window | Mirror) -> Window:
    return window.window if isinstance(window, Mirror) else window


class _Part(NamedTuple):
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


class _Product(NamedTuple):
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


class _Work(NamedTuple):
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

    whole: _Part | None = None
    bulk: _Part | None = None
    strips: tuple[tuple[_Part, ...], ...] = ()
    products: tuple[_Product, ...] | None = None
    edge: depthwise.Edge | None = None


class _Local(NamedTuple):
    """A convolution on one rank.

    Attributes:
        config: The whole convolution, with this rank's share of the groups.
        exchange: Source and target, which are input and output forward, ``grad_output`` and input backward.
        sparse: Whether the source is the sparse side.
        plan: What the rank holds of the source.
        own: What it owns of the target, along the exchange's dims.
    """

    config: _Convolution
    exchange: Exchange
    sparse: bool
    plan: Plan
    own: Box

    def work(self, in_parts: bool, croppable: Collection[int]) -> _Work:
        """How to compute.

        Args:
            in_parts: Whether bulk and strips are worth it.
            croppable: Dims along which a part of the shard is dense in memory, so that the kernel takes it as it is.
        """
        whole = self._part(self.own)
        bulk = self._bulk(croppable) if in_parts and not whole.recipe.untouched else None
        if bulk is None:
            return _Work(whole)
        strips = edges(self.exchange, self.own, bulk.region)
        if strips is None:
            return _Work(whole)
        groups: dict[Any, list[_Part]] = {}
        for strip in strips:
            part = self._part(strip, bulk.region)
            # On an H200 two strips of 64 to 512 channels take little longer one by one than together, up to 4% of a backward,
            # and hold half the memory, where they are large enough for that to matter; those of a depthwise convolution,
            # 33 us each and 19 together.
            together = self.config.groups > 1 or part.region.size * TINY <= self.plan.owned.size
            alone = None if together else strip
            groups.setdefault((alone, strip.shape, part.region.shape, str(part.call)), []).append(part)
        return _Work(whole, bulk, tuple(map(tuple, groups.values())))

    def products(self, kernel: Sequence[int]) -> tuple[_Product, ...] | None:
        """Backward: the pairs of ``grad_output`` and input of which another rank has the first, by piece and by tap.

        None where they are more than `PRODUCTS`, or rows in the halo are left out.
        """
        if any(span.step > 1 for piece in self.plan.receives for span in piece.spans):
            return None
        every = slice(None), slice(None)
        windows = [_plain(window) for window in self.config.windows(kernel, self.sparse).values()]
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
                    found.append(_Product(number, every + grad, every + own, (*every, *tap)))
        return tuple(found) if len(found) <= PRODUCTS else None

    def edge(self, kernel: Sequence[int], strips: Iterable[_Part]) -> depthwise.Edge | None:
        """What the kernels for depthwise convolutions want to know of ``strips``; None where these kernels cannot help."""
        if len(self.exchange.dims) > 1:
            return None
        (dim,), (held,), (own,) = self.exchange.dims, self.plan.owned.spans, self.own.spans
        received = [piece for box in self.plan.receives for piece in box.spans]
        before = [piece for piece in received if piece.stop == held.start] or [Span(held.start, held.start)]
        after = [piece for piece in received if piece.start == held.stop] or [Span(held.stop, held.stop)]
        if before[0].size + after[0].size < sum(piece.stop - piece.start for piece in received):
            return None
        windows = tuple(map(_plain, self.config.windows(kernel, self.sparse).values()))
        spans = tuple(sorted(strip.target.spans[0] for strip in strips))
        return depthwise.Edge(dim, windows, self.sparse, held, before[0], after[0], own, spans)

    def _lines(self, target: Box, source: Box) -> Iterator[tuple[int, Window | Mirror, Span, Span]]:
        for dim, window, own, held in zip(self.exchange.dims, self.exchange.windows, target.spans, source.spans, strict=True):
            assert isinstance(window, (Window, Mirror))
            yield dim, window, own, held

    def _part(self, target: Box, known: Box | None = None) -> _Part:
        lines = self._lines(target, self.exchange.needs(target))
        return self._called(target, [_fit(_plain(window), need, own, self.sparse) for _, window, own, need in lines], known)

    def _bulk(self, croppable: Collection[int]) -> _Part | None:
        """All of ``own`` from what the rank holds, if the kernel can do that."""
        fitted = []
        for dim, window, own, held in self._lines(self.own, self.plan.owned):
            found = crop(_plain(window), held, own, self.sparse)
            if found is None or (found[0] != held and dim not in croppable):
                return None
            fitted.append(found)
        return self._called(self.own, fitted, None)

    def _called(self, target: Box, fitted: Sequence[tuple[Span, int, int]], known: Box | None) -> _Part:
        padding, output_padding = list(self.config.padding), list(self.config.output_padding)
        for dim, (_, pad, surplus) in zip(self.exchange.dims, fitted, strict=True):
            padding[dim - 2] = pad
            output_padding[dim - 2] = surplus if self.config.transposed else 0
        config = self.config._replace(padding=tuple(padding), output_padding=tuple(output_padding))
        region = Box(tuple(span for span, _, _ in fitted))
        return _Part(
            target,
            region,
            recipe(self.exchange, self.plan, region),
            config.spread(),
            index(self.exchange, target, self.own),
            index(self.exchange, known & region, region) if known else (),
        )


class _Program:
    """All of a convolution, forward or backward, that is not data: worked out once for each signature."""

    def __init__(
        self,
        mesh: DeviceMesh,
        backward: bool,
        in_parts: bool | None,
        input: dtensors.Signature,
        weight: dtensors.Signature,
        bias: dtensors.Signature | None,
        *arguments: Any,
    ) -> None:
        config = _Convolution.of(len(weight.meta.shape) - 2, arguments)
        config.check_output_padding()
        (self.output,) = fake_tensors.plain_result(aten.convolution.default, input, weight, bias, *config.spread())
        roles, groups = _roles(input.placements, weight.placements, mesh, config)
        self.input, self.weight, self.bias, self.placements, self.grad_output, *self.grads = zip(*roles, strict=True)
        self.summed = [axis for axis, role in enumerate(roles) if isinstance(role.output, Partial)]
        self.config = config._replace(groups=groups)
        read = layout(input.meta.shape, mesh, self.input)
        written = layout(self.output.shape, mesh, self.grad_output if backward else self.placements)
        source, target = (written, read) if backward else (read, written)
        mirrored = config.transposed != backward
        self.exchange = exchange_between(source, target, config.windows(weight.meta.shape[2:], mirrored))
        self.sparse = mirrored
        self.source_format = memory_format(*((self.output if backward else input.meta)[:2]))
        self.input_format = memory_format(*input.meta[:2])
        self._in_parts, self._backward = in_parts, backward
        self._kernel, self._weights = weight.meta.shape[2:], prod(weight.meta.shape)
        self._depthwise = weight.meta.shape[:2] == (config.groups, 1)
        self._device, self._itemsize = input.device, input.meta.dtype.itemsize
        self._work: dict[tuple[int, ...], _Work] = {}

    def work(self, coordinate: tuple[int, ...], plan: Plan) -> _Work:
        """What the rank at ``coordinate`` computes."""
        if coordinate not in self._work:
            self._work[coordinate] = self._worked_out(coordinate, plan)
        return self._work[coordinate]

    def _worked_out(self, coordinate: tuple[int, ...], plan: Plan) -> _Work:
        dims = self.exchange.dims
        owned, target = self.exchange.source.owned(coordinate).shape, self.exchange.target.owned(coordinate)
        rest = [size for dim, size in enumerate(owned) if dim not in dims]
        if 0 in (plan.needs.size, target.size, *rest):
            return _Work()
        # Beside a large target the copy of a small source shows too: a stem that reads 6 MiB and writes 32 takes an H200 1.05
        # of the plain time in parts and 1.08 with the copy, and 1.00 and 1.13 of its memory.
        larger = max(prod(owned), target.size) * self._itemsize
        slow = self._backward and self._device == "cpu" and self.source_format == torch.channels_last
        enough = larger >= LAST if slow and self.config.groups == 1 else worthwhile(larger, self._device)
        in_parts = enough if self._in_parts is None else self._in_parts
        own = Box(tuple(target.spans[dim] for dim in dims))
        local = _Local(self.config, self.exchange, self.sparse, plan, own)
        work = local.work(in_parts, croppable(owned, self.source_format))
        if work.bulk is None or (self._backward and not work.bulk.recipe.untouched):
            return work
        # On a GPU the strips run beside the bulk, and products after it: 2% to 5% of the time of 64 and 128 channels.
        heavy = self._device == "cpu" or self._weights * LIGHT > prod(owned)
        if heavy and self._backward and owned[0] == self.config.groups == 1:
            return work._replace(products=local.products(self._kernel))
        if self._depthwise and work.strips:
            return work._replace(edge=local.edge(self._kernel, chain.from_iterable(work.strips)))
        return work


def _program(backward: bool, input: DTensor, weight: DTensor, bias: DTensor | None, *rest: Any) -> _Program:
    signatures = (None if tensor is None else dtensors.signature(tensor) for tensor in (input, weight, bias))
    arguments = (tuple(map(int, value)) if isinstance(value, (list, tuple)) else value for value in rest)
    return caching.cached_on_mesh(input.device_mesh, _Program, backward, forced_parts(), *signatures, *arguments)


def _name(weight: torch.Tensor, transposed: bool) -> str:
    return f"conv{'_transpose' if transposed else ''}{weight.ndim - 2}d"


@handlers.register(
    aten.convolution.default,
    traffic="the halo of the input",
    limits="groups that do not divide among the ranks that share the channels gather the channels",
)
def convolution(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.convolution``."""
    input, weight, bias = dtensors.as_dtensors(_name(args[1], args[6]), input=args[0], weight=args[1], bias=args[2])
    program = _program(False, input, weight, bias, *args[3:])
    mesh, result = input.device_mesh, program.output
    if done := dtensors.non_member_result(input, [result], [program.placements]):
        return done[0]
    input = redistribution.redistribute(input, program.input, op)
    weight = redistribution.redistribute(weight, program.weight)
    bias = bias if bias is None else redistribution.redistribute(bias, program.bias)

    def kernel(source: Source, coordinate: tuple[int, ...], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bias = None if any(coordinate[axis] for axis in program.summed) else bias
        whole, bulk, strips, _, edge = program.work(coordinate, source.plan)
        if whole is None:
            out = depend_on(source.shard.new_zeros(program.exchange.target.owned(coordinate).shape), source.shard)
            return out if bias is None else out + bias.view(-1, *[1] * (out.ndim - 2))
        if bulk is None:
            return local_convolution.forward(source.over(whole.recipe), weight, bias, whole.call)
        side = streams.SideStream(source.shard)
        out = local_convolution.forward(source.held(bulk.recipe), weight, bias, bulk.call)
        if edge is not None and depthwise.usable(out):
            depthwise.write_strips(out, source.shard, _halo(source, edge), weight, bias, edge)
            return out
        with side:
            values = [local_convolution.forward(_stacked(source, group), weight, bias, group[0].call) for group in strips]
        for group, value in zip(strips, values, strict=True):
            _write(out, group, value)
        return out

    shards = (None if tensor is None else dtensors.local(tensor) for tensor in (weight, bias))
    out = run(kernel, laid_out(dtensors.local(input), input), program.exchange, mesh, *shards, format=program.source_format)
    return dtensors.wrap(laid_out(out, result), mesh, program.placements, result)


def _stacked(source: Source, group: Sequence[_Part]) -> torch.Tensor:
    """What the parts read, one behind another along the batch."""
    return source.stacked([part.recipe for part in group])


def _write(out: torch.Tensor, group: Sequence[_Part], values: torch.Tensor) -> None:
    """Put the parts, one behind another along the batch of ``values``, where they belong."""
    if len(group) == 1:
        out[group[0].cut].copy_(values)
        return
    both = stacked_view(out, [part.cut for part in group])
    if both is not None:
        both.copy_(values)
        return
    for part, value in zip(group, values.chunk(len(group)), strict=True):
        out[part.cut].copy_(value)


@handlers.register(aten.convolution_backward.default, traffic="the halo of the gradient of the output")
def convolution_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor | None, ...]:
    """Handler of ``aten.convolution_backward``."""
    bias_sizes, *parameters, mask = args[3:]
    name = f"{_name(args[2], parameters[3])} backward"
    grad, input, weight = dtensors.as_dtensors(name, grad_output=args[0], input=args[1], weight=args[2])
    program = _program(True, input, weight, None, *parameters)
    mesh = input.device_mesh
    # Fake tensors do not know the gradients' memory format in every release; the kernels give them the output's.
    format = memory_format(program.output.shape, program.output.stride)
    shapes = tuple(input.shape), tuple(weight.shape), tuple(bias_sizes or ())
    formats = format, format, torch.contiguous_format
    results = [dtensors.Meta(shape, strides(shape, f), input.dtype) for shape, f in zip(shapes, formats, strict=True)]
    if process_groups.coordinate(mesh) is None:
        nothing = dtensors.local(input).new_empty(0)
        grads: list[torch.Tensor | None] = [nothing if wanted else None for wanted in mask]
    else:
        grad = redistribution.redistribute(grad, program.grad_output)
        grads = _local_gradients(program, grad, input, weight, mask)
    wrapped = [
        None if shard is None else dtensors.wrap(laid_out(shard, result), mesh, placements, result)
        for shard, placements, result in zip(grads, program.grads, results, strict=True)
    ]
    if wrapped[1] is not None:
        wrapped[1] = redistribution.redistribute(
            wrapped[1], [_returned(*pair) for pair in zip(program.grads[1], weight.placements, strict=True)]
        )
    return tuple(wrapped)


def _local_gradients(
    program: _Program, grad: DTensor, input: DTensor, weight: DTensor, mask: Sequence[bool]
) -> list[torch.Tensor | None]:
    input = redistribution.redistribute(input, program.input)
    weight = redistribution.redistribute(weight, program.weight)

    def kernel(
        source: Source, coordinate: tuple[int, ...], input: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        input, shard = dense(input, program.input_format), source.shard
        whole, bulk, strips, products, edge = program.work(coordinate, source.plan)

        def gradients(part: _Part, grad: torch.Tensor) -> list[torch.Tensor]:
            # The kernel sums up the bias's on its way. But of ranks that must agree on it, one may have none to call.
            at_once = mask[2] and part.recipe.untouched and Replicate() not in program.grads[2]
            wanted = [*mask[:2], at_once]
            found = local_convolution.backward(grad, input, weight, shard.shape[1:2], part.call, wanted)
            if mask[2] and not at_once:
                found[2] = _bias_gradient(shard)
            return found

        def wanted_of(found: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            return tuple(tensor for tensor, wanted in zip(found, mask, strict=True) if wanted)

        if whole is None:
            found = [torch.zeros_like(input), torch.zeros_like(weight), _bias_gradient(shard)]
        elif bulk is None:
            found = gradients(whole, source.over(whole.recipe))
        else:
            side = streams.SideStream(shard)
            found = gradients(bulk, source.held(bulk.recipe))
            if edge is not None and depthwise.usable(shard):
                halo = _halo(source, edge)
                if mask[0]:
                    depthwise.write_strips(found[0], shard, halo, weight, None, edge)
                if mask[1]:
                    depthwise.add_pairs(found[1], input, halo, edge)
                return wanted_of(found)
            by_strips = mask[0], mask[1] and products is None
            with side:
                more = [_strips_of_gradients(source, group, input, weight, by_strips) for group in strips]
            for group, (values, share) in zip(strips, more, strict=True):
                if by_strips[0]:
                    _write(found[0], group, values)
                if by_strips[1]:
                    found[1].add_(share)
            if mask[1] and products:
                _add_products(found[1], source, input, products, program.config.transposed)
        return wanted_of(found)

    shard = laid_out(dtensors.local(grad), program.output)
    if not any(mask[:2]):
        return [None, None, _bias_gradient(shard)]
    tensors = laid_out(dtensors.local(input), input), dtensors.local(weight)
    grads = iter(run(kernel, shard, program.exchange, grad.device_mesh, *tensors, format=program.source_format))
    return [next(grads) if wanted else None for wanted in mask]


def _bias_gradient(grad: torch.Tensor) -> torch.Tensor:
    return grad.sum([0, *range(2, grad.ndim)])


def _strips_of_gradients(
    source: Source, group: Sequence[_Part], input: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]
) -> tuple[Any, Any]:
    """What the bulk could not know: strips of the input's gradient, and the share in the weight's of pairs across the edge."""
    edges = [input[part.cut] for part in group]
    edge = edges[0] if len(edges) == 1 else torch.cat(edges)
    region, call = _stacked(source, group), group[0].call
    values = local_convolution.backward(region, edge, weight, None, call, [True, False, False])[0] if mask[0] else None
    if not mask[1]:
        return values, None
    for part, each in zip(group, region.chunk(len(group)), strict=True):
        each[part.known].zero_()
    # oneDNN's low-precision gradients of a weight are wrong on some small strips.
    wide = torch.float32 if region.device.type == "cpu" and region.dtype.itemsize < 4 else region.dtype
    region, edge, weight = (tensor.to(wide) for tensor in (region, edge, weight))
    return values, local_convolution.backward(region, edge, weight, None, call, [False, True, False])[1]


def _add_products(
    grad_weight: torch.Tensor, source: Source, input: torch.Tensor, products: Sequence[_Product], transposed: bool
) -> None:
    """Add what pairs across the edges have to add, tap by tap; the batch is one image."""
    source.used = True
    for number, grad, own, tap in products:
        outputs, inputs = source.pieces()[number][grad][0].flatten(1), input[own][0].flatten(1)
        rows, columns = (inputs, outputs) if transposed else (outputs, inputs)
        grad_weight[tap].addmm_(rows, columns.t())


def _halo(source: Source, edge: depthwise.Edge) -> depthwise.Halo:
    source.used = True
    pieces = {box.spans[0].start: piece for box, piece in zip(source.plan.receives, source.pieces(), strict=True)}
    return depthwise.Halo(*(pieces.get(span.start, source.shard) for span in (edge.before, edge.after)))


def _returned(computed: Placement, owner: Placement) -> Placement:
    """The placement in which a weight gets its gradient: its own, or, if it is not sharded, one that saves a collective."""
    if isinstance(owner, Shard):
        return owner
    return Replicate() if isinstance(computed, Shard) else computed


handlers.register_composites(
    __name__,
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    traffic="the halo of the input",
)
