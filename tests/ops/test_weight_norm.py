"""Weights that are made of other parameters in every forward, weight norm and spectral norm, against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import DEVICE, assert_parity, mesh_of, simulated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrizations

import torchhalo


@pytest.mark.parametrize(
    "places",
    [
        [Replicate(), Replicate()],
        [Shard(0), Shard(0)],
        [Shard(0), Replicate()],
        [Replicate(), Shard(0)],
        [Shard(1), Replicate()],
        [Partial(), Replicate()],
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_placements_of_direction_and_length(ranks: int, places: list[Placement]) -> None:
    with simulated(ranks):
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((3, 2, 3, 3), (3, 1, 1, 1), (1, 2, 6, 5))]
        tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
        assert_parity(
            lambda v, g, x: torch.conv2d(x, torch._weight_norm(v.contiguous(), g, 0), padding=1),
            tensors,
            init_device_mesh(DEVICE, (ranks,)),
            [[place] for place in (*places, Shard(2))],
        )


@pytest.mark.parametrize("dim", [0, 1, 3])
def test_dims_of_the_norm(dim: int) -> None:
    """Of the first and last dim torch has a fused kernel."""
    length = [3 if d == dim else 1 for d in range(4)]
    with simulated(2):
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((3, 3, 3, 3), length, (1, 3, 6, 5))]
        assert_parity(
            lambda v, g, x: torch.conv_transpose2d(x, torch._weight_norm(v, g, dim), padding=1),
            tensors,
            init_device_mesh(DEVICE, (2,)),
            [[Replicate()], [Replicate()], [Shard(3)]],
        )


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": nn.utils.weight_norm,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized weight_norm of all": lambda module: parametrizations.weight_norm(module, dim=None),
    "spectral_norm": nn.utils.spectral_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
}


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    norm = NORMS[name]
    return nn.Sequential(
        norm(nn.Conv2d(2, 4, 3, padding=1)),
        nn.LeakyReLU(),
        norm(nn.ConvTranspose2d(4, 3, 4, 2, 1)),
        nn.Tanh(),
        norm(nn.Linear(7 * 2, 6)),
    ).double()


def train(name: str, mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """Two steps: outputs, gradients, and the vectors of the power iteration, which are buffers."""
    model, again = network(name), network(name)
    torchhalo.parallelize(again, mesh_of(mesh))
    for step in range(2):
        x = torch.randn(1, 2, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        plain = x.clone().requires_grad_()
        sharded = distribute_tensor(x, mesh_of(mesh), [Shard(dim) for dim in dims]).requires_grad_()
        with torchhalo.strict():
            found = again(sharded)
            found.sin().sum().backward()
        expected = model(plain)
        expected.sin().sum().backward()
        torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, rtol=0, atol=1e-10)
        for each, other in ((again, model), (again.eval(), model.eval()))[step:]:
            with torch.no_grad():
                torch.testing.assert_close(each(sharded).full_tensor(), other(plain), rtol=0, atol=1e-10)
    for (key, p), q in zip(again.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")
    for key, value in torchhalo.plain_state_dict(again).items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("mesh, dims", [((2,), (3,)), ((2, 2), (2, 3))])
@pytest.mark.parametrize("name", NORMS)
def test_networks(pool, name: str, mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    pool(len(mesh) ** 2 if len(mesh) > 1 else 2).run(train, name, mesh, dims)
