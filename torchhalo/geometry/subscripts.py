"""Where the dims of a tensor are in what is read from it by indices, ``x[:, i, j]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Subscript(NamedTuple):
    """Which dims of a tensor are indexed, and where they are in the result.

    Attributes:
        shape: Of the tensor that is indexed.
        dims: Those that are indexed, in ascending order.
        points: The shape to which the indices broadcast.

    Example:
        >>> Subscript((4, 5, 6), (1,), (7, 8)).result  # x[:, i] with i of shape (7, 8)
        (4, 7, 8, 6)
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    points: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], indices: Sequence[Sequence[int] | None]) -> Subscript:
        """That of a tensor of ``shape`` by indices of these shapes, which broadcast; None for a dim that is not indexed."""
        dims = tuple(dim for dim, index in enumerate(indices) if index is not None)
        found = [tuple(map(int, index)) for index in indices if index is not None]
        ndim = max(map(len, found))
        sizes = zip(*((1,) * (ndim - len(index)) + index for index in found), strict=True)
        return cls(tuple(map(int, shape)), dims, tuple(next((n for n in line if n != 1), 1) for line in sizes))

    @property
    def kept(self) -> list[int]:
        """The dims that are not indexed."""
        return [dim for dim in range(len(self.shape)) if dim not in self.dims]

    @property
    def start(self) -> int:
        """Where the dims of the points begin in the result: in place of indexed dims side by side, else in front."""
        return self.dims[0] if self.dims[-1] - self.dims[0] == len(self.dims) - 1 else 0

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of what is read."""
        kept = [self.shape[dim] for dim in self.kept]
        return *kept[: self.start], *self.points, *kept[self.start :]

    def in_result(self, dim: int) -> int:
        """Where a dim that is not indexed is in the result."""
        place = self.kept.index(dim)
        return place if place < self.start else place + len(self.points)

    def in_input(self, dim: int) -> int | None:
        """The dim of the tensor that ``dim`` of the result is; None for one of the points."""
        if self.start <= dim < self.start + len(self.points):
            return None
        return self.kept[dim if dim < self.start else dim - len(self.points)]
