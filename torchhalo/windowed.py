"""Run a local kernel over a sharded tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchhalo import dispatch
from torchhalo.exchange import (
    Exchange,
    Index,
    Order,
    Plan,
    Recipe,
    anchor,
    assemble,
    cut_back,
    cut_own,
    empty,
    fold,
    group_places,
    index,
    part_of,
    received,
    recipe,
    resized,
    start,
)
from torchhalo.geometry import Box, Grid, Mirror, Pieces, Relation, Span, Window, crop, shell
from torchhalo.layout import Layout, layout


def exchange_between(source: Layout, target: Layout, windows: Mapping[int, Relation]) -> Exchange:
    """The exchange for an op that reads ``source`` through ``windows``, one per dim that it moves along."""
    return _exchange(source, target, tuple((dim, windows[dim]) for dim in sorted(windows) if source.cuts[dim]))


@lru_cache(maxsize=4096)
def _exchange(source: Layout, target: Layout, windows: tuple[tuple[int, Relation], ...]) -> Exchange:
    return Exchange(source, target, tuple(dim for dim, _ in windows), tuple(window for _, window in windows))


class Source:
    """What one rank sees of a sharded tensor: its shard at once, the rest of what it needs when the halo has come."""

    def __init__(
        self,
        shard: torch.Tensor,
        halo: torch.Tensor | None,
        exchange: Exchange,
        plan: Plan,
        format: torch.memory_format,
        fill: float,
    ) -> None:
        self.shard, self.exchange, self.plan = shard, exchange, plan
        self._halo, self._format, self._order, self._fill = halo, format, memory_order(format, shard.ndim), fill
        self._pieces: list[torch.Tensor] | None = None
        self.used = False

    def pieces(self) -> list[torch.Tensor]:
        """What the rank received, one tensor for each of ``plan.receives``."""
        if self._pieces is None:
            self._pieces = received(self._halo, self.shard, self.exchange, self.plan, self._order)
        return self._pieces

    def over(self, recipe: Recipe) -> torch.Tensor:
        """The tensor over a region, filled up where that reaches beyond it; the shard itself where that is all."""
        self.used |= bool(recipe.landed)
        return assemble(self.shard, self.pieces() if recipe.landed else (), self.exchange.dims, recipe, self._fill)

    def stacked(self, recipes: Sequence[Recipe]) -> torch.Tensor:
        """Regions of one shape, one behind another along the batch, in memory that may be written to."""
        shard, dims = self.shard, self.exchange.dims
        if len(recipes) == 1:
            region = self.over(recipes[0])
            return region.clone() if region is shard else region
        self.used |= any(recipe.landed for recipe in recipes)
        shape = resized(shard.shape, dims, recipes[0].region)
        lines = [recipe.line for recipe in recipes if recipe.line is not None]
        order = self._order or range(shard.ndim)
        if len(lines) == len(recipes) and len({dim for dim, _ in lines}) == 1 and not dispatch.traced(shard):
            dim = lines[0][0]
            if all(shard.shape[outer] == 1 for outer in order[: order.index(dim)]):
                # The regions lie one behind another in memory too: one launch puts them there.
                parts = [part_of(shard, self.pieces(), part) for _, line in lines for part in line]
                line = [len(recipes) * size if d == dim else size for d, size in enumerate(shape)]
                # Into memory of ours: left to itself, torch looks at the strides of the parts to choose a memory format.
                out = empty(shard, [len(recipes), *shape[1:]])
                torch.cat(parts, dim, out=out.as_strided(line, strides(line, self._format)))
                return out
        out = empty(shard, [len(recipes) * shape[0], *shape[1:]])
        for each, part in zip(recipes, out.chunk(len(recipes)), strict=True):
            assemble(shard, self.pieces() if each.landed else (), dims, each, self._fill, part)
        return out

    def held(self, recipe: Recipe) -> torch.Tensor:
        """The part of the shard that a recipe is made of, which has nothing else, as a view."""
        (cut,) = (cut for _, cut in recipe.own)
        return self.shard if recipe.untouched else self.shard[cut]

    def region(self, region: Box | Grid) -> torch.Tensor:
        """As `over`, for a caller that does not keep the recipe."""
        return self.over(recipe(self.exchange, self.plan, region))


def run(
    kernel: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    shard: torch.Tensor,
    exchange: Exchange,
    mesh: DeviceMesh,
    *others: torch.Tensor | None,
    format: torch.memory_format = torch.contiguous_format,
    fill: float = 0.0,
) -> Any:
    """Start the exchange and compute on each rank what it owns of the target.

    Args:
        kernel: Called with a `Source`, the rank's coordinate and ``others``, all of one rank. What it does before it asks the
            source for more than the shard overlaps with the exchange. It returns a tensor or a flat tuple of tensors.
        shard: What this rank holds of the exchange's source.
        others: Tensors that the kernel also wants.
        format: The memory format of the whole source, and of the shard.
        fill: The value of what lies outside the source.
    """
    order = memory_order(format, shard.ndim)
    halo = start(shard, exchange, mesh, order)
    places = group_places(exchange, mesh)

    def on_rank(
        shard: torch.Tensor,
        halo: torch.Tensor | None,
        others: Sequence[torch.Tensor | None],
        coordinate: tuple[int, ...],
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        source = Source(dense(shard, format), halo, exchange, exchange.plan(coordinate, places), format, fill)
        result = kernel(source, coordinate, *others)
        if halo is None:
            return result
        source.pieces()  # also where nobody asked: torch keeps the state of an exchange until it is waited for
        if source.used or not dispatch.traced(halo):
            return result
        halo = dispatch.wait(halo)
        if isinstance(result, torch.Tensor):
            return anchor(result, halo)
        smallest = min(result, key=torch.Tensor.numel)
        return tuple(anchor(tensor, halo) if tensor is smallest else tensor for tensor in result)

    return dispatch.per_rank(on_rank, shard, halo, others, dispatch.coordinate(mesh))


def stacked_view(tensor: torch.Tensor, cuts: Sequence[Index]) -> torch.Tensor | None:
    """The cuts of ``tensor``, of one shape, one behind another along the batch, as a view of it; None where there is none.

    So two strips are written in one launch.
    """
    if len(cuts) != 2 or tensor.shape[0] != 1 or dispatch.traced(tensor):
        return None
    first, second = (tensor[cut] for cut in cuts)
    step = second.storage_offset() - first.storage_offset()
    if step < 0 or first.shape != second.shape:
        return None
    return tensor.as_strided((2, *first.shape[1:]), (step, *first.stride()[1:]), first.storage_offset())


#: How many bytes of shard make bulk and strips the faster way. Measured with the halo given, for 3x3 and 7x7 kernels of 16 to
#: 256 channels, forward and backward. On an H200, in bf16, parts take less of its time than a copy of the shard with its halo
#: from 4 MiB (3x3, 64 channels) or 16 MiB (the others) on: 1.09 against 1.53 of the plain kernel's at 64 MiB. On one core of a
#: CPU, in float32, from 4 MiB (3x3) or 8 MiB (7x7) on: 0.9 against 1.06 at 8 MiB, but 1.4 against 1.2 at 1 MiB.
ENOUGH = {"cpu": 2**22, "cuda": 2**24}

_forced: bool | None = None


@contextmanager
def in_parts(on: bool) -> Iterator[None]:
    """Inside, ops are computed in parts, bulk and strips, wherever they can be, or never; for tests and measurements."""
    global _forced
    before, _forced = _forced, on
    try:
        yield
    finally:
        _forced = before


def forced_parts() -> bool | None:
    """What `in_parts` asks for, or None."""
    return _forced


def worthwhile(size: int, device: str) -> bool:
    """Whether a shard of ``size`` bytes is better computed in parts than put together with its halo in a copy."""
    return size >= ENOUGH.get(device, ENOUGH["cuda"])


def dense(shard: torch.Tensor, format: torch.memory_format) -> torch.Tensor:
    """A shard that is in a memory format already, with the strides that kernels know it by.

    A dim of size one may have any stride. But by that of the batch cuDNN's wrapper tells channels-last, and a view of a single
    image has another: then each convolution turned it around and back.
    """
    if dispatch.traced(shard) or shard.stride() == (usual := strides(shard.shape, format)):
        return shard
    return shard.as_strided(shard.shape, usual)


def canonical(tensor: torch.Tensor, format: torch.memory_format) -> torch.Tensor:
    """``tensor`` in a memory format, with the strides that kernels know it by; a copy only where it is not in that format."""
    return dense(tensor.contiguous(memory_format=format), format)


def croppable(shape: Sequence[int], format: torch.memory_format) -> list[int]:
    """Dims along which a part of a shard is dense in memory, so that a kernel takes it as it is."""
    order = memory_order(format, len(shape)) or tuple(range(len(shape)))
    return [dim for place, dim in enumerate(order) if all(shape[outer] == 1 for outer in order[:place])]


def edges(exchange: Exchange, own: Box, region: Box) -> list[Box] | None:
    """What of ``own`` is wrong if it is computed from ``region`` alone; None where that is more than half of it."""
    inside = []
    for dim, window, outputs, inputs in zip(exchange.dims, exchange.windows, own.spans, region.spans, strict=True):
        assert isinstance(window, (Window, Mirror))
        inside.append(window.inside(outputs, inputs, exchange.source.shape[dim]))
    strips = [strip for strip in shell(own, Box(tuple(inside))) if not region.contains(exchange.needs(strip))]
    return None if 2 * sum(strip.size for strip in strips) > own.size else strips


class Here(NamedTuple):
    """Where one rank stands in a windowed op.

    Attributes:
        coordinate: Its place in the mesh.
        owned: What it owns of the source, all dims.
        outputs: What it owns of the target, all dims.
        region: What the kernel is given of the source (forward), or must give of its gradient (adjoint), over ``dims``.
        dims: The dims that are sharded and have a window.
        padding: By how much the kernel is to pad the region itself, along ``dims``; if empty, not at all.
    """

    coordinate: tuple[int, ...]
    owned: Box
    outputs: Box
    region: Box | Grid
    dims: tuple[int, ...]
    padding: tuple[int, ...] = ()

    def part(self, target: Box, region: Box, padding: tuple[int, ...] = ()) -> Here:
        """The same for a part of the outputs, given along ``dims``."""
        spans = dict(zip(self.dims, target.spans, strict=True))
        outputs = Box(tuple(spans.get(dim, span) for dim, span in enumerate(self.outputs.spans)))
        return self._replace(outputs=outputs, region=region, padding=padding)

    def held(self, dim: int) -> Span:
        """The span of the source along ``dim`` that the region holds; not for a region that is a grid."""
        assert isinstance(self.region, Box)
        return self.region.spans[self.dims.index(dim)] if dim in self.dims else self.owned.spans[dim]

    def where(self, dim: int, span: Span) -> slice:
        """Where ``span`` of the source, which lies in one run of the region, is along ``dim`` of the region's tensor."""
        if dim not in self.dims:
            return span.within(self.owned.spans[dim].start)
        index = self.dims.index(dim)
        line = Box((self.region.spans[index],)) if isinstance(self.region, Box) else Grid((self.region.runs[index],))
        return Box((span,)).within(line)[0]


