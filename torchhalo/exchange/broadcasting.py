"""Tensors that broadcast against each other, sharded alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.relayout import relayout
from torchhalo.torch_internals import dtensors, redistribution
from torchhalo.torch_internals.grid_shard import BOXES, at


def moved(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """``tensor`` with other placements: only what changes owner travels.

    Partial sums are added up, unless they are to stay partial sums along that axis.
    """
    pairs = zip(tensor.placements, placements, strict=True)
    tensor = redistribution.redistribute(tensor, [Replicate() if p.is_partial() and p != q else p for p, q in pairs])
    if tensor.placements == tuple(placements):
        return tensor
    meta = dtensors.Meta(tuple(map(int, tensor.shape)), tensor.stride(), tensor.dtype)
    return relayout(tensor, meta, placements)


def shared_placements(shape: Sequence[int], tensors: Iterable[DTensor]) -> list[Placement]:
    """How all of ``tensors``, which broadcast to ``shape``, are to be sharded: along each axis as the first one that is."""
    tensors = list(tensors)

    def along(axis: int) -> Placement:
        for tensor in tensors:
            placement = tensor.placements[axis]
            if isinstance(placement, BOXES):
                dim = placement.dim + len(shape) - tensor.ndim
                if tensor.shape[placement.dim] == shape[dim]:  # else it is broadcast along it
                    return at(placement, dim)
        return Replicate()

    return [along(axis) for axis in range(tensors[0].device_mesh.ndim)]


def aligned(tensor: DTensor, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """``tensor`` cut as ``placements`` cut the ``shape`` to which it broadcasts; summands may stay so, as with `moved`."""
    return moved(tensor, own_placements(tensor, placements, shape))


def own_placements(tensor: DTensor, placements: Sequence[Placement], shape: Sequence[int]) -> list[Placement]:
    """The placements of ``tensor`` where ``placements`` are those of the ``shape`` to which it broadcasts."""
    missing = len(shape) - tensor.ndim

    def own(placement: Placement) -> Placement:
        if placement.is_partial():
            return placement
        if not isinstance(placement, BOXES) or placement.dim < missing:
            return Replicate()
        dim = placement.dim - missing
        return at(placement, dim) if tensor.shape[dim] == shape[placement.dim] else Replicate()

    return [own(placement) for placement in placements]
