"""Ranks of gloo or, with a GPU, of NCCL against one process: autocast, scaled losses, inference, fused optimizers, late groups.

And memory that is used again while an exchange is under way.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import DEVICE, mesh_of, whole
from soak import UNet
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import torchhalo

SIZE = (1, 2, 22, 16)
STEPS = 4
OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd, foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True),
    "sgd, fused": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True),
}


def models(mesh: DeviceMesh, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """One for one process and the same parallelized."""
    torch.manual_seed(0)
    plain = UNet().to(DEVICE, dtype)
    return plain, torchhalo.parallelize(copy.deepcopy(plain), mesh, dims=2)


def image(step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x).float(), x.mean(1, keepdim=True).roll(1, 3).float())


def check_autocast(dtype: torch.dtype) -> None:
    """Losses and weights; a sum in another order may round a value of the low precision the other way."""
    found = []
    for model in models(mesh_of((2,)), torch.float32):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0, enabled=dtype == torch.float16)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=dtype):
                loss = loss_of(model, image(step, torch.float32))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(whole(loss.detach())))
        assert scaler.get_scale() == (256.0 if dtype == torch.float16 else 1.0)
        found.append((losses, {name: whole(value.detach()) for name, value in model.state_dict().items()}))
    (want, weights), (got, others) = found
    tolerance = 4 * torch.finfo(dtype).eps
    assert all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(got, want, strict=True)), (got, want)
    for name, weight in weights.items():
        scale = float(weight.abs().max()) or 1.0
        torch.testing.assert_close(others[name], weight, rtol=0, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(pool: Any, dtype: torch.dtype) -> None:
    pool(2).run(check_autocast, dtype)


def check_inference() -> None:
    plain, model = (each.eval() for each in models(mesh_of((2,))))
    with torch.inference_mode():
        out, expected = model(image(0)), plain(image(0))
        torch.testing.assert_close(whole(out), expected, rtol=0, atol=1e-10)
    assert out.is_inference()


def test_inference_mode(pool: Any) -> None:
    pool(2).run(check_inference)


def assert_same_training(models: tuple[nn.Module, nn.Module], optimizer_of: Callable[..., torch.optim.Optimizer]) -> None:
    found = []
    for model in models:
        optimizer = optimizer_of(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            x = image(step)
            F.mse_loss(model(x), x.mean(1, keepdim=True)).backward()
            optimizer.step()
        found.append({name: whole(value.detach()) for name, value in model.state_dict().items()})
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-9, msg=name)


def check_optimizer(name: str) -> None:
    assert_same_training(models(mesh_of((2,))), OPTIMIZERS[name])


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers_of_many_tensors_at_once(pool: Any, name: str) -> None:
    pool(2).run(check_optimizer, name)


def check_late_groups() -> None:
    """After a step on all ranks, one on two of them in another order; the third makes the group with them and trains alone."""
    assert_same_training(models(mesh_of((3,))), OPTIMIZERS["sgd, foreach"])
    mesh = DeviceMesh(DEVICE, [2, 0])
    if mesh.get_coordinate() is None:
        return
    plain, model = models(mesh)
    x = image(7)
    out, expected = model(x), plain(x)
    (place,) = mesh.get_coordinate()
    torch.testing.assert_close(out.to_local(), expected.detach().chunk(2, 2)[place], rtol=0, atol=1e-10)
    out.square().mean().backward()
    expected.square().mean().backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), want.grad, rtol=0, atol=1e-10)


def test_a_group_made_late_of_ranks_out_of_order(pool: Any) -> None:
    pool(3).run(check_late_groups)


def poison() -> None:
    """Fill the memory that the allocator would give out next with no numbers."""
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    free = sorted((block["size"] for block in blocks if block["state"] == "inactive"), reverse=True)
    filled = [torch.full((size // 8,), math.nan, dtype=torch.float64) for size in free]
    del filled


def check_memory_used_again() -> None:
    """What an exchange on a side stream still reads or writes is not given out again: it would be overwritten here."""
    mesh = mesh_of((2,))
    plain, model = models(mesh)

    def after(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        poison()
        output.register_hook(lambda grad: poison())

    with contextlib.ExitStack() as stack:
        for layer in model.modules():
            if not list(layer.children()):
                stack.callback(layer.register_forward_hook(after).remove)
        assert_same_training((plain, model), OPTIMIZERS["sgd, foreach"])
    dist.barrier()


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU has no streams")
def test_memory_that_is_freed_while_an_exchange_is_under_way(pool: Any) -> None:
    pool(2).run(check_memory_used_again)