Region = Callable[[Exchange, Plan, tuple[int, ...]], "Box | Grid"]
Pads = Callable[[int, int, int], bool]


def reach(exchange: Exchange, plan: Plan, coordinate: tuple[int, ...]) -> Box:
    """All that the rank's outputs reach, also beyond the tensor: there the region is filled."""
    own = exchange.target.owned(coordinate)
    return Box(tuple(window.reach(own.spans[dim]) for dim, window in zip(exchange.dims, exchange.windows, strict=True)))


def hull(exchange: Exchange, plan: Plan, coordinate: tuple[int, ...]) -> Box:
    """The smallest box within the tensor that holds all that the rank's outputs read."""
    return plan.needs


def exact(exchange: Exchange, plan: Plan, coordinate: tuple[int, ...]) -> Grid:
    """Just what the rank's outputs read."""
    return plan.exact


def forward(
    kernel: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    input: DTensor,
    windows: Mapping[int, Relation],
    results: Sequence[dispatch.Meta],
    *others: DTensor | None,
    region: Region = hull,
    fill: float = 0.0,
    pads: Pads | None = None,
) -> tuple[DTensor, ...]:
    """Apply a local kernel to a sharded tensor; the results are sharded as it is.

    Args:
        kernel: Called with what ``region`` says of the source, a `Here`, and the shards of ``others``; it returns the rank's
            part of each of ``results``, a tensor if there is one, else a tuple. It is also called where a shard is empty.
        input: Partial sums are added up first.
        windows: For each dim that the op moves along, what an output reads. All dims keep their place.
        results: What plain torch gives for the whole tensor.
        others: Tensors that the kernel also wants, as they are.
        region: `hull`, `reach` or `exact`.
        fill: The value of what lies outside the source.
        pads: For a kernel that pads by itself, as `Here.padding` says, with the same value, and of which the region is what it
            can `reach`: whether it can do so along a dim, by so much at both ends, where the last so many elements are left
            over. Then large shards are computed in parts.

    Example:
        Every second column, of whatever is sharded (below autograd, in a handler)::

            (y,) = forward(lambda region, here: region, x, {3: Window(1, stride=2)}, [result], region=exact)
    """
    mesh = input.device_mesh
    input = dispatch.reduced(input)
    placements = input.placements
    if done := dispatch.outside(input, results, [placements] * len(results)):
        return done
    exchange = exchange_between(layout(input.shape, mesh, placements), layout(results[0].shape, mesh, placements), windows)
    format = memory_format(input.shape, input.stride())

    def on_source(source: Source, coordinate: tuple[int, ...], *others: torch.Tensor | None) -> Any:
        held = region(exchange, source.plan, coordinate)
        here = Here(coordinate, exchange.source.owned(coordinate), exchange.target.owned(coordinate), held, exchange.dims)
        bulk, strips = _parts(exchange, source.plan, here, source.shard, format, pads) if pads else (None, [])
        if bulk is None:
            return kernel(source.region(held), here, *others)
        aside = dispatch.Aside(source.shard)
        found: Any = kernel(source.held(recipe(exchange, source.plan, bulk.region)), bulk, *others)
        with aside:
            parts: list[Any] = [kernel(source.region(strip.region), strip, *others) for strip in strips]
        for strip, part in zip(strips, parts, strict=True):
            cut = strip.outputs.within(here.outputs)
            for whole, value in zip(found, part, strict=True) if isinstance(found, tuple) else [(found, part)]:
                whole[cut].copy_(value)
        return found

    shards = [None if other is None else dispatch.local(other) for other in others]
    out = run(on_source, laid_out(dispatch.local(input), input), exchange, mesh, *shards, format=format, fill=fill)
    outs = (out,) if len(results) == 1 else out
    return tuple(
        dispatch.wrap(laid_out(shard, result), mesh, placements, result) for shard, result in zip(outs, results, strict=True)
    )


