"""Losses of sharded tensors against one process: value and gradients, every reduction, and what they send."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

import torchhalo

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]


def gaussian(x: torch.Tensor, t: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.gaussian_nll_loss(x, t, t.square() + 0.1, full=True, reduction=reduction)


def dice(x: torch.Tensor, t: torch.Tensor, reduction: str) -> torch.Tensor:
    """A soft Dice loss, as segmentation libraries write it."""
    x, t = x.sigmoid(), t.sigmoid()
    dims = list(range(2, x.ndim))
    both, each = (x * t).sum(dims), x.sum(dims) + t.sum(dims)
    loss = 1 - (2 * both + 1e-5) / (each + 1e-5)
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def kl(x: torch.Tensor, t: torch.Tensor, reduction: str, log_target: bool = False) -> torch.Tensor:
    return F.kl_div(x, t, reduction="batchmean" if reduction == "mean" else reduction, log_target=log_target)


def probability(loss: Callable[..., torch.Tensor], x: torch.Tensor, t: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return loss(x.sigmoid(), t.sigmoid(), **kwargs)


POINTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": functools.partial(F.smooth_l1_loss, beta=0.3),
    "huber": functools.partial(F.huber_loss, delta=0.7),
    "bce": functools.partial(probability, F.binary_cross_entropy),
    "bce_with_logits": lambda x, t, reduction: F.binary_cross_entropy_with_logits(x, t.sigmoid(), reduction=reduction),
    "kl": functools.partial(probability, kl),
    "kl_log": functools.partial(kl, log_target=True),
    "soft_margin": F.soft_margin_loss,
    "poisson": functools.partial(F.poisson_nll_loss, full=False),
    "gaussian": gaussian,
    "dice": dice,
}


CONSTANT_TARGET = {"gaussian", "soft_margin"}  # torch has no gradient for it, or not here


def draw_placements(data: st.DataObject, mesh: tuple[int, ...], ndim: int, partial: bool = True) -> list[Placement]:
    kinds: list[Placement] = [Replicate(), *map(Shard, range(ndim)), *([Partial()] if partial else [])]
    return [data.draw(st.sampled_from(kinds)) for _ in mesh]


def random_tensor(shape: tuple[int, ...], seed: int, channels_last: bool = False) -> torch.Tensor:
    with maybe_disable_local_tensor_mode():
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        return x.contiguous(memory_format=torch.channels_last) if channels_last else x


@pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")  # stock ops, of tensors that are sharded differently
@settings(max_examples=70, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_pointwise_losses(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    name = data.draw(st.sampled_from(sorted(POINTWISE)))
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=3 if name == "dice" else 1, max_size=4)))
    reduction = data.draw(st.sampled_from(["none", "mean", "sum"]))
    channels_last = len(shape) == 4 and data.draw(st.booleans())
    placements = draw_placements(data, mesh, len(shape))
    targets = data.draw(st.sampled_from([placements, draw_placements(data, mesh, len(shape))]))
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        x, t = random_tensor(shape, 0, channels_last), random_tensor(shape, 1, channels_last)
        loss = functools.partial(POINTWISE[name], reduction=reduction)
        assert_parity(loss, [x, t], devices, [placements, targets], needs_grad=[True, name not in CONSTANT_TARGET])


@pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")  # stock ops, of tensors that are sharded differently
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_weighted_binary_cross_entropies(data: st.DataObject) -> None:
    """Weights, of elements and of positives, that broadcast."""
    mesh = data.draw(st.sampled_from(MESHES))
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=3, max_size=4)))
    logits, positive = data.draw(st.booleans()), data.draw(st.booleans())
    broadcast = tuple(n if data.draw(st.booleans()) else 1 for n in shape[data.draw(st.integers(0, 2)) :]) if logits else shape
    reduction = data.draw(st.sampled_from(["none", "mean", "sum"]))
    placements = [draw_placements(data, mesh, n) for n in (len(shape), len(shape), len(broadcast), len(broadcast))]

    def loss(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        if not logits:
            return F.binary_cross_entropy(x.sigmoid(), t.sigmoid(), w, reduction=reduction)
        return F.binary_cross_entropy_with_logits(x, t.sigmoid(), w, reduction=reduction, pos_weight=p if positive else None)

    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        tensors = [random_tensor(s, seed) for seed, s in enumerate((shape, shape, broadcast, broadcast))]
        assert_parity(loss, tensors, devices, placements, needs_grad=[True, False, False, False])


@pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")  # stock ops, of tensors that are sharded differently
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_cross_entropies(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    sizes = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    batch, classes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    shape = (batch, classes, *sizes)
    soft = data.draw(st.booleans()) and data.draw(st.booleans())
    smoothing = data.draw(st.sampled_from([0.0, 0.0, 0.1]))
    ignore = data.draw(st.sampled_from([-100, 0, 255]))
    weighted = data.draw(st.booleans())
    reduction = data.draw(st.sampled_from(["none", "mean", "sum"]))
    of_input = draw_placements(data, mesh, len(shape), partial=False)
    of_target = draw_placements(data, mesh, len(shape) if soft else len(shape) - 1, partial=False)
    loss = functools.partial(F.cross_entropy, reduction=reduction, ignore_index=ignore, label_smoothing=smoothing)
    if soft:
        loss = functools.partial(F.cross_entropy, reduction=reduction, label_smoothing=smoothing)
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        x = random_tensor(shape, 0, channels_last=len(shape) == 4 and data.draw(st.booleans()))
        with maybe_disable_local_tensor_mode():
            generator = torch.Generator().manual_seed(2)
            target = torch.rand(shape, dtype=torch.float64, generator=generator)
            if not soft:
                target = torch.randint(0, classes, (batch, *sizes), generator=generator)
                target.view(-1)[1:][torch.rand(target.numel() - 1, generator=generator) < 0.3] = ignore
                target.view(-1)[0] = classes - 1  # one that counts, or the mean is no number
            target = target.to(DEVICE)
            w = torch.rand(classes, dtype=torch.float64, generator=generator).to(DEVICE) + 0.1 if weighted else None
        of_weight = [Replicate()] * len(mesh)
        if classes == 1 and ignore == 0:
            return
        assert_parity(
            lambda x, t, w: loss(x, t, w),
            [x, target, w],
            devices,
            [of_input, of_target, of_weight],
            needs_grad=[True, False, False],
        )


@pytest.mark.parametrize("name", sorted(POINTWISE.keys() - {"gaussian"}))  # which asks if `any` variance is negative
def test_pointwise_losses_send_one_number(name: str) -> None:
    """Forward, for an uneven shard, and nothing backward. Dice divides sums, which must be whole; KL's batch mean is a sum."""
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        x, t = (shard(torch.randn(2, 3, 4, 7), mesh, [Shard(3)]).requires_grad_() for _ in range(2))
        t.requires_grad_(name not in CONSTANT_TARGET)
        with torchhalo.strict(), wire() as sent:
            POINTWISE[name](x, t, reduction="mean").backward()
    numbers = {"dice": [6, 6], "kl": [], "kl_log": []}.get(name, [1])
    assert sent == [Sent("all_reduce", dict.fromkeys(range(3), n)) for n in numbers]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_mean_of_cross_entropies_sends_two_numbers(reduction: str) -> None:
    with simulated(4):
        mesh = init_device_mesh(DEVICE, (2, 2))
        x = shard(torch.randn(2, 5, 4, 7), mesh, [Shard(2), Shard(3)]).requires_grad_()
        t = shard(torch.randint(0, 5, (2, 4, 7)), mesh, [Shard(1), Shard(2)])
        w = shard(torch.rand(5), mesh, [Replicate(), Replicate()])
        with torchhalo.strict(), wire() as sent:
            loss = F.cross_entropy(x, t, w, reduction=reduction)
            loss.backward(torch.ones_like(loss))
    assert sent == ([] if reduction == "none" else [Sent("all_reduce", dict.fromkeys(range(4), 2))])


