"""Sort and topk along a sharded dim, and their gradients: those of one process, and no rank has all of a line."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import DEVICE, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torchhalo

R, S = Replicate(), Shard
MESHES = (2,), (3,), (4,), (2, 2)
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool
SLOW_MACHINE = list(HealthCheck)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Few different ones, so that many are equal; some are no numbers."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(5, shape, generator=generator)
    if not dtype.is_floating_point:
        return found.to(dtype)
    special = torch.tensor([math.nan, math.inf, -math.inf, -1.5, 0.0], dtype=dtype)
    return torch.where(torch.rand(shape, generator=generator) < 0.3, special[found], found.to(dtype))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW_MACHINE)
@given(data=st.data())
def test_random_sorts(data: st.DataObject) -> None:
    """Values and indices; equal elements keep their order, as a stable sort promises and torch's on a CPU does anyway.

    On CUDA, where torch's does not, the indices of another sort are of the values, and all different.
    """
    mesh, dtype = data.draw(st.sampled_from(MESHES)), data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    dim, descending = data.draw(st.integers(-len(shape), len(shape) - 1)), data.draw(st.booleans())
    stable = data.draw(st.sampled_from([None, True]))
    x = numbers(shape, dtype, data.draw(st.integers(0, 99)))
    placements = [data.draw(st.sampled_from([R, *map(S, range(len(shape)))])) for _ in mesh]
    options: dict[str, Any] = {} if stable is None else {"stable": True}
    with simulated(math.prod(mesh)):
        with maybe_disable_local_tensor_mode():
            x = x.to(DEVICE)
            expected = x.sort(dim=dim, descending=descending, stable=True)
        found = shard(x, init_device_mesh(DEVICE, mesh), placements).sort(dim=dim, descending=descending, **options)
        for got, want in zip(found, expected, strict=True):
            assert got.shape == want.shape and got.stride() == want.stride() and got.dtype == want.dtype
        values, indices = map(whole, found)
        with maybe_disable_local_tensor_mode():
            torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
            if stable or DEVICE == "cpu":
                assert torch.equal(indices, expected.indices)
            torch.testing.assert_close(x.gather(dim, indices), values, rtol=0, atol=0, equal_nan=True)
            assert (indices.sort(dim).values.diff(dim=dim) > 0).all()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=SLOW_MACHINE)
@given(data=st.data())
def test_random_choices_of_the_largest(data: st.DataObject) -> None:
    """Values; the indices, of which equal elements may take any, are of these values, and all different."""
    mesh, dtype = data.draw(st.sampled_from(MESHES)), data.draw(st.sampled_from(DTYPES[:-1]))
    shape = tuple(data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=3)))
    dim, largest = data.draw(st.integers(-len(shape), len(shape) - 1)), data.draw(st.booleans())
    k = data.draw(st.integers(0, shape[dim]))
    x = numbers(shape, dtype, data.draw(st.integers(0, 99)))
    placements = [data.draw(st.sampled_from([R, *map(S, range(len(shape)))])) for _ in mesh]
    with simulated(math.prod(mesh)):
        with maybe_disable_local_tensor_mode():
            x = x.to(DEVICE)
            expected = x.topk(k, dim, largest)
        found = shard(x, init_device_mesh(DEVICE, mesh), placements).topk(k, dim, largest)
        values, indices = map(whole, found)
        with maybe_disable_local_tensor_mode():
            torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(x.gather(dim, indices), values, rtol=0, atol=0, equal_nan=True)
            ordered = indices.sort(dim).values
            assert not k or (ordered.diff(dim=dim) > 0).all()
        assert found[0].stride() == expected.values.stride() and found[1].dtype == torch.int64


def check_gradients(shape: tuple[int, ...], placements: list[Any]) -> None:
    mesh = mesh_of(shape)
    generator = torch.Generator().manual_seed(0)
    for size in ((1, 2, 13, 3), (2, 1, 2, 5)):
        x = torch.randn(size, dtype=torch.float64, generator=generator)
        for function in (
            lambda x: x.sort(2, descending=True).values,
            lambda x: x.sort(2).values.cumsum(2),  # as Lovasz's loss
            lambda x: x.gather(2, x.detach().argsort(2)),
            lambda x: x.topk(2, 2).values,
            lambda x: x.flatten().sort().values,
        ):
            plain, sharded = x.clone().requires_grad_(), shard(x, mesh, placements).requires_grad_()
            expected = function(plain)
            weights = torch.arange(1.0, expected.numel() + 1, dtype=x.dtype).view(expected.shape)
            expected.backward(weights)
            with torchhalo.strict():
                found = function(sharded)
                assert isinstance(found, DTensor)
                found.backward(shard(weights, mesh, found.placements))
            torch.testing.assert_close(found.full_tensor(), expected.detach(), rtol=0, atol=1e-12)
            torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape, placements", [((3,), [S(2)]), ((2, 2), [S(2), S(3)]), ((2, 2), [R, S(2)])])
def test_gradients(pool, shape: tuple[int, ...], placements: list[Any]) -> None:
    pool(math.prod(shape)).run(check_gradients, shape, placements)


def test_a_part_goes_to_a_neighbour_at_a_time() -> None:
    with simulated(4):
        x = shard(torch.arange(32.0).flip(0).view(1, 32), init_device_mesh(DEVICE, (4,)), [S(1)])
        with wire() as sent:
            x.sort(1)
        assert [each.name for each in sent] == ["all_to_all_single"] * 4
        assert all(most in (0, 8 * (8 + 4)) for each in sent for most in each.received.values()), "bytes of values and indices"
        with wire() as sent:
            x.topk(3)
        assert len(sent) == 1
