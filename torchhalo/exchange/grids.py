"""Dims that were flattened from several of which one is cut: the same tensor with those dims apart, where a rank owns a box."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.layout import Layout, layout
from torchhalo.geometry import Box, Span
from torchhalo.geometry.reshapes import factors, groups
from torchhalo.torch_internals import dtensors, process_groups, simulation
from torchhalo.torch_internals.caching import cached_on_mesh
from torchhalo.torch_internals.grid_shard import BOXES, GridShard, WindowShard, has_folded


class Unfolded(NamedTuple):
    """A shape with the dims of its grids apart.

    Attributes:
        shape, placements: Of the tensor with these dims; of grids, there are only those of one dim.
        dims: For each dim of the folded tensor, those of the unfolded one.
    """

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    dims: tuple[range, ...]


@lru_cache(maxsize=4096)
def unfolded(shape: tuple[int, ...], placements: tuple[Placement, ...]) -> Unfolded:
    """What a tensor of ``shape`` looks like with the dims of its grids apart.

    >>> unfolded((2, 48, 5), (GridShard(1, (6, 8), 1),)).shape
    (2, 6, 8, 5)
    """
    grids = {p.dim: p.sizes for p in placements if isinstance(p, GridShard)}
    parts = [grids.get(dim, (size,)) for dim, size in enumerate(shape)]
    starts = [*accumulate(map(len, parts), initial=0)]
    kept: list[Placement] = []
    for p in placements:
        if isinstance(p, GridShard):
            if grids[p.dim] != p.sizes or prod(p.sizes) != shape[p.dim]:
                raise NotImplementedError(f"a dim can be one grid only, got {placements} of shape {shape}")
            dim = starts[p.dim] + p.part
            p = Shard(dim) if p.window == 1 else WindowShard(dim, p.sizes[p.part], p.window)
        elif isinstance(p, BOXES):
            if p.dim in grids:
                raise NotImplementedError(f"a dim can be cut as a grid or as a whole, got {placements} of shape {shape}")
            p = Shard(starts[p.dim])
        kept.append(p)
    return Unfolded(
        tuple(size for sizes in parts for size in sizes),
        tuple(kept),
        tuple(range(start, start + len(sizes)) for start, sizes in zip(starts, parts, strict=False)),
    )


def unfolded_meta(meta: dtensors.Meta, placements: Sequence[Placement]) -> dtensors.Meta:
    """The `Meta` of a tensor with the dims of its grids apart."""
    shape, _, dims = unfolded(tuple(map(int, meta.shape)), tuple(placements))
    stride: list[int] = []
    for group, step in zip(dims, meta.stride, strict=True):
        sizes = shape[group.start : group.stop]
        stride += [prod(sizes[part + 1 :]) * step for part in range(len(sizes))]
    return dtensors.Meta(shape, tuple(stride), meta.dtype)


def apart_layout(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[tuple[range, ...], Layout]:
    """For each dim of a tensor, those that it becomes with the dims of its grids apart, and the layout of these."""
    apart = unfolded(tuple(map(int, shape)), tuple(placements))
    return apart.dims, layout(apart.shape, mesh, apart.placements)


class _Unfold:
    """A tensor with the dims of its grids apart, as far as shapes tell it."""

    def __init__(self, mesh: DeviceMesh, tensor: dtensors.Signature) -> None:
        meta = unfolded_meta(tensor.meta, tensor.placements)
        placements = unfolded(tensor.meta.shape, tensor.placements).placements
        self.result, self._owned = dtensors.Result(mesh, placements, meta), layout(meta.shape, mesh, placements)
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def part(self, shard: torch.Tensor, *coordinate: int) -> torch.Tensor:
        if coordinate not in self._shapes:
            self._shapes[coordinate] = tuple(self._owned.owned(coordinate).shape)
        return shard.view(self._shapes[coordinate])


def unfold(tensor: DTensor) -> DTensor:
    """``tensor`` with the dims of its grids apart: a view."""
    if not has_folded(tensor.placements):
        return tensor
    apart = cached_on_mesh(tensor.device_mesh, _Unfold, dtensors.signature(tensor))
    shard, coordinate = dtensors.local(tensor), process_groups.coordinate(tensor.device_mesh)
    return apart.result.wrap(shard if coordinate is None else simulation.per_rank(apart.part, shard, *coordinate))


def fold(tensor: DTensor, meta: dtensors.Meta, placements: Sequence[Placement]) -> DTensor:
    """The tensor of ``meta`` and ``placements`` of which ``tensor`` is the one with the dims of its grids apart."""
    dims, mesh = unfolded(tuple(meta.shape), tuple(placements)).dims, tensor.device_mesh

    def joined(shard: torch.Tensor) -> torch.Tensor:
        return shard.reshape([prod(shard.shape[group.start : group.stop]) for group in dims])

    shard = dtensors.local(tensor)
    if process_groups.coordinate(mesh) is not None:
        shard = simulation.per_rank(joined, shard)
    return dtensors.wrap(shard, mesh, placements, meta)


class OwnerLayout(NamedTuple):
    """The layout of a tensor with grids, if the elements of each dim are numbered by owner: those of the first rank first.

    For what does not mind in which order it meets the elements of a dim. Attributes and methods are those of a `Layout`.
    """

    apart: Layout
    dims: tuple[range, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(prod(self.apart.shape[group.start : group.stop]) for group in self.dims)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        return self.apart.mesh_shape

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(axis for dim in group for axis in self.apart.cuts[dim]) for group in self.dims)

    def parts(self, dim: int) -> tuple[Span, ...]:
        sizes = [prod(part.size for part in each) for each in product(*(self.apart.parts(d) for d in self.dims[dim]))]
        return tuple(Span(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True))

    def part(self, dim: int, coordinate: Sequence[int]) -> int:
        index = 0
        for each in self.dims[dim]:
            index = index * len(self.apart.parts(each)) + self.apart.part(each, coordinate)
        return index

    def owned(self, coordinate: Sequence[int]) -> Box:
        return Box(tuple(self.parts(dim)[self.part(dim, coordinate)] for dim in range(len(self.dims))))


def owner_layout(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout | OwnerLayout:
    """The layout of a tensor of which each rank owns a box, if elements may be numbered by owner."""
    if not has_folded(placements):
        return layout(shape, mesh, placements)
    dims, apart = apart_layout(shape, mesh, placements)
    return OwnerLayout(apart, dims)


def positions(tensor: DTensor, coordinate: Sequence[int]) -> list[torch.Tensor]:
    """For each dim of ``tensor``, which of its elements the rank at ``coordinate`` has, in the order in which it has them."""
    shape, placements, dims = unfolded(tuple(map(int, tensor.shape)), tuple(tensor.placements))
    spans = layout(shape, tensor.device_mesh, placements).owned(coordinate).spans
    found = []
    for group in dims:
        places = torch.zeros(1, dtype=torch.long)
        for dim in group:
            places = (places[:, None] * shape[dim] + torch.arange(*spans[dim])).flatten()
        found.append(places)
    return found


@lru_cache(maxsize=4096)
def grid_placements(source: Layout, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> tuple[Placement, ...] | None:
    """The placements with which a view in ``shape`` of a tensor with ``placements`` moves nothing; None if there are none.

    Where an image is split into windows that the cuts run through, each window goes with most of it, and what is joined from
    such windows is cut again as the image was: there no more than the rest of those windows moves.
    """
    if not prod(shape):
        return None
    before, after = factors(source.shape, shape), factors(shape, source.shape)
    if before is None or after is None:
        return None
    firsts = [*accumulate(map(len, before), initial=0)]  # of all factors, the first of each source dim
    places = [(dim, part) for dim, sizes in enumerate(after) for part in range(len(sizes))]
    cut: dict[int, tuple[int, int]] = {}
    windows: dict[tuple[int, int], int] = {}
    for axis, p in enumerate(placements):
        if isinstance(p, BOXES):
            window = _window_of(source, p.dim, before[p.dim], shape)
            if window is None:
                return None
            cut[axis] = places[firsts[p.dim]]
            windows[cut[axis]] = window
    found = list(placements)
    for dim, sizes in enumerate(after):
        axes = {axis: part for axis, (other, part) in cut.items() if other == dim}
        parts = [
            _Part(size, tuple(axis for axis, at in axes.items() if at == part), windows.get((dim, part), 1))
            for part, size in enumerate(sizes)
        ]
        for axis, placement in _along(dim, parts, source.mesh_shape, len(shape)).items():
            found[axis] = placement
    return tuple(found)


#: Tensors of fewer dims are no images of a batch with channels.
_IMAGE = 4


def _window_of(source: Layout, dim: int, sizes: tuple[int, ...], shape: tuple[int, ...]) -> int | None:
    """The windows that the first of ``sizes``, apart from which are those that ``dim`` is joined from, counts where it is cut.

    None if it cannot be cut where ``dim`` is, or near there.
    """
    if not sizes:
        return None
    rows, inner, axes, mesh_shape, window = sizes[0], prod(sizes[1:]), source.cuts[dim], source.mesh_shape, source.window(dim)
    found = _same_cuts(rows, inner, axes, mesh_shape, window)
    if found is None and window == 1 and len(source.shape) >= _IMAGE and rows >= prod(mesh_shape[axis] for axis in axes):
        (group,) = (group for group in groups(source.shape, shape) if dim in group.source)
        if all(source.shape[other] == 1 for other in group.source if other != dim):
            return inner
    return found


@lru_cache(maxsize=4096)
def _same_cuts(rows: int, inner: int, axes: tuple[int, ...], mesh_shape: tuple[int, ...], window: int) -> int | None:
    """The windows which ``rows`` counts if ``axes`` cut these where they cut rows of ``inner`` elements; None if never.

    Args:
        window: That of the elements.
    """
    whole = Layout((rows * inner,), mesh_shape, (axes,), (window,)).parts(0)
    for each in (inner * window, 1) if window > 1 else (1,):
        pairs = zip(Layout((rows,), mesh_shape, (axes,), (each,)).parts(0), whole, strict=True)
        if all((row.start * inner, row.stop * inner) == tuple(span[:2]) or not (row.size or span.size) for row, span in pairs):
            return each
    return None


class _Part(NamedTuple):
    size: int
    axes: tuple[int, ...]
    window: int


def _along(dim: int, given: list[_Part], mesh_shape: tuple[int, ...], ndim: int) -> dict[int, Placement]:
    """The placements of the axes that cut a dim which is joined from parts.

    Parts are joined that need not be apart, so that one grid has one name.
    """
    parts: list[_Part] = []
    for part in given:
        last = parts[-1] if parts else None
        if last and not part.axes and last.window == 1 and _same_cuts(last.size, part.size, last.axes, mesh_shape, 1):
            part = _Part(last.size * part.size, parts.pop().axes, 1)
        parts.append(part)
    axes = {axis: place for place, part in enumerate(parts) for axis in part.axes}
    sizes, window = [part.size for part in parts], parts[0].window if parts else 1
    if (len(parts) == 1 and window == 1) or (ndim >= _IMAGE and 1 < window == prod(sizes[1:]) and set(axes.values()) == {0}):
        return {axis: Shard(dim) for axis in axes}
    if len(parts) == 1:
        return {axis: WindowShard(dim, sizes[0], window) for axis in axes}
    return {axis: GridShard(dim, sizes, place, parts[place].window) for axis, place in axes.items()}
