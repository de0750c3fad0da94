"""Give a tensor another layout, and another shape of the same elements, by one all-to-all.

Cut both shapes into common factors: each dim of either is then a run of factors, and what a rank owns, a span per dim, is a
few boxes over the factors. Those boxes of the source meet those of the target, and what they share is a message::

    (4, 6) -> (24,)     factors (4, 6); the tokens 10..20 are the end of row 1, row 2 and the start of row 3

So flatten and unflatten are one plan with the sides exchanged, and a change of placements alone is the same with equal shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.gather_dim import gather_dim
from torchhalo.exchange.gathers import notice_move
from torchhalo.exchange.grids import Unfolded, apart_layout, fold, grid_placements, unfold, unfolded, unfolded_meta
from torchhalo.exchange.layout import Layout, layout
from torchhalo.exchange.memory import strides
from torchhalo.geometry import Box
from torchhalo.geometry.reshapes import between, factors, groups, run_of, tiles
from torchhalo.torch_internals import collectives, dtensors, process_groups, redistribution, simulation
from torchhalo.torch_internals.caching import cached_on_mesh
from torchhalo.torch_internals.calls import running_call
from torchhalo.torch_internals.grid_shard import BOXES, has_folded, has_grid, is_grid, move_grids_by
from torchhalo.torch_internals.tracing import depend_on


class Cut(NamedTuple):
    """Where a box over the factors lies in a shard: ``shard[piece].view(shape)[inner]``."""

    piece: tuple[slice, ...]
    shape: tuple[int, ...]
    inner: tuple[slice, ...]

    def of(self, shard: torch.Tensor) -> torch.Tensor:
        return shard[self.piece].view(self.shape)[self.inner]  # a view: dims are cut and never joined


class Plan(NamedTuple):
    """What one rank sends, receives and keeps.

    Attributes:
        sends, receives: In the order of the buffers.
        keeps: Pairs of places in the source's and in the target's shard.
        sent, received: How many elements go to, and come from, each member of the group.
    """

    sends: tuple[Cut, ...]
    receives: tuple[Cut, ...]
    keeps: tuple[tuple[Cut, Cut], ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]


class Relayout(NamedTuple):
    """What every rank knows: how the elements are shaped and cut before and after."""

    source: Layout
    target: Layout

    @classmethod
    def of(cls, input: DTensor, shape: Sequence[int], placements: Sequence[Placement]) -> Relayout:
        mesh = input.device_mesh
        return cls(layout(input.shape, mesh, input.placements), layout(shape, mesh, placements))

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which anything travels."""
        return _travels(self)[0]

    @property
    def unmoved(self) -> bool:
        """Whether every rank's part of the target is its part of the source, in the same order."""
        return _travels(self)[1]

    def plan(self, coordinate: Sequence[int], places: tuple[int, ...]) -> Plan:
        """What the rank at ``coordinate`` does; ``places`` as from `process_groups.submesh_group` of ``axes``."""
        return _plan(self, tuple(coordinate), places)


@lru_cache(maxsize=4096)
def _travels(move: Relayout) -> tuple[tuple[int, ...], bool]:
    """The axes along which anything travels, and whether every rank's part of source and target is the same."""
    source, target = move
    axes: set[int] = set()
    unmoved = True
    for group in groups(source.shape, target.shape) if prod(source.shape) else ():
        cuts = {axis for dim in group.source for axis in source.cuts[dim]}
        others = {axis for dim in group.target for axis in target.cuts[dim]}
        for place in product(*(range(n) if axis in cuts | others else (0,) for axis, n in enumerate(source.mesh_shape))):
            had, wanted = (
                run_of([side.owned(place).spans[dim] for dim in dims], [side.shape[dim] for dim in dims])
                for side, dims in zip(move, group, strict=True)
            )
            if had is None or wanted is None or not had.contains(wanted):
                axes |= cuts
                unmoved = False
            unmoved = unmoved and had == wanted
    return tuple(sorted(axes)), unmoved