def _parts(
    exchange: Exchange, plan: Plan, here: Here, like: torch.Tensor, format: torch.memory_format, pads: Pads
) -> tuple[Here | None, list[Here]]:
    """The bulk and the strips of what a rank computes; None and none to compute it at once.

    Args:
        like: A tensor of the source's kind.
        format: The source's.
    """
    own = Box(tuple(here.outputs.spans[dim] for dim in here.dims))
    wanted = worthwhile(here.owned.size * like.element_size(), like.device.type) if _forced is None else _forced
    if not (wanted and here.owned.size and own.size and plan.receives):
        return None, []
    fitted = []
    for dim, window, outputs, held in zip(here.dims, exchange.windows, own.spans, plan.owned.spans, strict=True):
        assert isinstance(window, Window)
        found = crop(window, held, outputs, False)
        if found is None or not pads(dim, *found[1:]) or (found[0] != held and dim not in croppable(here.owned.shape, format)):
            return None, []
        fitted.append(found)
    region = Box(tuple(span for span, _, _ in fitted))
    strips = edges(exchange, own, region)
    if strips is None:
        return None, []
    reached = [Box(tuple(w.reach(span) for w, span in zip(exchange.windows, s.spans, strict=True))) for s in strips]
    bulk = here.part(own, region, tuple(padding for _, padding, _ in fitted))
    return bulk, [here.part(strip, each) for strip, each in zip(strips, reached, strict=True)]


