"""Cutting tensors, reading boxes of arrays, and writing them back: each rank touches its own box alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import DEVICE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torchhalo
from torchhalo.parallel.arrays import spatial_dims


class Guarded:
    """An array that remembers what was read from it."""

    def __init__(self, values: np.ndarray):
        self.values, self.shape, self.read = values, values.shape, 0

    def __getitem__(self, index: Any) -> np.ndarray:
        part = self.values[index]
        self.read += part.size
        return part


@pytest.mark.parametrize(
    "shape, axes, dims",
    [
        ((1, 3, 8, 9), 1, (2,)),
        ((1, 3, 8, 9), 2, (2, 3)),
        ((1, 3, 4, 9, 8), 2, (3, 4)),
        ((1, 3, 9, 4, 8), 2, (2, 4)),
        ((2, 3, 7), 1, (2,)),
    ],
)
def test_the_dims_that_are_chosen(shape: tuple[int, ...], axes: int, dims: tuple[int, ...]) -> None:
    assert spatial_dims(shape, axes) == dims


def test_too_many_axes_for_the_dims() -> None:
    with pytest.raises(ValueError, match=r"mesh of 2 axes.*\(1, 3, 8\) has 1"):
        spatial_dims((1, 3, 8), 2)


def check_shards(mesh_shape: tuple[int, ...], shape: tuple[int, ...], dims: tuple[int, ...] | None) -> None:
    mesh = init_device_mesh(DEVICE, mesh_shape)
    whole = torch.arange(float(np.prod(shape))).view(shape)
    chosen = dims or spatial_dims(shape, mesh.ndim)
    expected = distribute_tensor(whole, mesh, [Shard(dim % len(shape)) for dim in chosen])
    array = Guarded(whole.cpu().numpy())
    for source in (whole, array):
        found = torchhalo.shard(source, mesh, dims)
        assert found.placements == expected.placements and found.shape == expected.shape and found.stride() == expected.stride()
        assert torch.equal(found.to_local(), expected.to_local())
    assert array.read == expected.to_local().numel(), "of an array, only the box is read"


@pytest.mark.parametrize(
    "mesh, shape, dims",
    [
        ((2,), (1, 2, 6, 5), None),
        ((3,), (1, 2, 7, 5), (3,)),
        ((3,), (1, 2, 2, 5), (-2,)),
        ((2, 2), (1, 2, 5, 7), None),
        ((4,), (1, 1, 9, 2, 2), 2),
    ],
)
def test_shards_are_those_of_distribute_tensor(pool, mesh, shape, dims) -> None:
    pool(int(np.prod(mesh))).run(check_shards, mesh, shape, (dims,) if isinstance(dims, int) else dims)


def check_store(mesh_shape: tuple[int, ...], placements: list[Any], path: str) -> None:
    mesh = init_device_mesh(DEVICE, mesh_shape)
    whole = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(0))
    torchhalo.store(distribute_tensor(whole, mesh, placements), np.lib.format.open_memmap(path, mode="r+"))


@pytest.mark.parametrize("placements", [[Shard(2), Shard(3)], [Replicate(), Shard(3)], [Replicate(), Replicate()]])
def test_ranks_write_their_boxes(pool, tmp_path: Path, placements) -> None:
    path = str(tmp_path / "out.npy")
    np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(2, 3, 7, 5)).flush()
    pool(4).run(check_store, (2, 2), placements, path)
    expected = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(np.load(path), expected.cpu().numpy())


def check_errors() -> None:
    mesh = init_device_mesh(DEVICE, (2,))
    x = torch.zeros(1, 2, 4, 4)
    with pytest.raises(ValueError, match=r"`dims` \(=\(2, 3\)\) must name one dim for each of the 1 axes"):
        torchhalo.shard(x, mesh, (2, 3))
    with pytest.raises(ValueError, match=r"`dims` \(=\(4,\)\) must be dims of the tensor.*\(1, 2, 4, 4\)"):
        torchhalo.shard(x, mesh, 4)
    with pytest.raises(TypeError, match="redistribute"):
        torchhalo.shard(torchhalo.shard(x, mesh), mesh)
    with pytest.raises(ValueError, match=r"store: .*\(1, 2, 4, 4\), it has \(1, 2, 4, 5\)"):
        torchhalo.store(torchhalo.shard(x, mesh), np.zeros((1, 2, 4, 5)))


def test_errors(pool) -> None:
    pool(2).run(check_errors)