def _pieces(side: Layout, other: Layout, coordinate: Sequence[int]) -> list[tuple[tuple[slice, ...], Box]]:
    """What the rank at ``coordinate`` owns: slices of its shard, and the boxes over the factors that these hold."""
    found = factors(side.shape, other.shape)
    assert found is not None
    lines = []
    for span, sizes in zip(side.owned(coordinate).spans, found, strict=True):
        line = [(prod(part.size for part in tile), tile) for tile in tiles(span, sizes)]
        ends = accumulate((size for size, _ in line), initial=0)
        lines.append([(slice(at, at + size), tile) for at, (size, tile) in zip(ends, line, strict=False)])
    return [
        (tuple(part for part, _ in piece), Box(tuple(span for _, tile in piece for span in tile))) for piece in product(*lines)
    ]


@lru_cache(maxsize=1024)
def _plan(move: Relayout, coordinate: tuple[int, ...], places: tuple[int, ...]) -> Plan:
    peers: list[tuple[int, ...]] = [coordinate] * len(places)
    for index, steps in enumerate(product(*(range(move.source.mesh_shape[axis]) for axis in move.axes))):
        moved = dict(zip(move.axes, steps, strict=True))
        peers[places[index]] = tuple(moved.get(axis, own) for axis, own in enumerate(coordinate))
    mine, wanted = _pieces(move.source, move.target, coordinate), _pieces(move.target, move.source, coordinate)
    sends = [[] if p == coordinate else _meet(mine, _pieces(move.target, move.source, p)) for p in peers]
    receives = [[] if p == coordinate else _meet(_pieces(move.source, move.target, p), wanted) for p in peers]
    return Plan(
        tuple(given for pairs in sends for given, _ in pairs),
        tuple(got for pairs in receives for _, got in pairs),
        tuple(_meet(mine, wanted)),
        *(tuple(sum(_size(cut) for cut, _ in pairs) for pairs in messages) for messages in (sends, receives)),
    )


def _meet(source: list[tuple[tuple[slice, ...], Box]], target: list[tuple[tuple[slice, ...], Box]]) -> list[tuple[Cut, Cut]]:
    """What a rank with the pieces ``source`` has for one with the pieces ``target``: where each finds it."""
    return [
        tuple(Cut(piece, box.shape, common.within(box)) for piece, box in ((own, a), (other, b)))  # type: ignore[misc]
        for own, a in source
        for other, b in target
        if (common := a & b).size
    ]


def _size(cut: Cut) -> int:
    return prod(part.stop - part.start for part in cut.inner)


def view_placements(input: DTensor, shape: Sequence[int]) -> list[Placement]:
    """The placements, none of them a grid, of a view of ``input`` with another ``shape``; as `chunk_placements`."""
    return chunk_placements(
        tuple(map(int, input.shape)), tuple(input.placements), input.device_mesh.shape, tuple(map(int, shape))
    )


