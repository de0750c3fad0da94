"""From a DTensor's mesh and placements to the box that each rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from torchhalo.geometry import Box, Span, cached_chunks, cached_window_chunks, chunks, window_chunks
from torchhalo.torch_internals.grid_shard import BOXES, WindowShard


class Layout(NamedTuple):
    """Which box of a tensor each rank of a mesh owns.

    Attributes:
        shape: Global shape of the tensor.
        mesh_shape: Shape of the mesh.
        cuts: For each dim, the axes that cut it, the outermost cut first.
        windows: For each dim of windows their size, and 1 for the others; nothing if there are none.

    Example:
        >>> layout = Layout(shape=(1, 10), mesh_shape=(4,), cuts=((), (0,)))
        >>> layout.owned((3,))
        Box(spans=(Span(start=0, stop=1, step=1), Span(start=9, stop=10, step=1)))
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]
    windows: tuple[int, ...] = ()

    def window(self, dim: int) -> int:
        """The size of the windows that ``dim`` counts, or 1."""
        return self.windows[dim] if self.windows else 1

    def parts(self, dim: int) -> tuple[Span, ...]:
        """The spans into which ``dim`` is cut, one per combination of coordinates along its axes, in row-major order."""
        counts, window = tuple(self.mesh_shape[axis] for axis in self.cuts[dim]), self.window(dim)
        tracing = torch.compiler.is_compiling()  # dynamo warns of caches, and looks through them
        if window > 1:
            return (window_chunks if tracing else cached_window_chunks)(self.shape[dim], window, counts)
        return (chunks if tracing else cached_chunks)(self.shape[dim], counts)

    def part(self, dim: int, coordinate: Sequence[int]) -> int:
        """Which of ``parts(dim)`` the rank at ``coordinate`` owns."""
        index = 0
        for axis in self.cuts[dim]:
            index = index * self.mesh_shape[axis] + coordinate[axis]
        return index

    def owned(self, coordinate: Sequence[int]) -> Box:
        """The box that the rank at ``coordinate`` owns."""
        return Box(tuple(self.parts(dim)[self.part(dim, coordinate)] for dim in range(len(self.shape))))


def layout(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> Layout:
    """The layout of a tensor of global ``shape``: axes that do not shard it leave each rank the whole of what the others cut.

    Example:
        >>> x = distribute_tensor(torch.ones(1, 3, 8, 10), mesh, [Shard(3)])  # doctest: +SKIP
        >>> layout(x.shape, x.device_mesh, x.placements).owned((1,))  # doctest: +SKIP
    """
    cuts: list[tuple[int, ...]] = [() for _ in shape]
    windows = [1 for _ in shape]
    for axis, placement in enumerate(placements):
        if isinstance(placement, BOXES):
            window = placement.window if isinstance(placement, WindowShard) else 1
            if cuts[placement.dim] and windows[placement.dim] != window:
                raise NotImplementedError(f"a dim can be cut in one way only, got {placements} of shape {tuple(shape)}")
            if isinstance(placement, WindowShard) and placement.sizes[0] != shape[placement.dim]:
                raise NotImplementedError(f"{placement} is of another size than the dim of a tensor of shape {tuple(shape)}")
            cuts[placement.dim] += (axis,)
            windows[placement.dim] = window
        elif not isinstance(placement, (Partial, Replicate)):
            raise NotImplementedError(
                f"torchhalo knows Shard, Replicate and Partial, got {placement!r} on mesh axis {axis}: "
                "redistribute the tensor to one of these first"
            )
    of_windows = any(window > 1 for window in windows)
    return Layout(tuple(map(int, shape)), mesh.shape, tuple(cuts), tuple(windows) if of_windows else ())


def has_layout(tensor: DTensor) -> bool:
    """Whether all placements are such that a rank's shard is a box."""
    return all(isinstance(p, (*BOXES, Replicate, Partial)) for p in tensor.placements)


def is_cut(mesh: DeviceMesh, placements: Sequence[Placement], dim: int) -> bool:
    """Whether different ranks hold different parts of ``dim``."""
    return any(isinstance(p, BOXES) and p.dim == dim and mesh.size(axis) > 1 for axis, p in enumerate(placements))
