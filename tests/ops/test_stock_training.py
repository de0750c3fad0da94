"""Training over replicated weights, in low precision and from the meta device, keeps working while torchhalo is enabled.

Above each test stands the function that it runs on every rank of real gloo processes, which compares with plain torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, whole
from pools import Pool
from stock import SIZE, Model, Run, assert_same_gradients, grid_mesh, line_mesh, mean_square, random, replicated
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor

import torchhalo

# bfloat16 keeps 8 bits: results that are summed in another order differ by a few units in the last of them.
BFLOAT16 = 2**-6


def _assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(whole(got), want.detach(), rtol=0, atol=BFLOAT16 * float(want.detach().abs().max()))


def _casts_to_bfloat16() -> None:
    mesh = line_mesh()
    for tensor in (
        distribute_tensor(random(10, 6), mesh, [Shard(0)]),
        distribute_tensor(random(10, 6), mesh, [Replicate()]),
        DTensor.from_local(random(10, 6), mesh, [Replicate()]),
    ):
        cast = tensor.to(torch.bfloat16)
        assert cast.dtype == cast.to_local().dtype == torch.bfloat16 and cast.placements == tensor.placements
        assert torch.equal(whole(cast), whole(tensor).to(torch.bfloat16))

    torch.manual_seed(0)
    model = Model(dtype=torch.float32)
    plain = copy.deepcopy(model).to(torch.bfloat16)
    model = distribute_module(model, mesh).to(torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor) and tensor.placements == (Replicate(),), name
        assert tensor.dtype == tensor.to_local().dtype == torch.bfloat16, name
        assert torch.equal(whole(tensor), plain.state_dict()[name]), name
    x = random(*SIZE, dtype=torch.float32).to(torch.bfloat16)
    output, expected = model(distribute_tensor(x, mesh, [Shard(3)])), plain(x)
    assert output.dtype == output.to_local().dtype == torch.bfloat16
    _assert_near(output, expected)
    grad = random(*expected.shape, dtype=torch.float32).to(torch.bfloat16)
    output.backward(distribute_tensor(grad, mesh, output.placements))
    expected.backward(grad)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        if want.requires_grad:
            assert got.grad is not None and got.grad.to_local().dtype == torch.bfloat16
            _assert_near(got.grad, want.grad)


def test_cast_to_bfloat16(run: Run) -> None:
    run(_casts_to_bfloat16)


def _autocasts() -> None:
    mesh = line_mesh()
    torch.manual_seed(0)
    model = Model(dtype=torch.float32)
    plain = copy.deepcopy(model)
    distribute_module(model, mesh)
    x = random(*SIZE, dtype=torch.float32)
    for placement in (Shard(3), Shard(2), Shard(0), Replicate()):
        model.zero_grad()
        plain.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            middle, expected_middle = model.first(distribute_tensor(x, mesh, [placement])), plain.first(x)
            assert middle.dtype == middle.to_local().dtype == torch.bfloat16
            output, expected = model(distribute_tensor(x, mesh, [placement])), plain(x)
        _assert_near(middle, expected_middle)
        _assert_near(output, expected)
        assert output.dtype == output.to_local().dtype
        grad = random(*expected.shape, dtype=torch.float32).to(expected.dtype)
        output.backward(distribute_tensor(grad, mesh, output.placements))
        expected.backward(grad)
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            assert got.dtype == torch.float32
            if want.requires_grad:
                assert got.grad is not None and got.grad.dtype == got.grad.to_local().dtype == torch.float32
                _assert_near(got.grad, want.grad)
    linear = distribute_module(nn.Linear(14, 5), mesh)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert linear(distribute_tensor(x, mesh)).dtype == torch.bfloat16


def test_autocast(run: Run) -> None:
    run(_autocasts)


def _initialises_from_meta() -> None:
    mesh = line_mesh()

    def partition(name: str, module: nn.Module, given: DeviceMesh) -> None:
        if name == "second":
            module.weight = nn.Parameter(distribute_tensor(module.weight, given, [Shard(0)]))

    for function, placement in (None, Replicate()), (partition, Shard(0)):
        model = distribute_module(Model(device="meta"), mesh, function)
        for tensor in (*model.parameters(), *model.buffers()):
            assert isinstance(tensor, DTensor) and tensor.is_meta and tensor.to_local().is_meta
        assert model.to_empty(device=DEVICE) is model
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            expected = placement if name == "second.weight" else Replicate()
            assert isinstance(tensor, DTensor) and tensor.placements == (expected,), name
            assert tensor.device.type == tensor.to_local().device.type == DEVICE, name
            assert tensor.requires_grad == name.startswith(("first", "second")), name
        assert model.second.weight.shape == (4, 8, 3, 3)

        torch.manual_seed(1)
        with torchhalo.torch_random():  # the draws of one process, where nothing is sharded
            for module in (model.first, model.second):
                module.reset_parameters()
        nn.init.ones_(model.scale)
        nn.init.zeros_(model.shift)
        if placement.is_replicate():
            torch.manual_seed(1)
            plain = Model()
            # in CUDA's stream stock DTensor takes other steps from one draw to the next than plain torch
            drawn = ("first.weight", "first.bias", "second.weight") if DEVICE == "cpu" else ("first.weight",)
            for name, tensor in model.named_parameters():
                if name in drawn:
                    assert torch.equal(tensor.to_local(), plain.get_parameter(name)), name
        # What each rank drew for its shard is its own affair; the model must then be right with those weights.
        plain = Model()
        plain.load_state_dict({name: whole(tensor) for name, tensor in model.state_dict().items()})
        assert plain.second.weight.std() > 0 and plain.scale.eq(1).all() and plain.shift.eq(0).all()
        output, expected = model(distribute_tensor(random(*SIZE), mesh, [Shard(3)])), plain(random(*SIZE))
        torch.testing.assert_close(whole(output), expected, rtol=0, atol=1e-10)
        mean_square(output).backward()
        mean_square(expected).backward()
        assert_same_gradients(model, plain)


def test_meta_device_initialisation(run: Run) -> None:
    run(_initialises_from_meta)


def _trains_a_little() -> None:
    """Several losses and options of SGD, on a model small enough to be compared in float64."""
    cases: list[tuple[DeviceMesh, list[Placement]]] = [
        (line_mesh(), [Shard(3)]),
        (line_mesh(), [Shard(0)]),
        (grid_mesh(), [Shard(2), Shard(3)]),
        (grid_mesh(), [Shard(0), Shard(3)]),
    ]
    variants: list[tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]] = [
        (mean_square, {}),
        (lambda output: ((output - 1) ** 2).mean(), {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
        (lambda output: output.sum() / 100, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ]
    for mesh, placements in cases:
        for loss_of, options in variants:
            torch.manual_seed(0)
            model = Model()
            plain, before = copy.deepcopy(model), copy.deepcopy(model)
            distribute_module(model, mesh)
            losses = []
            for network, x in (model, distribute_tensor(random(*SIZE), mesh, placements)), (plain, random(*SIZE)):
                optimizer = torch.optim.SGD(network.parameters(), lr=0.1, **options)
                for _ in range(4):
                    optimizer.zero_grad()
                    loss = loss_of(network(x))
                    loss.backward()
                    optimizer.step()
                    losses.append(float(whole(loss)))
            assert losses[:4] == pytest.approx(losses[4:], rel=0, abs=1e-10) and losses[3] < losses[0]
            for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert got.placements == replicated(mesh), name
                torch.testing.assert_close(got.to_local(), want, rtol=0, atol=1e-10)
                assert name == "shift" or not torch.equal(want, before.get_parameter(name)), name


@pytest.mark.slow
def test_training_with_sgd(run: Run) -> None:
    run(_trains_a_little)


class Training(NamedTuple):
    """A convolution that learns to give one value per channel, all made from seeds so that every process makes the same."""

    channels: tuple[int, int]
    options: dict[str, int]
    size: tuple[int, int, int, int]

    def layer(self) -> nn.Conv2d:
        layer = nn.Conv2d(*self.channels, **self.options, device="cpu")
        # Far enough from zero, before and after training, that errors can be compared with the values.
        nn.init.uniform_(layer.weight, 0.8, 1.2, generator=torch.Generator().manual_seed(0))
        nn.init.constant_(layer.bias, 2)
        return layer.to(DEVICE)

    def steps(self) -> Iterator[list[torch.Tensor]]:
        """Train; weight and bias after each step."""
        layer, generator = self.layer(), torch.Generator().manual_seed(1)
        input = torch.rand(self.size, generator=generator)
        target = layer.weight[0].numel() * (0.375 + 0.25 * torch.rand(1, self.channels[1], 1, 1, generator=generator))
        if dist.get_world_size() > 1:
            mesh = line_mesh()
            distribute_module(layer, mesh)
            input, target = distribute_tensor(input, mesh, [Shard(3)]), distribute_tensor(target, mesh)
        optimizer = torch.optim.SGD(layer.parameters(), lr=self.channels[1] / 25)
        while True:
            optimizer.zero_grad()
            output = layer(input)
            # The gradient of the mean square of the difference, by hand because these are big tensors.
            output.backward((output.detach() - target) * (2 / output.numel()))
            optimizer.step()
            yield [whole(parameter).clone() for parameter in layer.parameters()]


TRAININGS = {
    "down-sampling": Training((3, 256), {"kernel_size": 4, "stride": 4}, (7, 3, 512, 1024)),
    "depthwise": Training((256, 256), {"kernel_size": 7, "padding": 3, "groups": 256}, (7, 256, 128, 256)),
}


STEPS = 3


_running: dict[str, Iterator[list[torch.Tensor]]] = {}


def _next_step(name: str, last: bool) -> list[torch.Tensor]:
    """One step at a time, so that no call of a slow machine's ranks takes longer than the pool waits for it."""
    result = next(_running.setdefault(name, TRAININGS[name].steps()))
    if last:
        del _running[name]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_training_at_full_size(pool: Callable[[int], Pool], name: str) -> None:
    """Weight and bias stay those of one process, in a mean squared error that is absolute and relative."""

    def train(ranks: Pool) -> list[list[list[torch.Tensor]]]:
        return [ranks.run(_next_step, name, step == STEPS - 1) for step in range(STEPS)]

    one, two, four = pool(1), pool(2), pool(4)
    with ThreadPoolExecutor(1) as executor:
        reference = executor.submit(train, one)
        trained = [train(two), train(four)]
        expected = [step[0] for step in reference.result()]
    for before, after in zip(TRAININGS[name].layer().parameters(), expected[-1], strict=True):
        assert (after - before.to(after.device)).square().mean() > 1e-3, "training must change what is compared"
    for steps in trained:
        for step, want in zip(steps, expected, strict=True):
            for got in step:
                for mine, theirs in zip(got, want, strict=True):
                    assert (mine - theirs).square().mean() <= 1e-6
                    assert ((mine - theirs) / theirs).square().mean() <= 1e-6