def chunk_placements(
    source: tuple[int, ...], placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> list[Placement]:
    """The placements, none of them a grid, of a view in ``shape``: each axis cuts a dim of the group that it cut before.

    Within a group each axis in turn gets the first dim that is still large enough to give every rank a part, or the largest.
    """
    return list(_chunk_placements(unfolded(source, placements), mesh_shape, shape))


@lru_cache(maxsize=4096)
def _chunk_placements(source: Unfolded, mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Placement, ...]:
    placements = list(source.placements)
    if not prod(shape):
        return tuple(Replicate() if isinstance(p, BOXES) else p for p in placements)
    for group in groups(source.shape, shape):
        left = {dim: shape[dim] for dim in group.target}
        for axis, placement in enumerate(source.placements):
            if isinstance(placement, BOXES) and placement.dim in group.source:
                parts = mesh_shape[axis]
                large = (dim for dim in left if left[dim] >= max(2, parts))
                dim = next(large, max(left, key=left.__getitem__, default=None))
                placements[axis] = Replicate() if dim is None else Shard(dim)
                if dim is not None:
                    left[dim] = -(-left[dim] // parts)
    return tuple(placements)


def relayout(input: DTensor, result: dtensors.Meta, placements: Sequence[Placement], about: object = None) -> DTensor:
    """``input`` in the shape of ``result``, which holds the same elements in the same order, with other placements.

    Where nothing travels and no rank's part changes, the result is a view of the shard, if its strides allow one. Else only
    what changes owner travels, in one all-to-all. A Partial axis stays one: its summands are moved.

    Args:
        placements: Shard, `GridShard` or Replicate where ``input`` is not Partial.
        about: What watchers of collectives are told; without it, those of moves are told too.
    """
    if has_folded(placements):
        apart = unfolded(tuple(result.shape), tuple(placements)).placements
        return fold(relayout(input, unfolded_meta(result, placements), apart, about), result, placements)
    input = unfold(input)
    mesh, coordinate = input.device_mesh, process_groups.coordinate(input.device_mesh)
    if coordinate is None:
        return dtensors.wrap(dtensors.local(input).new_empty(0), mesh, placements, result)
    move = Relayout.of(input, result.shape, placements)
    if not move.unmoved and factors(move.source.shape, move.target.shape) is None:
        shape = between(move.source.shape, move.target.shape)
        middle = dtensors.Meta(shape, strides(shape, torch.contiguous_format), result.dtype)
        return relayout(relayout(input, middle, view_placements(input, shape), about), result, placements, about)

    def as_it_is(shard: torch.Tensor, *coordinate: int) -> torch.Tensor:
        return shard.reshape(move.target.owned(coordinate).shape)

    def part(shard: torch.Tensor, *coordinate: int) -> torch.Tensor:
        return shard[move.target.owned(coordinate).within(move.source.owned(coordinate))]

    shard = dtensors.local(input)
    if move.unmoved:
        out = simulation.per_rank(as_it_is, shard, *coordinate)
    elif move.source.shape == move.target.shape and not move.axes:
        out = simulation.per_rank(part, shard, *coordinate)
    else:
        out = _moved(shard, move, input, result, about)
    return dtensors.wrap(out, mesh, placements, result)


def _received(move: Relayout, mesh: DeviceMesh) -> int:
    """How many elements a rank receives, on average."""
    places = process_groups.submesh_positions(mesh, move.axes)
    everyone = list(product(*map(range, move.source.mesh_shape)))
    return sum(sum(move.plan(coordinate, places).received) for coordinate in everyone) // len(everyone)


def _moved(shard: torch.Tensor, move: Relayout, input: DTensor, result: dtensors.Meta, about: object) -> torch.Tensor:
    mesh, coordinate = input.device_mesh, process_groups.coordinate(input.device_mesh)
    assert coordinate is not None
    if move.axes and about is None and (call := running_call()) is not None:
        notice_move(call.name, input.shape, lambda: _received(move, mesh) * input.dtype.itemsize)
    group, places = process_groups.submesh_group(mesh, move.axes) if move.axes else (None, (0,))
    order = sorted(range(len(result.shape)), key=lambda dim: result.stride[dim], reverse=True)

    def pack(shard: torch.Tensor, *coordinate: int) -> tuple[Any, ...]:
        plan = move.plan(coordinate, places)
        cuts = [cut.of(shard).reshape(-1) for cut in plan.sends]
        return depend_on(torch.cat(cuts) if cuts else shard.new_empty(0), shard), *plan.received, *plan.sent

    def unpack(shard: torch.Tensor, arrived: torch.Tensor | None, *coordinate: int) -> torch.Tensor:
        plan = move.plan(coordinate, places)
        shape = move.target.owned(coordinate).shape
        dense = shard.new_empty([shape[dim] for dim in order])
        out = dense.permute([order.index(dim) for dim in range(len(order))])
        for given, kept in plan.keeps:
            kept.of(out).copy_(given.of(shard))
        if arrived is None:
            return out
        arrived = collectives.wait(arrived)
        for cut, values in zip(plan.receives, arrived.split([_size(cut) for cut in plan.receives]), strict=True):
            into = cut.of(out)
            into.copy_(values.view(into.shape))
        return out if arrived.numel() else depend_on(out, arrived)

    arrived = None
    if group is not None:
        packed, *counts = simulation.per_rank(pack, shard, *coordinate)
        arrived = collectives.all_to_all(packed, counts[: len(places)], counts[len(places) :], group, about)
    return simulation.per_rank(unpack, shard, arrived, *coordinate)


def with_placements(input: DTensor, placements: Sequence[Placement], about: object = None) -> DTensor:
    """``input`` with other placements, none of them Partial, partial sums added up first; the same object if it has them.

    Args:
        about: As for `relayout`.
    """
    input = redistribution.reduce_partial(input)
    if tuple(placements) == tuple(input.placements):
        return input
    return relayout(input, dtensors.meta(input), placements, about)


class _View:
    """A view of a tensor in another shape, as far as shapes tell it: its placements, and each rank's part if nothing moves."""

    def __init__(self, mesh: DeviceMesh, input: dtensors.Signature, result: dtensors.Meta) -> None:
        apart = unfolded(tuple(input.meta.shape), tuple(input.placements))
        source = layout(apart.shape, mesh, apart.placements)
        placements: Sequence[Placement] = _chunk_placements(apart, mesh.shape, tuple(result.shape))
        if source.windows or not Relayout(source, layout(result.shape, mesh, placements)).unmoved:
            placements = grid_placements(source, apart.placements, tuple(result.shape)) or placements
        self._dims, self._owned = apart_layout(result.shape, mesh, placements)
        self.moves = not Relayout(source, self._owned).unmoved
        self.result = dtensors.Result(mesh, placements, result)
        self._shapes: dict[tuple[int, ...], list[int]] = {}

    def part(self, shard: torch.Tensor, *coordinate: int) -> torch.Tensor:
        """The rank's part, if nothing moves."""
        if coordinate not in self._shapes:
            shape = self._owned.owned(coordinate).shape
            self._shapes[coordinate] = [prod(shape[group.start : group.stop]) for group in self._dims]
        return shard.reshape(self._shapes[coordinate])


def viewed(input: DTensor, result: dtensors.Meta) -> tuple[DTensor, bool]:
    """``input`` in the shape of ``result``, moved only where no placement has it that each rank keeps what it has.

    Returns:
        The view, and whether any rank's part of it is not its part of ``input``.
    """
    view = cached_on_mesh(input.device_mesh, _View, dtensors.signature(input), result)
    coordinate = process_groups.coordinate(input.device_mesh)
    if view.moves or coordinate is None:
        return relayout(input, result, view.result.placements), view.moves
    return view.result.wrap(simulation.per_rank(view.part, dtensors.local(input), *coordinate)), False


def without_grids(tensor: DTensor) -> DTensor:
    """``tensor`` with placements of torch's own; the same object if it has them."""
    if not has_grid(tensor.placements):
        return tensor
    return relayout(tensor, dtensors.meta(tensor), view_placements(tensor, tensor.shape))


def chunked(tensor: torch.Tensor) -> torch.Tensor:
    """`without_grids` with a gradient, of any tensor."""
    if not is_grid(tensor):
        return tensor
    assert isinstance(tensor, DTensor)
    return tensor.redistribute(placements=view_placements(tensor, tensor.shape))


def with_grids(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """``tensor`` with other placements, of which some, before or after, are grids."""
    mesh, pairs, apart = tensor.device_mesh, list(zip(tensor.placements, placements, strict=True)), unfold(tensor)
    kept = [Replicate() if p.is_partial() and p != q else r for (p, q), r in zip(pairs, apart.placements, strict=True)]
    apart = redistribution.redistribute(apart, kept)
    for dim in range(apart.ndim):
        axes = [axis for axis, p in enumerate(kept) if isinstance(p, BOXES) and p.dim == dim]
        if axes and all(placements[axis] == Replicate() for axis in axes):
            kept = [Replicate() if axis in axes else p for axis, p in enumerate(kept)]
            shard = dtensors.local(apart)
            if process_groups.coordinate(mesh) is not None:
                (shard,) = gather_dim((apart,), dim)
            apart = dtensors.wrap(shard, mesh, kept, dtensors.meta(apart))
    moved = relayout(apart, dtensors.meta(tensor), [Replicate() if q.is_partial() and p != q else q for p, q in pairs])
    return redistribution.redistribute(moved, placements)


move_grids_by(with_grids, chunk_placements)
