"""What `explain` tells before anything runs is what a run then does."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import gathering  # noqa: F401, the rule of `median`
import pytest
import torch
from harness import mesh_of
from test_training import Net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchhalo
from torchhalo.exchange.transfer import counted
from torchhalo.parallel.arrays import spatial_dims
from torchhalo.tools import cli
from torchhalo.tools.explain import explain, smallest_mesh
from torchhalo.tools.launch import on_ranks, peak_memory
from torchhalo.torch_internals import caching


def deep() -> nn.Module:
    """Windows of several kinds, an interpolation, a norm over batches, and a slice that moves between ranks."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(2, 4, 7, stride=2, padding=3)
            self.pool = nn.MaxPool2d(3, 2, 1)
            self.norm = nn.BatchNorm2d(4)
            self.wide = nn.Conv2d(4, 4, 3, padding=4, dilation=4, groups=2)
            self.up = nn.Upsample(scale_factor=2, mode="bilinear")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.wide(self.norm(self.pool(self.stem(x)))))[:, :, 3:]

    return Deep().double()


def measured(model: Any, shape: tuple[int, ...], mesh_shape: tuple[int, ...], train: bool) -> int:
    """How many bytes of halos this rank sends in a step."""
    dims = spatial_dims(shape, len(mesh_shape))
    mesh = mesh_of(mesh_shape)
    net = torchhalo.parallelize(model().train(train), mesh, dims=dims)
    x = torchhalo.shard(torch.ones(shape, dtype=torch.float64), mesh, dims)
    with counted() as sent, torch.set_grad_enabled(train):
        out = net(x)
        if train:
            out.square().mean().backward()
    return sum(sent)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("model, shape, mesh", [(Net, (2, 2, 22, 18), (3,)), (deep, (1, 2, 50, 41), (2, 2))])
def test_bytes_are_those_of_a_run(pool, model: Any, shape: tuple[int, ...], mesh: tuple[int, ...], train: bool) -> None:
    sent = pool(math.prod(mesh)).run(measured, model, shape, mesh, train)
    found = explain(model, shape, mesh, dtype=torch.float64, train=train, every_rank=True)
    assert [rank.total("sent") for rank in found.ranks] == sent
    assert max(sent) > 0 and found.busiest.total("sent") == max(sent)


