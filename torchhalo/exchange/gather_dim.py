"""Make shards whole along one dim, for what every rank needs all of, such as the keys of an attention; and the adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.grids import owner_layout
from torchhalo.torch_internals import collectives, dtensors, process_groups, simulation
from torchhalo.torch_internals.tracing import depend_on


def gather_dim(tensors: Sequence[DTensor], dim: int, cause: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """The shards of ``tensors``, which are all cut alike along ``dim``, made whole along it by one collective.

    If nothing cuts ``dim``, nothing travels. The elements of a grid come in the order of their owners.

    Args:
        cause: What a compiler must do before; nothing in particular, if not given.
    """
    shards = tuple(map(dtensors.local, tensors))
    mesh = tensors[0].device_mesh
    owned = owner_layout(tensors[0].shape, mesh, tensors[0].placements)
    axes, parts = owned.cuts[dim], owned.parts(dim)
    if not axes:
        return shards
    largest = max(part.size for part in parts)

    def pack(shards: Sequence[torch.Tensor], cause: torch.Tensor | None) -> torch.Tensor:
        flat = torch.cat([padded(shard, dim, largest).reshape(-1) for shard in shards])
        return flat if cause is None else depend_on(flat, cause)

    def unpack(rows: torch.Tensor, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shapes = [[largest if d == dim else n for d, n in enumerate(shard.shape)] for shard in shards]
        each = rows.split([prod(shape) for shape in shapes], 1)
        return tuple(
            torch.cat([row.view(shape).narrow(dim, 0, part.size) for row, part in zip(flat, parts, strict=True)], dim)
            for flat, shape in zip(each, shapes, strict=True)
        )

    rows = collectives.all_gather(simulation.per_rank(pack, shards, cause), mesh, axes)
    return simulation.per_rank(unpack, rows, *shards)


def scatter_dim(values: Sequence[torch.Tensor], like: Sequence[DTensor], dim: int) -> tuple[torch.Tensor, ...]:
    """The adjoint of `gather_dim`: each rank gets its part of the sum over ranks of ``values``, by one collective."""
    mesh, coordinate = like[0].device_mesh, process_groups.coordinate(like[0].device_mesh)
    assert coordinate is not None
    whole = owner_layout(like[0].shape, mesh, like[0].placements)
    axes, parts = whole.cuts[dim], whole.parts(dim)
    if not axes:
        return tuple(values)
    largest = max(part.size for part in parts)

    def pack(*values: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [
                torch.cat([padded(v.narrow(dim, part.start, part.size), dim, largest).reshape(-1) for v in values])
                for part in parts
            ]
        )

    def unpack(row: torch.Tensor, values: Sequence[torch.Tensor], coordinate: Sequence[int]) -> tuple[torch.Tensor, ...]:
        size = parts[whole.part(dim, coordinate)].size
        shapes = [[largest if d == dim else n for d, n in enumerate(v.shape)] for v in values]
        each = row.split([prod(shape) for shape in shapes])
        return tuple(flat.view(shape).narrow(dim, 0, size) for flat, shape in zip(each, shapes, strict=True))

    row = collectives.reduce_scatter(simulation.per_rank(pack, *values), mesh, axes)
    return simulation.per_rank(unpack, row, tuple(values), coordinate)


def padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``tensor`` with as many zeros after it along ``dim`` as make it ``size`` long."""
    missing = size - tensor.shape[dim]
    return torch.constant_pad_nd(tensor, [0, 0] * (tensor.ndim - 1 - dim) + [0, missing]) if missing else tensor
