"""Methods other than forward, and outputs in dataclasses and distributions: whole outputs are like those of a plain model."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import DEVICE, mesh_of, simulated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import torchhalo


@dataclass(frozen=True)
class Decoded:
    sample: torch.Tensor
    sizes: tuple[int, ...]


@dataclass(slots=True)
class Posterior:
    normal: torch.distributions.Normal
    kept: list[torch.Tensor]


class Autoencoder(nn.Module):
    """It makes plain tensors for itself in all of its methods, and forward calls the others."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2, 3, 4, stride=2, padding=1)

    def encode(self, x: torch.Tensor) -> Posterior:
        mean, scale = self.down(x + torch.linspace(0, 1, x.shape[3], dtype=x.dtype)).chunk(2, dim=1)
        return Posterior(torch.distributions.Normal(mean, scale.exp()), [mean * 2])

    def decode(self, z: torch.Tensor, scale: float = 1.0) -> Decoded:
        out = self.up(z * torch.tensor(scale, dtype=z.dtype))
        return Decoded(out, tuple(out.shape))

    def features(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"low": self.down(x + torch.ones((), dtype=x.dtype))}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x).normal.mean).sample


def made() -> tuple[Autoencoder, torch.Tensor]:
    torch.manual_seed(0)
    return Autoencoder().double(), torch.randn(1, 3, 10, 6, dtype=torch.float64)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(whole(a), whole(b), rtol=0, atol=1e-12)


def step(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """What a loop makes of the methods, and the gradients that it gets."""
    model.zero_grad()
    posterior = model.encode(x)
    normal = posterior.normal
    decoded = model.decode(normal.mean, scale=0.5)
    low = model.features(x)["low"]
    loss = decoded.sample.square().mean() + torch.distributions.kl_divergence(normal, copy.deepcopy(UNIT)).mean() + low.sum()
    loss.backward()
    assert decoded.sizes == tuple(x.shape) and normal.batch_shape == normal.mean.shape
    values = [normal.mean, normal.stddev, posterior.kept[0], decoded.sample, low, model(x), loss]
    return [*(value.detach() for value in values), *(parameter.grad for parameter in model.parameters())]


UNIT = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))


def check_methods(outputs: Any, kind: type) -> None:
    model, x = made()
    expected = step(model, x)
    mesh = mesh_of((3,))
    sharded = torchhalo.parallelize(copy.deepcopy(model), mesh, outputs=outputs, methods=("features",))
    for net in (sharded, copy.deepcopy(sharded)):
        for found, wanted in zip(step(net, x), expected, strict=True):
            assert_equal(found, wanted)
        assert type(net.decode(net.encode(x).normal.mean).sample) is kind and type(net(x)) is kind
    with pytest.raises(ZeroDivisionError):
        sharded.decode(x[:, :2], scale=1 / 0)
    assert str(inspect.signature(sharded.decode)) == str(inspect.signature(model.decode))
    plain = torchhalo.unparallelize(sharded)
    assert vars(plain).keys() == vars(model).keys()
    assert_equal(plain.decode(x[:, :2]).sample, model.decode(x[:, :2]).sample)


@pytest.mark.parametrize("outputs, kind", [("sharded", DTensor), ("whole", torch.Tensor)])
def test_methods_give_one_process_results(pool, outputs: str, kind: type) -> None:
    pool(3).run(check_methods, outputs, kind)


def check_whole_outputs(memory: torch.memory_format) -> None:
    model, x = made()
    model, x = model.to(memory_format=memory), x.contiguous(memory_format=memory)
    expected = model(x)
    sharded = torchhalo.parallelize(copy.deepcopy(model), mesh_of((2,)), outputs="whole")
    out = sharded(x)
    assert type(out) is torch.Tensor and not out._is_view()
    assert out.stride() == expected.stride(), (out.stride(), expected.stride())
    for y in (expected, out):
        y[:, 1] *= 3
        y.square().sum().backward()
    assert_equal(out, expected)
    for a, b in zip(sharded.parameters(), model.parameters(), strict=True):
        assert_equal(a.grad, b.grad)
    with torch.inference_mode():
        out = sharded(x)
        out += 1
        assert out.stride() == expected.stride() and not out.requires_grad
    one = torchhalo.parallelize(Same(), mesh_of((2,)), outputs="whole")
    with torch.no_grad():
        one(x).zero_()
    assert one.weight.full_tensor().item() == 1, "what is written to an output does not reach the model"


class Same(nn.Module):
    """Its output is a tensor that all ranks have whole already."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.view(1)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_whole_outputs_are_ordinary_tensors(pool, memory: torch.memory_format) -> None:
    """Dense, in the memory format of the plain output, writable, no views, and with a gradient."""
    pool(2).run(check_whole_outputs, memory)


def test_methods_must_be_there() -> None:
    with simulated(2), pytest.raises(ValueError, match=r"`methods` must name methods of Autoencoder.*\['embed'\]"):
        torchhalo.parallelize(Autoencoder(), init_device_mesh(DEVICE, (2,)), methods=("features", "embed"))
