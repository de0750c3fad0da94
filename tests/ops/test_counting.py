"""What is chosen or counted by values: masks, places, histograms, different values. Against plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, mesh_of, shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import torchhalo

R, S = Replicate(), Shard
Function = Callable[..., Any]
GENERATOR = torch.Generator().manual_seed(0)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def numbers(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(limit, shape, generator=GENERATOR)


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)


def written(y: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = y * 1
    y[mask] = v[: int(mask.sum())]
    return y


# A function, its tensors, and how they are cut over a mesh of so many axes.
CHOICES: list[tuple[Function, list[torch.Tensor], list[Any]]] = [
    (lambda x, m: x[m > 0.3], [values(2, 7, 5)] * 2, [[S(1)], [S(1)]]),
    (lambda x, m: x[m > 0.3], [values(2, 7, 5)] * 2, [[S(2)], [R]]),
    (lambda x, m: x[m > 0.3], [values(2, 7, 5)] * 2, [[R], [S(1)]]),
    (lambda x, m: x[m > 9.0], [values(2, 7, 5)] * 2, [[S(1)], [S(1)]]),
    (lambda x, m: x[m > 0.3], [values(7, 5, 3), values(7, 5)], [[S(0)], [S(0)]]),
    (lambda x, m: x[m > 0.3], [values(7, 5, 3), values(7, 5)], [[S(2)], [R]]),
    (lambda x, m: x[:, m > 0.3], [values(2, 7, 5, 3), values(7, 5)], [[S(1)], [S(0)]]),
    (lambda x, m: x[:, :, m > 0.3], [values(2, 3, 11), values(11)], [[S(2)], [S(0)]]),
    (lambda x, m: torch.masked_select(x, m > 0.3), [values(2, 7, 5), values(7, 1)], [[S(1)], [S(0)]]),
    (lambda x, m: torch.masked_select(x, m > 0.3), [values(5), values(2, 7, 5)], [[R], [S(1)]]),
    (lambda x, m: x[m > 0.3].mean() + x[m < 0].square().sum(), [values(1, 1, 9, 4)] * 2, [[S(2)], [S(2)]]),
    (lambda y, m, v: written(y, m > 0.3, v), [values(2, 7, 5), values(2, 7, 5), values(70)], [[S(1)], [S(1)], [S(0)]]),
    (lambda y, m, v: y.masked_scatter(m > 0.3, v), [values(2, 7, 5), values(2, 7, 5), values(70)], [[S(1)], [S(2)], [R]]),
    (lambda x, m: x[m > 0.3], [values(2, 7, 5)] * 2, [[S(1), S(2)], [S(1), S(2)]]),
    (lambda x, m: x[m > 0.3], [values(2, 7, 5)] * 2, [[S(2), R], [R, S(1)]]),
]


def check_choice(index: int, shape: tuple[int, ...]) -> None:
    """The result, cut evenly, and the gradients; the gradient's own numbers differ from place to place."""
    function, tensors, placements = CHOICES[index]
    mesh = mesh_of(shape)
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = function(*plain)
    weights = torch.arange(1.0, expected.numel() + 1, dtype=torch.float64).view(expected.shape)
    (expected * weights).sum().backward()
    sharded = [shard(t, mesh, p).requires_grad_() for t, p in zip(tensors, placements, strict=True)]
    with torchhalo.strict():
        result = function(*sharded)
    assert result.shape == expected.shape and result.stride() == expected.stride()
    torch.testing.assert_close(whole(result), expected.detach(), rtol=0, atol=1e-12)
    (result * shard(weights, mesh, result.placements)).sum().backward()
    for got, want in zip(sharded, plain, strict=True):
        assert (got.grad is None) == (want.grad is None)
        if want.grad is not None:
            torch.testing.assert_close(whole(got.grad), want.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("index", range(len(CHOICES)))
def test_choices(pool, index: int) -> None:
    axes = len(CHOICES[index][2][0])
    pool(3 if axes == 1 else 4).run(check_choice, index, (3,) if axes == 1 else (2, 2))


COUNTS: list[tuple[Function, list[torch.Tensor], list[Any]]] = [
    (torch.nonzero, [numbers(2, 3, 7, 4)], [[S(1)]]),
    (torch.nonzero, [numbers(2, 9)], [[S(0)]]),
    (lambda x: torch.where(x > 0), [values(2, 1, 5)], [[S(2)]]),
    (torch.argwhere, [numbers(1, 4, 4)], [[S(0)]]),
    (lambda x: torch.bincount(x.flatten(), minlength=9), [numbers(5, 2, 7, 3)], [[S(1)]]),
    (torch.bincount, [numbers(5, 2)], [[S(0)]]),
    (torch.bincount, [numbers(30, 17), values(17)], [[S(0)], [R]]),
    (lambda x: torch.histc(x, 6), [values(2, 9, 3)], [[S(1)]]),
    (lambda x: torch.histc(x, 4, -1, 1), [values(1, 2)], [[S(1)]]),
    (lambda x: torch.histc(x, 4), [torch.ones(4, 4, dtype=torch.float64)], [[S(1)]]),
    (lambda x: torch.histogram(x, 5), [values(2, 9, 3)], [[S(1)]]),
    (lambda x, w: torch.histogram(x, 5, range=(-1.0, 1.0), weight=w, density=True), [values(9, 3)] * 2, [[S(1)], [S(0)]]),
    (lambda x, b: torch.histogram(x, b), [values(9, 3), torch.linspace(-1, 2, 7, dtype=torch.float64)], [[S(0)], [R]]),
    (lambda x: torch.unique(x, return_inverse=True, return_counts=True), [numbers(6, 2, 7, 3)], [[S(1)]]),
    (lambda x: torch.unique(x, return_counts=True), [numbers(6, 2)], [[S(0)]]),
    (lambda x: torch.unique(x), [torch.tensor([math.inf, -0.5, 3.0, -math.inf, 3.0])], [[S(0)]]),
    (lambda x: torch.nonzero(x[x > 2]), [numbers(6, 3, 5)], [[S(1), S(0)]]),
    (lambda x: torch.unique(x, return_inverse=True), [numbers(6, 3, 5)], [[S(1), R]]),
    (lambda x: torch.bincount(x), [numbers(6, 13)], [[S(0), S(0)]]),
]


#: `torch.histogram`, of which CUDA has no kernel.
HISTOGRAMS = range(10, 13)


def check_counts(index: int, shape: tuple[int, ...]) -> None:
    function, tensors, placements = COUNTS[index]
    sharded = [shard(t, mesh_of(shape), p) for t, p in zip(tensors, placements, strict=True)]
    if DEVICE != "cpu" and index in HISTOGRAMS:
        for given in (tensors, sharded):
            with pytest.raises(NotImplementedError):
                function(*given)
        return
    expected, found = function(*tensors), function(*sharded)
    pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    for got, want in pairs:
        assert got.shape == want.shape and got.dtype == want.dtype
        torch.testing.assert_close(whole(got), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("index", range(len(COUNTS)))
def test_counts(pool, index: int) -> None:
    axes = len(COUNTS[index][2][0])
    pool(3 if axes == 1 else 4).run(check_counts, index, (3,) if axes == 1 else (2, 2))


def check_errors() -> str:
    x = shard(torch.tensor([3, 1, 0, -2]), mesh_of((3,)), [S(0)])
    with pytest.raises(RuntimeError, match="non-negative") as error:
        torch.bincount(x)
    with pytest.raises(IndexError, match="shape of the mask"):
        x[shard(torch.ones(3, dtype=torch.bool), mesh_of((3,)), [S(0)])]
    assert dist.get_world_size() == 3
    return str(error.value)


def test_errors_are_those_of_all_ranks(pool) -> None:
    """A number that is wrong on one rank raises on all."""
    assert len(set(pool(3).run(check_errors))) == 1
