"""Ops on inputs that are not sharded in space: replicated, or sharded along the batch.

Above each test stands the function that it runs on every rank of real gloo processes, which compares with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_parity, whole
from stock import Run, grid_mesh, line_mesh, random, replicated
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torchhalo


def _convolves_without_halo() -> None:
    def conv1d(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, w, b, stride=2, padding=1)

    def conv2d(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b, padding=1)

    def conv3d(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv3d(x, w, b, padding=(1, 0, 2), dilation=(1, 2, 1))

    for mesh in (line_mesh(), grid_mesh()):
        whole_, batch = replicated(mesh), (Shard(0), *replicated(mesh)[1:])
        for x in (random(3, 4, 11), random(4, 11)):  # batched and not
            result = assert_parity(conv1d, [x, random(6, 4, 3), random(6)], mesh, [whole_] * 3)
            assert result.placements == whole_
        for size in (4, 6, 3):  # also uneven, and fewer samples than ranks
            tensors = [random(size, 2, 5, 6, 7), random(3, 2, 3, 2, 3), random(3)]
            result = assert_parity(conv3d, tensors, mesh, [batch, whole_, whole_])
            assert result.placements == batch
        # Where the input needs no gradient it gets none, and the others are right.
        for x_placements in (whole_, batch, (Shard(3), *replicated(mesh)[1:]), (*replicated(mesh)[1:], Shard(2))):
            tensors = [random(4, 3, 9, 10), random(5, 3, 3, 3), random(5)]
            for needs_grad in ((False, True, True), (False, True, False), (False, False, True)):
                assert_parity(conv2d, tensors, mesh, [x_placements, whole_, whole_], needs_grad=needs_grad)


def test_replicated_and_batch_sharded_inputs_and_inputs_without_gradient(run: Run) -> None:
    run(_convolves_without_halo)


SLICES: list[Any] = [
    slice(1, 3),
    slice(None, None, 2),
    slice(-3, None),
    slice(2, 2),
    slice(0, 100),
    2,
    -1,
    None,
    ...,
    (slice(None), slice(1, -1)),
    (..., slice(1, None, 3)),
    (slice(1, 3), slice(None), slice(0, 5, 2)),
    (..., 0),
    (slice(None), 1, slice(2, 4)),
    (None, 1, ..., slice(1, 2), None),
]


def _slices() -> None:
    for mesh in (line_mesh(), grid_mesh()):
        for index in SLICES:
            result = assert_parity(lambda x: x[index] * 1, [random(5, 4, 7)], mesh, [replicated(mesh)], atol=0)  # noqa: B023
            assert result.placements == replicated(mesh)
        for function in (
            lambda x: x.narrow(2, 1, 4),
            lambda x: x.select(1, -1),
            lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
            lambda x: x[1:4] * x[:3],
            lambda x: x[:, :, 1:][:, 1:][1:],
            lambda x: torch.cat(x.chunk(3, 2)[::-1], 2),
            lambda x: torch.cat(x.split([3, 4], 2)[::-1], 2),
        ):
            assert_parity(function, [random(5, 4, 7)], mesh, [replicated(mesh)])
        # Writing through a slice:
        plain, tensor = random(5, 4, 7), distribute_tensor(random(5, 4, 7), mesh)
        for each in (plain, tensor):
            each[1:3, :, ::2] = 4 * each[3:, :, ::2]
            each[..., -1] *= 3
        assert torch.equal(tensor.to_local(), plain)


def test_slicing_of_replicated_inputs(run: Run) -> None:
    run(_slices)


def _draws() -> tuple[torch.Tensor, ...]:
    """What this rank drew, all of it."""
    drawn = []
    for mesh in (line_mesh(), grid_mesh()):
        generator = torch.Generator().manual_seed(5)
        chances = torch.rand(64, 33, dtype=torch.float64, generator=generator)
        chances[0], chances[1] = 0, 1
        torch.manual_seed(7)
        plain = chances.clone().requires_grad_()
        expected = torch.bernoulli(plain)
        torch.manual_seed(7)
        tensor = distribute_tensor(chances, mesh).requires_grad_()
        with torchhalo.torch_random():
            assert torch.equal(torch.bernoulli(tensor).to_local(), expected)
        result = torch.bernoulli(tensor)
        assert isinstance(result, DTensor) and result.placements == replicated(mesh)
        assert result.shape == tensor.shape and result.dtype == tensor.dtype
        assert result[0].to_local().eq(0).all() and result[1].to_local().eq(1).all()
        assert 0.4 < float(whole(result).mean()) < 0.6
        drawn += [result.to_local().detach(), torch.bernoulli(tensor).to_local().detach()]
        assert not torch.equal(drawn[-2], drawn[-1]), "another draw gives other values"

        weight = distribute_tensor(random(64, 33), mesh)
        (result * weight + tensor * 3).sum().backward()
        assert tensor.grad is not None and tensor.grad.eq(3).to_local().all(), "the draw itself has gradient zero"
        tensor.grad = None
        torch.bernoulli(tensor).backward(weight)
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape and tensor.grad.to_local().eq(0).all()
    return tuple(drawn)


def test_bernoulli_of_replicated_inputs(run: Run) -> None:
    first, *others = run(_draws)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


def _takes_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(3)
    classes = 6
    weight = torch.rand(classes, dtype=torch.float64, generator=generator) + 0.5

    def check(loss: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
        needs_grad = [index == 0 for index in range(len(tensors))]
        result = assert_parity(loss, tensors, mesh, [replicated(mesh)] * len(tensors), needs_grad=needs_grad)
        assert result.placements == replicated(mesh)

    for mesh, shapes in (line_mesh(), [(9, classes), (classes,), (2, classes, 4, 3)]), (grid_mesh(), [(3, classes, 5)]):
        for shape in shapes:
            scores = random(*shape)
            dim = 0 if len(shape) == 1 else 1
            label_shape = [size for at, size in enumerate(shape) if at != dim]
            labels = torch.randint(classes, label_shape, generator=generator)
            for reduction in ("mean", "sum", "none"):
                for ignored in (-100, int(labels.flatten()[0])):
                    if ignored >= 0 and labels.numel() == 1 and reduction == "mean":
                        continue  # nothing is left to take the mean of
                    options = {"reduction": reduction, "ignore_index": ignored}
                    for function in (F.nll_loss, F.cross_entropy):
                        check(lambda x, y: function(x, y, **options), [scores, labels], mesh)  # noqa: B023
                        check(lambda x, y, w: function(x, y, w, **options), [scores, labels, weight], mesh)  # noqa: B023
                smooth = {"reduction": reduction, "label_smoothing": 0.1}
                check(lambda x, y, w: F.cross_entropy(x, y, w, **smooth), [scores, labels, weight], mesh)  # noqa: B023
                shares = random(*shape, seed=1).softmax(dim)
                check(lambda x, y: F.cross_entropy(x, y, reduction=reduction), [scores, shares], mesh)  # noqa: B023


@pytest.mark.slow
def test_cross_entropy_of_replicated_inputs(run: Run) -> None:
    run(_takes_cross_entropy)