def test_a_target_that_is_sharded_otherwise_is_moved_and_not_gathered() -> None:
    """Over two ranks, from rows to columns: each of them needs half of what the other has, 2 x 2 x 4 of its 2 x 2 x 8."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        x = shard(torch.randn(2, 5, 4, 8), mesh, [Shard(3)])
        t = shard(torch.randint(0, 5, (2, 4, 8)), mesh, [Shard(1)])
        with torchhalo.strict(), wire() as sent:
            F.cross_entropy(x, t, reduction="none")
    assert sent == [Sent("all_to_all_single", {0: 16, 1: 16})]


def test_arithmetic_on_losses() -> None:
    """What training loops do with a loss: arithmetic, and asking for its value, for which then nothing is sent."""
    with simulated(4):
        mesh = init_device_mesh(DEVICE, (2, 2))
        with maybe_disable_local_tensor_mode():
            a, b = torch.randn(2, 3, 5, 6, dtype=torch.float64), torch.randn(2, 3, 5, 6, dtype=torch.float64)
            plain = a.clone().requires_grad_()
        x, t = (shard(each, mesh, [Shard(2), Shard(3)]) for each in (a, b))
        x.requires_grad_()

        def total(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            first, second = F.mse_loss(x, t), F.huber_loss(x, t, reduction="sum")
            return (first / 2 + 1) * 3 + second + first * second + (first + 2).sqrt() + sum([first, second]) + 1 / (1 + first)

        loss = total(x, t)
        with maybe_disable_local_tensor_mode():
            expected = total(plain, b)
            expected.backward()
        loss.backward()
        torch.testing.assert_close(whole(loss), expected.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(whole(x.grad), plain.grad, rtol=0, atol=1e-10)
        mse = F.mse_loss(a, b).item()
        with wire() as sent:
            assert math.isclose(F.mse_loss(x, t).item(), mse) and math.isclose(float(F.mse_loss(x, t).detach()), mse)
        assert sent == [Sent("all_reduce", dict.fromkeys(range(4), 1))] * 2


LOW_PRECISION = [(torch.bfloat16, 2**-6), (torch.float16, 2**-9), (torch.float32, 1e-5)]


@pytest.mark.parametrize("dtype, rtol", LOW_PRECISION)
def test_low_precision(dtype: torch.dtype, rtol: float) -> None:
    """As plain torch in the same dtype, up to a rounding or two of each rank's part and of their sum; nothing overflows."""
    with simulated(4):
        mesh = init_device_mesh(DEVICE, (4,))
        with maybe_disable_local_tensor_mode():
            a, b = (
                torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(s)).mul(30).to(DEVICE, dtype) for s in (0, 1)
            )
            c = torch.randint(0, 3, (2, 64, 64), device=DEVICE)
        x, t = (shard(each, mesh, [Shard(2)]) for each in (a, b))
        classes = shard(c, mesh, [Shard(1)])
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss):
            result = loss(x, t)
            assert result.dtype == dtype
            torch.testing.assert_close(whole(result), loss(a, b), rtol=rtol, atol=0)
        for weight in (None, torch.tensor([0.5, 1, 3], device=DEVICE, dtype=dtype)):
            w = None if weight is None else shard(weight, mesh, [Replicate()])
            with maybe_disable_local_tensor_mode():
                expected = F.cross_entropy(a.double(), c, None if weight is None else weight.double())
            torch.testing.assert_close(whole(F.cross_entropy(x, classes, w)).double(), expected, rtol=rtol, atol=0)
        if DEVICE == "cpu":  # the simulation cannot tell the shape of a view that is made on CUDA in inference mode
            check_inference((a, b, c), (x, t, classes), rtol)


