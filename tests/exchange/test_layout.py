"""The boxes of a layout against what DTensor really puts on each rank, simulated and real."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from harness import DEVICE, simulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pools import Pool
from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from torchhalo.exchange.layout import Layout, layout
from torchhalo.geometry import Box, Span
from torchhalo.torch_internals import process_groups, simulation

Where = dict[tuple[int, ...], tuple[int, ...]]


def numbered(shape: Sequence[int]) -> torch.Tensor:
    """A plain tensor whose elements say where they lie, none of them zero."""
    with maybe_disable_local_tensor_mode():
        return torch.arange(1, math.prod(shape) + 1).reshape(tuple(shape))


def check(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], scatter: bool = True) -> Where:
    """The layout of a DTensor says which elements it holds here; the shapes that were found, by coordinate in the mesh.

    Args:
        scatter: Whether DTensor scatters the tensor, or every rank cuts out its own part.
    """
    full = numbered(shape)
    kept = [Replicate() if isinstance(p, Partial) else p for p in placements]
    held = distribute_tensor(full, mesh, kept, src_data_rank=0 if scatter else None)
    if kept != list(placements):
        shard, stride = held.to_local(), full.stride()
        held = DTensor.from_local(shard, mesh, placements, run_check=False, shape=full.shape, stride=stride)
    boxes = layout(held.shape, held.device_mesh, held.placements)
    found: Where = {}

    def on_rank(shard: torch.Tensor, *coordinate: int) -> torch.Tensor:
        box = boxes.owned(coordinate)
        expected = full[box.within(Box(tuple(Span(0, size) for size in shape)))]
        assert shard.shape == expected.shape == box.shape, (coordinate, box)
        assert torch.equal(shard, expected), (coordinate, box)
        found[tuple(coordinate)] = tuple(shard.shape)
        return shard

    coordinate = process_groups.coordinate(mesh)
    if coordinate is not None:
        simulation.per_rank(on_rank, held.to_local(), *coordinate)
    return found


@st.composite
def tensors(draw: st.DrawFn, mesh: tuple[int, ...]) -> tuple[list[int], list[Placement]]:
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    sharded = [Shard(dim) for dim in range(len(shape))]
    anything = [Replicate(), Partial(), *sharded, *sharded]
    return shape, [draw(st.sampled_from(anything)) for _ in mesh]


@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (4,), (2, 2), (3, 1), (2, 3), (2, 2, 2)], ids=str)
def test_random_layouts_on_simulated_ranks(mesh_shape: tuple[int, ...]) -> None:
    with simulated(math.prod(mesh_shape)):
        mesh = init_device_mesh(DEVICE, mesh_shape)

        @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(tensors(mesh_shape))
        def run(tensor: tuple[list[int], list[Placement]]) -> None:
            assert set(check(tensor[0], mesh, tensor[1])) == set(product(*map(range, mesh_shape)))

        run()


#: Shape, placements, and the shapes of the shards in row-major order of the mesh.
KNOWN: list[tuple[tuple[int, ...], tuple[int, ...], list[Placement], list[tuple[int, ...]]]] = [
    ((4,), (10, 2), [Shard(0)], [(3, 2), (3, 2), (3, 2), (1, 2)]),
    ((4,), (5,), [Shard(0)], [(2,), (2,), (1,), (0,)]),
    ((4,), (2, 3), [Shard(0)], [(1, 3), (1, 3), (0, 3), (0, 3)]),
    ((2, 2), (5, 3), [Shard(0), Shard(1)], [(3, 2), (3, 1), (2, 2), (2, 1)]),
    ((2, 2), (5, 3), [Shard(1), Shard(0)], [(3, 2), (2, 2), (3, 1), (2, 1)]),
    ((2, 2), (9,), [Shard(0), Shard(0)], [(3,), (2,), (2,), (2,)]),
    ((2, 2), (2,), [Shard(0), Shard(0)], [(1,), (0,), (1,), (0,)]),
    ((2, 2), (5, 3), [Replicate(), Shard(-1)], [(5, 2), (5, 1), (5, 2), (5, 1)]),
    ((2, 2), (5, 3), [Shard(0), Partial()], [(3, 3), (3, 3), (2, 3), (2, 3)]),
]


@pytest.mark.parametrize("mesh_shape, shape, placements, shards", KNOWN, ids=str)
def test_known_layouts(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], placements: list[Placement], shards: list[tuple[int, ...]]
) -> None:
    with simulated(math.prod(mesh_shape)):
        found = check(shape, init_device_mesh(DEVICE, mesh_shape), placements)
    assert [found[coordinate] for coordinate in product(*map(range, mesh_shape))] == shards


def test_negative_dims_count_from_the_end() -> None:
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        assert layout((4, 6), mesh, [Shard(-1)]) == layout((4, 6), mesh, [Shard(1)])
        assert layout((4, 6), mesh, [Shard(-2)]) == layout((4, 6), mesh, [Shard(0)])


def test_sub_mesh_of_simulated_ranks() -> None:
    """Both fibers of the sub-mesh hold the whole tensor, and the layout knows of one axis only."""
    with simulated(4):
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("batch", "space"))
        for name in ("batch", "space"):
            assert check((3, 5), mesh[name], [Shard(1)]) == {(0,): (3, 3), (1,): (3, 2)}
        assert layout((3, 5), mesh["space"], [Shard(1)]).mesh_shape == (2,)


def test_a_mesh_in_the_memory_of_a_freed_one() -> None:
    """Simulated ranks have their coordinates in the mesh that is asked, not in one that was there before."""
    with simulated(4):
        mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("batch", "space"))
        ranks = LocalTensor({rank: torch.tensor(rank) for rank in range(4)})

        def on_rank(rank: torch.Tensor, at: int) -> torch.Tensor:
            assert at == {"batch": rank // 2, "space": rank % 2}[name]
            return rank

        for name in ("batch", "space"):
            meshes = [mesh[name] for _ in range(20)]
            for each in meshes:
                simulation.per_rank(on_rank, ranks, *(process_groups.coordinate(each) or ()))
            del meshes, each


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_each_element_is_owned_once_per_copy(data: st.DataObject) -> None:
    """Pure: the ranks that differ along the cutting axes only divide the tensor among them."""
    mesh_shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=2)))
    homes = [data.draw(st.integers(-1, len(shape) - 1)) for _ in mesh_shape]
    cuts = tuple(tuple(axis for axis, home in enumerate(homes) if home == dim) for dim in range(len(shape)))
    boxes = Layout(shape, mesh_shape, cuts)
    count = torch.zeros(shape, dtype=torch.int64)
    for coordinate in product(*map(range, mesh_shape)):
        count[boxes.owned(coordinate).within(Box(tuple(Span(0, size) for size in shape)))] += 1
    copies = math.prod(size for size, home in zip(mesh_shape, homes, strict=True) if home < 0)
    assert torch.equal(count, torch.full_like(count, copies))


def test_strided_shard_is_refused() -> None:
    with simulated(4):
        mesh = init_device_mesh(DEVICE, (2, 2))
        strided = _StridedShard(1, split_factor=2)
        with pytest.raises(NotImplementedError) as raised:
            layout((4, 8), mesh, [Replicate(), strided])
    words = str(raised.value)
    assert str(strided) in words or repr(strided) in words
    assert "mesh axis 1" in words and "redistribute" in words


# Real ranks.

Ranks = list[Any]


def _on_meshes(cases: list[tuple[Ranks, tuple[int, ...], list[Placement]]], scatter: bool) -> list[Where]:
    return [check(shape, DeviceMesh(DEVICE, ranks), placements, scatter) for ranks, shape, placements in cases]


def _on_sub_meshes() -> list[Where]:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("batch", "space"))
    return [check((3, 5), mesh[name], [Shard(1)]) for name in ("batch", "space")]


def test_layouts_on_real_ranks(pool: Callable[[int], Pool]) -> None:
    cases = [([[0, 1], [2, 3]], shape, placements) for mesh_shape, shape, placements, _ in KNOWN if mesh_shape == (2, 2)]
    cases += [([0, 1, 2, 3], shape, placements) for mesh_shape, shape, placements, _ in KNOWN if mesh_shape == (4,)]
    expected = [shards for size in ((2, 2), (4,)) for mesh_shape, _, _, shards in KNOWN if mesh_shape == size]
    for rank, found in enumerate(pool(4).run(_on_meshes, cases, True)):
        assert [list(where.values()) for where in found] == [[shards[rank]] for shards in expected]


def test_mesh_over_some_of_the_real_ranks(pool: Callable[[int], Pool]) -> None:
    """Ranks outside the mesh have no coordinate; those inside divide the tensor."""
    cases = [([1, 3], (3, 5), [Shard(1)]), ([[0], [2], [3]], (3, 5), [Shard(1), Shard(0)])]
    two, three = zip(*pool(4).run(_on_meshes, cases, True), strict=True)
    assert two == ({}, {(0,): (3, 3)}, {}, {(1,): (3, 2)})
    assert three == ({(0, 0): (3, 2)}, {}, {(1, 0): (3, 2)}, {(2, 0): (3, 1)})


def test_mesh_whose_ranks_are_not_in_order(pool: Callable[[int], Pool]) -> None:
    """A rank owns what its coordinate says. (DTensor's scatter goes by position in the group, its local cut by coordinate.)"""
    cases = [([[3, 1], [0, 2]], (3, 5), [Shard(0), Shard(1)]), ([3, 1], (5,), [Shard(0)])]
    crossed, reverse = zip(*pool(4).run(_on_meshes, cases, False), strict=True)
    assert crossed == ({(1, 0): (1, 3)}, {(0, 1): (2, 2)}, {(1, 1): (1, 2)}, {(0, 0): (2, 3)})
    assert reverse == ({}, {(1,): (2,)}, {}, {(0,): (3,)})


def test_sub_mesh_of_real_ranks(pool: Callable[[int], Pool]) -> None:
    left, right = (3, 3), (3, 2)
    batch, space = zip(*pool(4).run(_on_sub_meshes), strict=True)
    assert batch == ({(0,): left}, {(0,): left}, {(1,): right}, {(1,): right})
    assert space == ({(0,): left}, {(1,): right}, {(0,): left}, {(1,): right})
