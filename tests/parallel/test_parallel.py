"""Models that were not written for it, parallelized: one process's numbers, keys and checkpoints."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import torchhalo
from torchhalo.torch_internals import dtensors


class Net(nn.Module):
    """A little of everything: norm, skip connection, a grid that it makes itself, a tied weight, a conditioning vector."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.same = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.same.weight = self.down.weight
        self.embed = nn.Linear(3, 4)
        self.last = nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor, condition: torch.Tensor | None = None) -> torch.Tensor:
        rows = torch.linspace(-1, 1, x.shape[2], dtype=x.dtype).view(1, 1, -1, 1)
        y = F.relu(self.norm(self.first(x + rows)))
        low = self.down(y) + self.same(y)
        if condition is not None:
            low = low + self.embed(condition)[:, :, None, None]
        return self.last(y + F.interpolate(low, size=y.shape[2:], mode="bilinear"))


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(DEVICE, shape)


def made() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return Net().double(), torch.randn(2, 2, 11, 13, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    a, b = (t.full_tensor() if isinstance(t, DTensor) else t for t in (a, b))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def check_training(shape: tuple[int, ...], dims: Any, placements: list[Any]) -> None:
    model, x, condition = made()
    sharded = torchhalo.parallelize(copy.deepcopy(model), mesh_of(shape), dims=dims)
    keys = list(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, sharded)]
    for _ in range(2):
        results = []
        for net, optimizer in zip((model, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            out = net(x, condition=condition)
            out.square().mean().backward()
            optimizer.step()
            results.append(out)
        assert_equal(*results)
        assert list(results[1].placements) == placements
    assert list(sharded.state_dict()) == keys
    for (name, a), (other, b) in zip(model.state_dict().items(), torchhalo.plain_state_dict(sharded).items(), strict=True):
        assert name == other and type(b) is torch.Tensor
        assert_equal(a, b)
    assert sharded.same.weight is sharded.down.weight


@pytest.mark.parametrize(
    "mesh, dims, placements", [((2,), None, [Shard(2)]), ((3,), 3, [Shard(3)]), ((2, 2), None, [Shard(2), Shard(3)])]
)
def test_training_steps_equal_one_process(pool, mesh, dims, placements) -> None:
    pool(4 if len(mesh) > 1 else mesh[0]).run(check_training, mesh, dims, placements)


def check_checkpoints() -> None:
    model, x, _ = made()
    plain = {key: value + 1 if value.is_floating_point() else value for key, value in model.state_dict().items()}
    sharded = torchhalo.parallelize(copy.deepcopy(model), mesh_of((2,)))
    sharded.load_state_dict(plain)
    for key, value in torchhalo.plain_state_dict(sharded).items():
        assert torch.equal(value, plain[key])
    with pytest.raises(RuntimeError, match="Missing key"):
        sharded.load_state_dict({key: value for key, value in plain.items() if "norm" not in key})
    other = copy.deepcopy(sharded)
    with torch.no_grad():
        other.first.weight.zero_()
    assert_equal(sharded.first.weight, plain["first.weight"])
    assert_equal(other(x), torchhalo.unparallelize(copy.deepcopy(other))(x))


def test_checkpoints_of_the_plain_model_load_and_save(pool) -> None:
    pool(2).run(check_checkpoints)


def check_edges() -> None:
    mesh = mesh_of((2,))
    model, x, _ = made()
    expected = model(x).detach()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert torchhalo.parallelize(model, mesh) is model
    hooks = len(model._forward_hooks)
    assert torchhalo.parallelize(model, mesh) is model and len(model._forward_hooks) == hooks
    with pytest.raises(ValueError, match="parallelized already"):
        torchhalo.parallelize(model, mesh, dims=3)
    assert isinstance(model.first.weight, DTensor) and model.first.weight.placements == (Replicate(),)
    model.eval()
    given = torchhalo.shard(x, mesh, 3)
    assert model(given).placements == (Shard(3),), "a DTensor is taken as it is"
    torchhalo.unparallelize(model.train())
    assert all(type(p) in (torch.Tensor, nn.Parameter) and not isinstance(p, DTensor) for p in model.parameters())
    assert [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])] == []
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert_equal(model(x).detach(), expected)
    assert torchhalo.unparallelize(model) is model


def test_idempotent_and_reversible(pool) -> None:
    pool(2).run(check_edges)


def check_inputs_and_outputs() -> None:
    mesh = mesh_of((3,))
    model, x, condition = made()
    expected = model.eval()(x, condition)
    parts = x.chunk(3, dim=2)
    sharded = torchhalo.parallelize(copy.deepcopy(model), mesh, inputs="shard", outputs="whole")
    found = sharded(parts[mesh.get_local_rank()], condition)
    assert type(found) is torch.Tensor
    assert_equal(found, expected)
    bad = x.split([5, 3, 3], dim=2)[mesh.get_local_rank()]
    with pytest.raises(ValueError, match=r"torch.chunk; the rank at \(0,\).*\(2, 2, 4, 13\), it gave \(2, 2, 5, 13\)"):
        sharded(bad)
    with pytest.raises(ValueError, match="`outputs` must be one of"):
        torchhalo.parallelize(copy.deepcopy(model), mesh, outputs="all")
    with pytest.raises(RuntimeError, match="mixed"):  # after an error the scope is closed
        torchhalo.shard(x, mesh) + torch.ones(x.shape)


def test_shards_as_inputs_and_whole_outputs(pool) -> None:
    pool(3).run(check_inputs_and_outputs)


def check_style() -> None:
    mesh = mesh_of((2,))
    model, x, _ = made()
    expected = model(x)
    model = parallelize_module(made()[0], mesh, torchhalo.SpatialParallel(dims=3, outputs="whole"))
    assert_equal(model(x), expected)


def test_style_of_parallelize_module(pool) -> None:
    pool(2).run(check_style)


def check_memory() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 1, 3, padding=1))
    torchhalo.parallelize(model.to(memory_format=torch.channels_last), mesh_of((2,)), dims=2)
    model(torch.randn(1, 3, 12, 8)).square().mean().backward()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor)
        strides = dtensors.local(parameter).stride(), parameter.grad.stride(), dtensors.local(parameter.grad).stride()
        assert set(strides) == {parameter.stride()}, (parameter.shape, parameter.stride(), strides)


def test_channels_last_parameters_and_gradients_stay_so(pool) -> None:
    """A shard that lies otherwise is turned around at each step, and optimizers update such parameters one by one."""
    pool(2).run(check_memory)