def check_inference(plain: Sequence[torch.Tensor], sharded: Sequence[torch.Tensor], rtol: float) -> None:
    a, b, c = plain
    x, t, classes = sharded
    with torch.inference_mode(), torchhalo.strict():
        torch.testing.assert_close(whole(F.cross_entropy(x, classes)), whole(F.cross_entropy(x, classes)))
        torch.testing.assert_close(whole(F.nll_loss(x, classes)), F.nll_loss(a, c), rtol=rtol, atol=rtol)
        torch.testing.assert_close(whole(F.mse_loss(x, t)), F.mse_loss(a, b), rtol=rtol, atol=0)


def test_inference_on_one_gpu(gpu: str) -> None:
    mesh = init_device_mesh(gpu, (1,))
    for dtype, rtol in LOW_PRECISION:
        plain = [torch.randn(2, 3, 64, 64, device=gpu).to(dtype) for _ in range(2)]
        plain.append(torch.randint(0, 3, (2, 64, 64), device=gpu))
        check_inference(plain, [distribute_tensor(each, mesh, [Shard(each.ndim - 2)]) for each in plain], rtol)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_errors_are_those_of_plain_torch() -> None:
    wrong = [
        lambda x: F.mse_loss(x, x[:, :2]),
        lambda x: F.binary_cross_entropy_with_logits(x, x[:, :2]),
        lambda x: F.cross_entropy(x, x[:, 0, :, :2].long()),
        lambda x: F.nll_loss(x, x[:, 0].long(), weight=x[0, 0, 0, :2]),
    ]
    for call in wrong:
        with pytest.raises((RuntimeError, ValueError)) as expected:
            call(torch.zeros(2, 3, 4, 6))
        with simulated(2), pytest.raises((RuntimeError, ValueError)) as found:
            call(shard(torch.zeros(2, 3, 4, 6), init_device_mesh(DEVICE, (2,)), [Shard(3)]))
        assert str(expected.value) in str(found.value)


