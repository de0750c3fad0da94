"""On a GPU: a start, checkpoints and a long run on one rank, and captured steps on several of NCCL, which share it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import test_checkpoint
import test_soak
import test_start
import torch
from harness import DEVICE, mesh_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import torchhalo


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Plain models are made there, wherever else tests make them."""
    with torch.device("cpu"):
        yield


@pytest.mark.usefixtures("on_cpu")
def test_start_from_the_meta_device(gpu: str) -> None:
    mesh = init_device_mesh(gpu, (1,))
    torch.manual_seed(4)
    with torch.device("meta"):
        model = test_start.Net()
    torchhalo.materialize(torchhalo.parallelize(model, mesh))
    assert all(tensor.is_cuda for tensor in [*model.parameters(), *model.buffers()])
    plain = test_start.Net()
    plain.load_state_dict(torchhalo.plain_state_dict(model))
    test_start.train(plain, 2)
    test_start.train(model, 2, mesh)
    for key, value in torchhalo.plain_state_dict(model).items():
        torch.testing.assert_close(value.cpu(), plain.state_dict()[key], rtol=0, atol=1e-9)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", list(test_checkpoint.OPTIMIZERS))
def test_a_checkpoint_is_read_on_both_devices(gpu: str, tmp_path: Path, name: str) -> None:
    before, after = range(test_checkpoint.BEFORE), range(test_checkpoint.BEFORE, test_checkpoint.BEFORE + test_checkpoint.AFTER)
    mesh, optimizer_of = init_device_mesh(gpu, (1,)), test_checkpoint.OPTIMIZERS[name]
    expected, _ = test_checkpoint.made("plain")
    optimizer = optimizer_of(expected.parameters())
    test_checkpoint.train(expected, optimizer, None, before)
    test_checkpoint.train(expected, optimizer, None, after)

    torch.manual_seed(1)
    saved = torchhalo.parallelize(test_checkpoint.Net().to(gpu), mesh)
    optimizer = optimizer_of(saved.parameters())
    test_checkpoint.train(saved, optimizer, mesh, before)
    torchhalo.Checkpoints(tmp_path).save(test_checkpoint.BEFORE, saved, optimizer)

    for model, cut in ((test_checkpoint.Net(), None), (torchhalo.parallelize(test_checkpoint.Net().to(gpu), mesh), mesh)):
        optimizer = optimizer_of(model.parameters())
        assert torchhalo.Checkpoints(tmp_path).load(model, optimizer) == {"step": test_checkpoint.BEFORE}
        test_checkpoint.train(model, optimizer, cut, after)
        found = test_checkpoint.parameters_of(model)
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(found[key].cpu(), value, rtol=0, atol=1e-9)


def test_a_long_run_of_changing_sizes(gpu: str) -> None:
    """The sizes of the soak; the GPU's memory is counted where that counts the heap."""
    plain = test_soak.made().to(gpu)
    expected = test_soak.train(plain)
    mesh = init_device_mesh(gpu, (1,))
    model = torchhalo.parallelize(test_soak.made().to(gpu), mesh, dims=2)
    counts: list[int] = []

    def watch(step: int) -> None:
        if step in test_soak.COUNTED:
            test_soak.held(mesh)
            counts.append(torch.cuda.memory_allocated())

    losses = test_soak.train(model, mesh, watch)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)
    for key, value in torchhalo.plain_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=0, atol=1e-9)
    # The sample of the step is counted too, of which the largest here has 40 KiB.
    assert max(counts) - counts[0] < 2**16, counts


class Dropping(nn.Module):
    """A step with every collective of a model: halos, statistics, a fold, gradients; with dropout, if wanted."""

    def __init__(self, p: float) -> None:
        super().__init__()
        layers = [nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.GroupNorm(2, 8)]
        self.layers = nn.Sequential(*layers, nn.Dropout(p), nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def check_captured_steps(p: float) -> None:
    """A whole training step, collectives included, captured once and replayed: one process's losses, or ever new draws."""
    mesh, steps = mesh_of((2,)), 4
    torch.manual_seed(1)
    plain = Dropping(p)
    model, images = copy.deepcopy(plain), torch.randn(steps, 2, 2, 20, 18, dtype=torch.float64)
    torchhalo.parallelize(model, mesh, dims=2)

    def trainer(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if p else 0.1)

        def train(image: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = model(image).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return train

    image, step = torchhalo.shard(images[0], mesh, 2), trainer(model)
    state = copy.deepcopy(model.state_dict())
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step(image)
        model.load_state_dict(state)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            kept = step(image)
        losses = []
        for each in images:
            image.copy_(torchhalo.shard(images[0] if p else each, mesh, 2))
            graph.replay()
            losses.append(float(kept.full_tensor()) if isinstance(kept, DTensor) else float(kept))
    torch.cuda.synchronize()
    if p:
        assert len(set(losses)) == steps, "each replay draws anew"
        return
    alone = trainer(plain)
    torch.testing.assert_close(losses, [float(alone(each)) for each in images], rtol=0, atol=1e-9)


@pytest.mark.skipif(DEVICE != "cuda", reason="ranks of NCCL share a GPU where TORCHHALO_TEST_DEVICE=cuda")
@pytest.mark.parametrize("p", [0.0, 0.5], ids=["exact", "dropout"])
def test_a_captured_step_on_ranks_of_nccl(pool, p: float) -> None:
    pool(2).run(check_captured_steps, p)
