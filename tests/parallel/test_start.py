"""A model that is built on the meta device: no memory before its ranks know what they keep, and the same values on all."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import DEVICE
from pages import execute, snippet
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import torchhalo


class Scale(nn.Module):
    """Has no ``reset_parameters``."""

    def __init__(self, channels: int):
        super().__init__()
        self.factor = nn.Parameter(torch.full((channels, 1, 1), 2.0, dtype=torch.float64))
        self.register_buffer("offset", torch.zeros(1, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.offset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.second = nn.Conv2d(5, 5, 3, padding=1)
        self.third = nn.Conv2d(5, 5, 3, padding=1)
        self.third.weight = self.second.weight
        self.last = nn.Conv2d(5, 1, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.third(torch.tanh(self.second(F.relu(self.norm(self.first(x)))))))


@functools.cache
def mesh_of() -> DeviceMesh:
    return init_device_mesh(DEVICE, (dist.get_world_size(),))


def on_meta(sharded: bool = False, model: type[nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        net = model()
    with CommDebugMode() as sent:
        torchhalo.parallelize(fully_shard(net, mesh=mesh_of()) if sharded else net, mesh_of())
    assert sent.get_total_counts() == 0 and all(p.is_meta and isinstance(p, DTensor) for p in net.parameters())
    return net


def train(model: nn.Module, steps: int, mesh: DeviceMesh | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.linspace(-1, 2, 8 * 11 * 7, dtype=torch.float64, device=next(model.parameters()).device).view(1, 8, 11, 7)
        target = x[:, :1].cos()
        F.mse_loss(model(x), target if mesh is None else torchhalo.shard(target, mesh)).backward()
        optimizer.step()


def materialized(sharded: bool) -> dict[str, torch.Tensor]:
    """The first values, which are also trained with: as those of the plain model, by one process."""
    torch.manual_seed(4)
    model = on_meta(sharded)
    assert torchhalo.materialize(model) is model
    assert model.third.weight is model.second.weight and model.first.weight.requires_grad
    first = {key: value.clone() for key, value in torchhalo.plain_state_dict(model).items()}
    plain = Net()
    plain.load_state_dict(first)
    train(plain, 2)
    train(model, 2, mesh_of())
    assert all(parameter.grad.placements == parameter.placements for parameter in model.parameters())
    for key, value in torchhalo.plain_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=0, atol=1e-9)
    return first


def test_all_ranks_start_with_the_same_values(pool) -> None:
    runs = [*pool(2).run(materialized, False), *pool(2).run(materialized, True), *pool(3).run(materialized, False)]
    expected = runs[0]
    for found in runs:
        assert found.keys() == expected.keys() == Net().state_dict().keys()
        assert all(torch.equal(value, expected[key]) for key, value in found.items())
    bound = 1 / math.sqrt(8 * 9)
    weight = expected["first.weight"]
    assert bound * 0.9 < weight.max() <= bound and -bound <= weight.min() < -bound * 0.9 and abs(weight.mean()) < bound / 4
    assert torch.equal(expected["norm.running_var"], torch.ones(5, dtype=torch.float64, device="cpu"))
    assert expected["norm.num_batches_tracked"] == 0 and not expected["norm.running_mean"].any()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(8, 3, 1), Scale(3))


def check_unknown(folder: str) -> None:
    model = on_meta(model=Odd)
    with pytest.raises(ValueError, match=r"parameters and buffers of inner\.1 \(Scale\)\."):
        torchhalo.materialize(model)
    assert model.inner[0].weight.is_meta, "nothing is done before"
    with pytest.raises(ValueError, match=r"\['inner.1.offset'\] are on the meta device"):
        saved = Odd()
        torchhalo.Checkpoints(folder).save(1, saved)
        torchhalo.Checkpoints(folder).load(model)
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        module.factor.fill_(3.0)

    torch.manual_seed(0)
    torchhalo.materialize(model, init)
    assert seen == [model.inner[1]] and bool((model.inner[1].factor.full_tensor() == 3).all())
    assert bool(model.inner[1].offset.full_tensor().isnan().all()), "what is forgotten is NaN"
    torchhalo.Checkpoints(folder).load(model)
    assert bool((model.inner[1].factor.full_tensor() == 2).all())


def check_loading(folder: str, sharded: bool) -> None:
    torch.manual_seed(9)
    saved = Net()
    torchhalo.Checkpoints(folder).save(1, saved)
    model = on_meta(sharded)
    if sharded:
        torchhalo.Checkpoints(folder).load(model)
    else:
        model.load_state_dict(saved.state_dict(), assign=True)
    train(saved, 2)
    train(model, 2, mesh_of())
    for key, value in torchhalo.plain_state_dict(model).items():
        torch.testing.assert_close(value, saved.state_dict()[key], rtol=0, atol=1e-9)


def test_modules_that_nothing_initialises_are_named(pool, tmp_path: Path) -> None:
    pool(2).run(check_unknown, str(tmp_path))


@pytest.mark.parametrize("sharded", [False, True])
def test_values_come_from_a_checkpoint(pool, tmp_path: Path, sharded: bool) -> None:
    pool(2).run(check_loading, str(tmp_path), sharded)


class Recorded:
    """An array that is nowhere whole: values are made when they are read. Notes how many of each reading."""

    def __init__(self, *shape: int):
        self.shape, self.reads = shape, []

    def __getitem__(self, cuts: tuple[slice, ...]) -> np.ndarray:
        spans = [np.arange(size)[cut] for size, cut in zip(self.shape, cuts, strict=True)]
        self.reads.append(math.prod(map(len, spans)))
        return np.sin(sum((dim + 1) * span for dim, span in enumerate(np.ix_(*spans)))).astype(np.float64)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an op gives on this rank."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if type(tensor) is torch.Tensor and not tensor.is_meta:  # no other type has memory of its own
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return out


def check_block(code: str, folder: str) -> None:
    volume, target = Recorded(1, 8, 50, 40), Recorded(1, 1, 50, 40)
    names = {
        "Net": Net,
        "init_device_mesh": lambda *_: mesh_of(),
        "fully_shard": fully_shard,
        "volume": volume,
        "target": target,
    }
    with Largest() as largest:
        execute(code.replace('"checkpoints"', repr(folder)), {"torch": torch, "torchhalo": torchhalo, "F": F, **names})
    rows = len(torch.arange(50).chunk(4)[dist.get_rank()])
    assert [n for n in volume.reads if n] == [8 * rows * 40] and [n for n in target.reads if n] == [rows * 40]
    assert 8 * rows * 40 <= largest.elements < 8 * 50 * 40 / 2, f"a box and its halo, nothing more: {largest.elements}"


def test_no_rank_ever_holds_the_whole_input(pool, tmp_path: Path) -> None:
    pool(4).run(check_block, snippet("training", "Models that do not fit: meta-device start"), str(tmp_path))