def objective(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, t, w, label_smoothing=0.1) + F.mse_loss(x, x.detach().flip(1)) + F.smooth_l1_loss(x, x.sigmoid())


def check(members: int, width: int, compiled: bool, objective: Callable[..., torch.Tensor] = objective) -> None:
    """On real processes, with an empty shard if ``width`` is small; a mesh of fewer members than the world too."""
    world = torch.distributed.get_world_size()
    mesh = mesh_of((world,)) if members == world else DeviceMesh(DEVICE, list(range(members)))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 4, width, dtype=torch.float64, generator=generator).requires_grad_()
    t = torch.randint(0, 5, (2, 4, width), generator=generator)
    t[:, 1] = -100
    w = torch.rand(5, dtype=torch.float64, generator=generator)
    expected = objective(x, t, w)
    expected.backward()
    sharded = distribute_tensor(x.detach(), mesh, [Shard(3)]).requires_grad_()
    others = distribute_tensor(t, mesh, [Shard(2)]), distribute_tensor(w, mesh, [Replicate()])
    torch._dynamo.reset()
    result = (torch.compile(objective, backend="aot_eager", fullgraph=True) if compiled else objective)(sharded, *others)
    if mesh.get_coordinate() is None:
        return
    result.backward()
    assert math.isclose(result.item(), expected.item(), rel_tol=1e-10)
    torch.testing.assert_close(result.full_tensor(), expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(sharded.grad.full_tensor(), x.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("members, width", [(3, 7), (3, 2), (2, 5)])
def test_real_processes(pool, members: int, width: int) -> None:
    pool(3).run(check, members, width, False)


@pytest.mark.slow
@pytest.mark.parametrize("width, loss", [(7, objective), (2, F.nll_loss)])  # stock's add gathers tiny shards, even compiled
def test_compiled(pool, width: int, loss: Callable[..., torch.Tensor]) -> None:
    pool(3).run(check, 3, width, True, loss)
