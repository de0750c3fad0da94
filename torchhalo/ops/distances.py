"""Distances between all pairs of two sets of vectors, as vector quantizers take them: a rank has its part of either set."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.broadcasting import aligned
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, redistribution, simulation

aten = torch.ops.aten

LIMITS = "vectors that are cut are gathered, and so are the second vectors where both are sharded along one axis"


def _first(placements: list[Placement], ndim: int) -> list[Placement]:
    """The placements of vectors that lie along the second last dim of pairs that are placed so."""
    return [Replicate() if p == Shard(ndim - 1) else p for p in placements]


def _second(placements: list[Placement], ndim: int) -> list[Placement]:
    """The same for vectors that lie along the last dim of the pairs."""
    moved = {Shard(ndim - 2): Replicate(), Shard(ndim - 1): Shard(ndim - 2)}
    return [moved.get(p, p) for p in placements]  # type: ignore[call-overload]


def _pairs(first: DTensor, second: DTensor, shape: tuple[int, ...]) -> list[Placement]:
    """How the pairs are placed: as the first vectors, else as the second ones."""
    ndim, found = len(shape), []
    for placements in zip(first.placements, second.placements, strict=True):
        choice: Placement = Replicate()
        for tensor, place, shift in ((second, placements[1], 1), (first, placements[0], 0)):
            if isinstance(place, Shard) and place.dim < tensor.ndim - 1:
                dim = place.dim + ndim - tensor.ndim
                dim += shift if dim == ndim - 2 else 0
                choice = Shard(dim) if shape[dim] == tensor.shape[place.dim] else choice
        found.append(choice)
    return found


def _shard(op: handlers.Op, tensor: DTensor, placements: list[Placement], shape: tuple[int, ...]) -> torch.Tensor:
    """This rank's part of vectors, of which all pairs have ``shape``."""
    vectors = tensor.ndim - 1
    if Shard(vectors) in tensor.placements:
        whole = [Replicate() if p == Shard(vectors) else p for p in tensor.placements]
        tensor = redistribution.redistribute(tensor, whole, op)
    return dtensors.local(aligned(tensor, placements, (*shape[:-2], *tensor.shape[-2:])))


@handlers.register(
    aten._euclidean_dist.default,
    aten._cdist_forward.default,
    traffic="the second vectors, where both are sharded along one axis; else nothing",
    limits=LIMITS,
)
def cdist(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of what `torch.cdist` calls."""
    first, second, *rest = handlers.bind(op, args, kwargs)
    first, second = dtensors.as_dtensors("cdist", x1=first, x2=second)
    (result,) = fake_tensors.plain_result(op, first, second, *rest)
    placements, ndim = _pairs(first, second, result.shape), len(result.shape)
    if done := dtensors.non_member_result(first, [result], [placements]):
        return done[0]

    def kernel(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return op(first, second, *rest)

    shards = (
        _shard(op, first, _first(placements, ndim), result.shape),
        _shard(op, second, _second(placements, ndim), result.shape),
    )
    return dtensors.wrap(simulation.per_rank(kernel, *shards).contiguous(), first.device_mesh, placements, result)


@handlers.register(
    aten._cdist_backward.default,
    traffic="the second vectors, where both are sharded along one axis; the result is Partial where the second alone are",
    limits=LIMITS,
)
def cdist_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of the gradient of the first vectors, and of the second ones, for which autograd swaps them."""
    grad, first, second, p, distances = handlers.bind(op, args, kwargs)
    grad, first, second, distances = dtensors.as_dtensors("cdist backward", grad=grad, x1=first, x2=second, cdist=distances)
    (result,) = fake_tensors.plain_result(op, grad, first, second, p, distances)
    shape = tuple(map(int, distances.shape))
    pairs, ndim = redistribution.reduced_placements(distances.placements), len(shape)
    placements = [Partial() if each == Shard(ndim - 1) else each for each in pairs]
    if done := dtensors.non_member_result(first, [result], [placements]):
        return done[0]

    def kernel(*shards: torch.Tensor) -> torch.Tensor:
        grad, first, second, distances = (shard.contiguous() for shard in shards)
        return op(grad, first, second, p, distances)

    shards = (
        dtensors.local(aligned(grad, pairs, shape)),
        _shard(op, first, _first(pairs, ndim), shape),
        _shard(op, second, _second(pairs, ndim), shape),
        dtensors.local(aligned(distances, pairs, shape)),
    )
    return dtensors.wrap(simulation.per_rank(kernel, *shards), first.device_mesh, placements, result)