class Steps(nn.Module):
    """A pool, and as many convolutions as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.conv = nn.MaxPool2d(3, 1, 1), nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        x = self.pool(x)
        for _ in range(int(steps)):
            x = self.conv(x)
        return x


def test_a_tensor_stands_for_an_input() -> None:
    shape, row = (1, 1, 8, 8), 8 * 4
    for steps in (1, 3):
        inputs = [shape, torch.tensor(steps)]
        assert explain(Steps(), inputs, (2,)).busiest.total("sent") == (1 + steps) * row
        assert explain(Steps(), inputs, (2,), train=True).busiest.total("sent") == (1 + 2 * steps) * row
        inputs[0] = torch.empty(shape, device="meta", requires_grad=True)
        found = explain(Steps(), inputs, (2,), train=True)
        assert found.busiest.total("sent") == 2 * (1 + steps) * row and found.inputs == [shape, ()]


def test_layers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 5, stride=2, padding=2))
    found = explain(model, (1, 3, 64, 48), (4,), train=True)
    first, relu, last = (layer for layer in found.busiest.layers if layer.path)
    assert (first.kind, first.output, first.shard, first.halo) == ("Conv2d", (1, 8, 64, 48), (1, 8, 16, 48), {2: (1, 1)})
    assert (last.output, last.shard, last.halo) == ((1, 4, 32, 24), (1, 4, 8, 24), {2: (2, 1)})
    # Forward the input's two rows, backward, as no gradient of the image is wanted, those of its own gradient.
    assert first.sent == 2 * 3 * 48 * 4 + 2 * 8 * 48 * 4 and first.messages == 4
    forward = 2 * 9 * 3 * 8 * 16 * 48
    assert first.flops >= 2 * forward
    assert relu.kept == 8 * 16 * 48 * 4 and first.kept == 0
    assert found.busiest.gradients == sum(p.numel() for p in model.parameters()) * 4
    assert found.busiest.total("gathered") == 0
    assert found.busiest.place in {(1,), (2,)} and [rank.place for rank in found.ranks] == [(0,), (2,), (3,)]
    assert json.loads(found.json())["ranks"][1]["layers"][0]["halo"] == {"2": [1, 1]}
    assert all(p.device.type == "cpu" and not hasattr(p, "fake_mode") for p in model.parameters()), "the model is untouched"


def memory_hog() -> nn.Module:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def run_hog(shape: tuple[int, ...]) -> int:
    """The peak of this process over what it has at the start, but for the input.

    In channels-last, for which the kernels take no memory of their own.
    """
    mesh = init_device_mesh("cpu", (2,))
    model = torchhalo.parallelize(memory_hog(), mesh)
    for size in ((1, 3, 64, 64), shape):
        before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        x = torchhalo.shard(torch.ones(size).to(memory_format=torch.channels_last), mesh)
        model(x).square().mean().backward()
    return peak_memory() - before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell the memory of a process")
def test_memory_is_that_of_a_run() -> None:
    shape = (1, 3, 2048, 1024)
    found = explain(memory_hog, shape, (2,), train=True)
    for peak in on_ranks(run_hog, 2, shape):
        assert found.peak == pytest.approx(peak, rel=0.1)


def test_memory_is_the_same_with_full_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are emptied in the middle, DTensor works out its rules again, on tensors of the size of the whole."""
    expected = explain(memory_hog, (1, 3, 512, 256), (4,), train=True)
    monkeypatch.setattr(caching, "CACHE_SIZE", 4)
    found = explain(memory_hog, (1, 3, 512, 256), (4,), train=True)
    assert [rank.peak for rank in found.ranks] == [rank.peak for rank in expected.ranks]


def test_what_gathers_is_told() -> None:
    class Median(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.median(dim=2).values

    found = explain(nn.Sequential(nn.Conv2d(1, 1, 1), Median()), (1, 1, 8, 8), (2,))
    (layer,) = (layer for layer in found.busiest.layers if layer.gathered)
    assert layer.path == "1" and layer.gathered == 4 * 8 * 4
    assert "GATHERS 128 B" in str(found)


def test_smallest_mesh_and_time() -> None:
    model, shape = nn.Conv2d(3, 64, 3, padding=1), (1, 3, 512, 512)
    peak = {size: explain(model, shape, (size,)).peak for size in (1, 2, 4)}
    assert peak[1] > peak[2] > peak[4]
    assert smallest_mesh(model, shape, peak[1]) == (1,)
    assert smallest_mesh(model, shape, peak[2]) == (2,)
    assert smallest_mesh(model, shape, peak[2] - 1, axes=2) == (2, 2)
    assert smallest_mesh(model, shape, 1) is None
    found = explain(model, shape, (4,))
    hidden, exposed = found.seconds(flops=1e9, bandwidth=1e6)
    compute, sent = found.busiest.total("flops") / 1e9, found.busiest.total("sent") / 1e6 + 2e-5
    assert hidden == pytest.approx(max(compute, sent)) and exposed == pytest.approx(compute + sent)


@pytest.mark.slow
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "test_explain:memory_hog", "--input", "1,3,256,256"]
    assert cli.main([*command, "--mesh", "2x4", "--train", "--dtype", "bfloat16", "--device", "h100", "--memory", "40MB"]) == 0
    text = capsys.readouterr().out
    assert "a training step on 1x3x256x256 bfloat16, dims (2, 3) over a mesh of 2x4" in text
    assert "peak memory per rank" in text and "predicted step" in text and "suffice on a mesh of" in text
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"] == [2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--flops", "1T"], "--flops and --bandwidth go together"),
        (["--memory", "much"], "wants a number with a unit"),
        (["--mesh", "2y"], "wants N or NxM"),
        (["--dims", "2,3"], "--dims names 2 dims, the mesh has 1 axes"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["explain", "test_explain:memory_hog", "--input", "1,3,8,8", *arguments])
    assert message in capsys.readouterr().err
