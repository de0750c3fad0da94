"""Rows of which each rank has as many as its data say, made a tensor that is cut as `torch.chunk` cuts, and back.

How many there are is known from the data alone: the ranks tell each other, for which the host waits for the device, and then
only rows that change owner travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.layout import layout
from torchhalo.geometry import Span
from torchhalo.torch_internals import collectives, process_groups, tracing


class Rows(NamedTuple):
    """Rows that the ranks along ``axes`` hold one after the other, each as many as it has.

    Attributes:
        counts: Of each rank, in row-major order of ``axes``.
        own: The place of this rank among them.
    """

    mesh: DeviceMesh
    axes: tuple[int, ...]
    counts: tuple[int, ...]
    own: int

    @classmethod
    def told(cls, name: str, count: int, device: torch.device, mesh: DeviceMesh, axes: Sequence[int]) -> Rows:
        """What all ranks know after each has told that it has ``count`` rows; ``name`` is that of the op."""
        must_run(name)
        axes, coordinate = tuple(axes), process_groups.coordinate(mesh)
        assert coordinate is not None
        told = collectives.all_gather(torch.tensor([count], device=device), mesh, axes).flatten().tolist()
        place = 0
        for axis in axes:
            place = place * mesh.size(axis) + coordinate[axis]
        return cls(mesh, axes, tuple(told), place)

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def before(self) -> int:
        """How many rows the ranks before this one have."""
        return sum(self.counts[: self.own])

    def placements(self, others: Sequence[Placement]) -> list[Placement]:
        """Cut along the rows by ``axes``, else as ``others``."""
        return [Shard(0) if axis in self.axes else p for axis, p in enumerate(others)]

    def even(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of all rows, cut as `torch.chunk` cuts, from the ones that it has."""
        return self._moved(rows, self._ragged(), self._chunks())

    def ragged(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that this rank had, from its part as `torch.chunk` cuts: the inverse of `even`."""
        return self._moved(rows, self._chunks(), self._ragged())

    def _ragged(self) -> list[Span]:
        starts = list(accumulate(self.counts, initial=0))
        return [Span(start, start + count) for start, count in zip(starts, self.counts, strict=False)]

    def _chunks(self) -> list[Span]:
        placements = [Shard(0) if axis in self.axes else Replicate() for axis in range(self.mesh.ndim)]
        return list(layout((self.total,), self.mesh, placements).parts(0))

    def _moved(self, rows: torch.Tensor, have: Sequence[Span], want: Sequence[Span]) -> torch.Tensor:
        if list(have) == list(want):
            return rows
        width, (mine, wanted) = prod(rows.shape[1:]), (have[self.own], want[self.own])
        group, places = process_groups.submesh_group(self.mesh, self.axes)
        order = sorted(range(len(places)), key=places.__getitem__)  # the ranks as they stand in the group
        parts = [mine & want[other] for other in order]
        packed = torch.cat([rows[part.within(mine.start)].reshape(-1) for part in parts])
        received = [(have[other] & wanted).size * width for other in order]
        arrived = collectives.all_to_all(packed, received, [part.size * width for part in parts], group)
        by_group = collectives.wait(arrived).split(received)
        return torch.cat([by_group[place] for place in places]).view(wanted.size, *rows.shape[1:])


def must_run(name: str) -> None:
    """Raise if the op ``name``, whose result depends on values, is being recorded and not run."""
    if tracing.is_tracing():
        raise NotImplementedError(
            f"{name}: the shape of the result, or what travels, depends on values along a sharded dim, which torch.compile "
            "cannot trace: put the call in a function under torch.compiler.disable"
        )