def adjoint(
    kernel: Callable[..., torch.Tensor],
    grad: DTensor,
    windows: Mapping[int, Relation],
    result: dispatch.Meta,
    *others: DTensor | None,
    region: Region = hull,
    pads: Pads | None = None,
) -> DTensor:
    """The gradient of a linear `forward`: each rank turns its part of ``grad`` into one over all it read, which is folded.

    Args:
        kernel: Called with the rank's shard of ``grad``, a `Here` and the shards of ``others``; it returns a value for each
            element of the region.
        grad: The gradient of the target, sharded as the source is to be.
        windows: As in the forward op.
        result: The source's shape, strides and dtype.
        others: Tensors that the kernel also wants; of the shape of ``grad`` if ``pads`` is given.
        region: `hull` or `exact`.
        pads: As in `forward`, for a kernel that leaves out what falls on the padding. Then a large shard's gradients of what
            other ranks own are computed first, and travel while the kernel turns to the shard.
    """
    mesh = grad.device_mesh
    grad = dispatch.reduced(grad)
    placements = grad.placements
    if done := dispatch.outside(grad, [result], [placements]):
        return done[0]
    exchange = exchange_between(layout(result.shape, mesh, placements), layout(grad.shape, mesh, placements), windows)
    format = memory_format(result.shape, result.stride)

    def parts(plan: Plan, coordinate: tuple[int, ...], shard: torch.Tensor) -> tuple[Here, Here | None, list[Here]]:
        owned, outputs = exchange.source.owned(coordinate), exchange.target.owned(coordinate)
        here = Here(coordinate, owned, outputs, region(exchange, plan, coordinate), exchange.dims)
        bulk, strips = _parts(exchange, plan, here, shard, format, pads) if pads else (None, [])
        return (here, None, []) if bulk is None or bulk.region != plan.owned else (here, bulk, strips)

    def edge(
        plan: Plan, coordinate: tuple[int, ...], shard: torch.Tensor, *others: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        here, bulk, strips = parts(plan, coordinate, shard)
        if bulk is None:
            values = kernel(shard, here, *others)
            return cut_back(values, exchange, plan, region is exact), values
        found = []
        for strip in strips:
            cut = strip.outputs.within(here.outputs)
            reads = exchange.needs(Box(tuple(strip.outputs.spans[dim] for dim in here.dims)))
            found.append((reads, kernel(shard[cut], strip._replace(region=reads), *(other[cut] for other in others))))
        return [_gathered(box, found, exchange) for box in plan.receives], shard

    def rest(
        plan: Plan, coordinate: tuple[int, ...], values: torch.Tensor, shard: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        _, bulk, _ = parts(plan, coordinate, shard)
        return cut_own(values, exchange, plan, region is exact) if bulk is None else kernel(shard, bulk, *others)

    tensors = [laid_out(dispatch.local(grad), grad), *(None if other is None else dispatch.local(other) for other in others)]
    out = fold(edge, rest, exchange, mesh, *tensors, order=memory_order(format, len(result.shape)))
    return dispatch.wrap(laid_out(out, result), mesh, placements, result)


def _gathered(box: Box, found: Sequence[tuple[Box, torch.Tensor]], exchange: Exchange) -> torch.Tensor:
    """What regions that may overlap have for ``box``, added up."""
    meeting = [(region, values, box & region) for region, values in found if (box & region).size]
    if len(meeting) == 1 and meeting[0][2] == box:
        region, values, _ = meeting[0]
        return values[index(exchange, box, region)]
    like = meeting[0][1]
    out = empty(like, resized(like.shape, exchange.dims, box.shape)).zero_()
    for region, values, common in meeting:
        out[index(exchange, common, box)] += values[index(exchange, common, region)]
    return out


def gather_pieces(region: torch.Tensor, here: Here, relations: Mapping[int, Pieces]) -> torch.Tensor:
    """The rank's outputs, cut from the region piece by piece along each dim: a kernel for `forward`, best with `exact`.

    Args:
        region: As the kernel gets it.
        relations: As `forward` got them; the pieces cover all outputs. Dims that are not sharded are cut too.

    Example:
        Roll by two along dim 3 (below autograd, in a handler)::

            ring = {3: Pieces((Piece(Span(0, 2), first=size - 2), Piece(Span(2, size), first=0)))}
            (y,) = forward(lambda r, here: gather_pieces(r, here, ring), x, ring, [result], region=exact)
            x_grad = adjoint(lambda g, here: scatter_pieces(g, here, ring), y_grad, ring, source, region=exact)
    """
    for dim, relation in relations.items():
        parts = []
        for piece in relation.pieces:
            mine = piece.outputs & here.outputs.spans[dim]
            if mine.size:
                part = region[_along(dim, here.where(dim, piece.image(mine)))]
                if piece.sign == 0:
                    part = part.expand([mine.size if d == dim else -1 for d in range(part.ndim)])
                parts.append(part.flip(dim) if piece.sign == -1 else part)
        region = torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else region.narrow(dim, 0, 0)
    return region


def scatter_pieces(grad: torch.Tensor, here: Here, relations: Mapping[int, Pieces]) -> torch.Tensor:
    """The adjoint of `gather_pieces`: each output's gradient is added where it was read. A kernel for `adjoint`."""
    for dim, relation in relations.items():
        parts = []
        for piece in relation.pieces:
            mine = piece.outputs & here.outputs.spans[dim]
            if mine.size:
                part = grad[_along(dim, mine.within(here.outputs.spans[dim].start))]
                part = part.sum(dim, keepdim=True) if piece.sign == 0 else part
                parts.append((here.where(dim, piece.image(mine)), part.flip(dim) if piece.sign == -1 else part))
        shape = list(grad.shape)
        shape[dim] = here.region.shape[here.dims.index(dim)] if dim in here.dims else here.owned.spans[dim].size
        # The largest piece often covers all there is: then it need not be added to zeros.
        parts.sort(key=lambda part: part[1].shape[dim], reverse=True)
        whole = bool(parts) and parts[0][1].shape[dim] == shape[dim]
        if whole and len(parts) == 1:
            grad = parts[0][1]
            continue
        grad = parts[0][1].clone() if whole else grad.new_zeros(shape)
        for cut, part in parts[whole:]:
            grad[_along(dim, cut)] += part
    return grad


def _along(dim: int, cut: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, cut)


def laid_out(shard: torch.Tensor, whole: DTensor | dispatch.Meta) -> torch.Tensor:
    """The shard in the memory format of the whole tensor."""
    stride = whole.stride() if isinstance(whole, DTensor) else whole.stride
    return shard.contiguous(memory_format=memory_format(whole.shape, stride))


def memory_format(shape: Sequence[int], stride: Sequence[int]) -> torch.memory_format:
    """The memory format of a tensor, for `torch.Tensor.contiguous`: channels-last if it is that and nothing else."""
    return _memory_format(tuple(map(int, shape)), tuple(map(int, stride)))


@lru_cache(maxsize=4096)
def _memory_format(shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if len(shape) not in formats or _dense(shape, stride, range(len(shape))):
        return torch.contiguous_format
    return formats[len(shape)] if _dense(shape, stride, (0, *range(2, len(shape)), 1)) else torch.contiguous_format


def memory_order(format: torch.memory_format, ndim: int) -> Order:
    """The dims as they lie in memory, the outermost first; None for the usual order."""
    return None if format == torch.contiguous_format else (0, *range(2, ndim), 1)


def strides(shape: Sequence[int], format: torch.memory_format) -> tuple[int, ...]:
    """The strides of a dense tensor of ``shape`` in a memory format."""
    return _strides(tuple(map(int, shape)), format)


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...], format: torch.memory_format) -> tuple[int, ...]:
    order = memory_order(format, len(shape)) or range(len(shape))
    found = dict.fromkeys(order, 1)
    for place, dim in enumerate(order):
        found[dim] = prod(max(1, shape[inner]) for inner in order[place + 1 :])
    return tuple(found[dim] for dim in range(len(shape)))


def formatted(result: dispatch.Meta, like: DTensor) -> dispatch.Meta:
    """``result`` in the memory format of ``like``: for ops whose kernels keep it, which fake tensors do not always know."""
    return result._replace(stride=strides(result.shape, memory_format(like.shape, like.stride())))


def formatted_on_cpu(result: dispatch.Meta, like: DTensor) -> dispatch.Meta:
    """The same for ops of which only the CPU's kernel keeps the memory format."""
    if like.device.type == "cpu":
        return formatted(result, like)
    return result._replace(stride=strides(result.shape, torch.contiguous_format))


def _dense(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the dims lie in memory in ``order``, the outermost first, without gaps."""
    return all(
        shape[dim] == 1 or stride[dim] == prod(shape[inner] for inner in order[place + 1 :]) for place, dim in enumerate(order)
    )
