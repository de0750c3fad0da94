"""What stands beside convolution, as users of DTensor know it, must keep working while torchhalo is enabled.

Above each test stands the function that it runs on every rank of real gloo processes, which compares with plain torch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Pool, assert_parity, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor

import torchhalo

Run = Callable[..., list[Any]]


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def run(request: pytest.FixtureRequest, pool: Callable[[int], Pool]) -> Run:
    """Runs a function on every rank of 2, and of 4, processes."""
    return pool(request.param).run


def _line() -> DeviceMesh:
    """All ranks along one axis."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _grid() -> DeviceMesh:
    """All ranks along two axes, 2x1 or 2x2."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2))


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def _replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    return (Replicate(),) * mesh.ndim


# distribute_tensor.


def _distributes_leaves() -> None:
    mesh = _line()
    for requires_grad in (True, False):
        for placement in (Shard(0), Shard(1), Replicate()):
            plain = _random(6, 8).requires_grad_(requires_grad)
            tensor = distribute_tensor(plain, mesh, [placement])
            assert isinstance(tensor, DTensor) and tensor.placements == (placement,)
            assert tensor.is_leaf and tensor.requires_grad == requires_grad
            assert tensor.shape == plain.shape and tensor.stride() == plain.stride() and tensor.dtype == plain.dtype
            assert torch.equal(whole(tensor), plain)
            if requires_grad:
                (tensor * tensor).sum().backward()
                assert plain.grad is None, "the DTensor is a leaf of its own"
                assert tensor.grad is not None and torch.equal(whole(tensor.grad), 2 * plain)
    assert distribute_tensor(_random(4), mesh).placements == (Replicate(),)
    # The first rank's values are those of all.
    tensor = distribute_tensor(_random(8, seed=dist.get_rank()), mesh, [Shard(0)])
    assert torch.equal(whole(tensor), _random(8, seed=0))
    # A parameter that is distributed can be made a parameter again, and a convolution takes its gradient there.
    weight = nn.Parameter(distribute_tensor(_random(4, 3, 3, 3), mesh))
    F.conv2d(distribute_tensor(_random(2, 3, 8, 9), mesh, [Shard(3)]), weight, padding=1).sum().backward()
    expected = _random(4, 3, 3, 3).requires_grad_()
    F.conv2d(_random(2, 3, 8, 9), expected, padding=1).sum().backward()
    assert weight.is_leaf
    torch.testing.assert_close(whole(weight.grad), expected.grad, rtol=0, atol=1e-10)


def test_distribute_tensor_keeps_requires_grad_and_makes_leaves(run: Run) -> None:
    run(_distributes_leaves)


def _distributes_along_negative_dims() -> None:
    mesh = _line()
    plain = _random(2, 3, 8, 12)
    for dim in (-1, -2, -3, -4):
        tensor = distribute_tensor(plain, mesh, [Shard(dim)])
        assert tensor.placements == (Shard(4 + dim),)
        assert torch.equal(whole(tensor), plain)
    tensor = distribute_tensor(plain, _grid(), [Shard(-1), Shard(-2)])
    assert tensor.placements == (Shard(3), Shard(2))
    assert torch.equal(whole(tensor), plain)

    def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, padding=1)

    tensors = [plain, _random(4, 3, 3, 3)]
    result = assert_parity(convolve, tensors, mesh, [[Shard(-1)], [Replicate()]])
    assert result.placements == (Shard(3),)


def test_distribute_tensor_takes_negative_dims(run: Run) -> None:
    run(_distributes_along_negative_dims)


def _distributes_as_chunk_does() -> None:
    mesh, rank, ranks = _line(), dist.get_rank(), dist.get_world_size()
    for dim in (0, 1, 2):
        for size in (*range(2 * ranks + 2), 13):
            shape = [3, 4, 2]
            shape[dim] = size
            plain = _random(*shape)
            tensor = distribute_tensor(plain, mesh, [Shard(dim)])
            chunks = plain.chunk(ranks, dim)
            expected = chunks[rank] if rank < len(chunks) else plain.narrow(dim, 0, 0)
            assert tensor.shape == plain.shape
            assert tensor.to_local().shape == expected.shape and torch.equal(tensor.to_local(), expected)
            assert torch.equal(whole(tensor), plain)
    # A grid chunks first along one axis and then each chunk along the other.
    grid = _grid()
    row, column = grid.get_coordinate()
    plain = _random(5, 7)
    tensor = distribute_tensor(plain, grid, [Shard(0), Shard(0)])
    chunks = plain.chunk(2)[row].chunk(grid.size(1))
    assert torch.equal(tensor.to_local(), chunks[column])
    assert torch.equal(whole(tensor), plain)
    tensor = distribute_tensor(plain, grid, [Shard(0), Shard(1)])
    assert torch.equal(tensor.to_local(), plain.chunk(2)[row].chunk(grid.size(1), 1)[column])


def test_distribute_tensor_cuts_uneven_sizes_as_chunk_does(run: Run) -> None:
    run(_distributes_as_chunk_does)


def _refuses_to_distribute() -> None:
    mesh, grid = _line(), _grid()
    plain = _random(8, 8)
    for placements in ([], [Shard(0), Shard(1)]):
        with pytest.raises(ValueError, match=r"must have the same length as `device_mesh.ndim`"):
            distribute_tensor(plain, mesh, placements)
    with pytest.raises(ValueError, match=r"must have the same length as `device_mesh.ndim`"):
        distribute_tensor(plain, grid, [Shard(0)])
    with pytest.raises(RuntimeError, match="found non-leaf tensor"):
        distribute_tensor(plain.clone().requires_grad_() + 1, mesh, [Shard(0)])

    tensor = distribute_tensor(plain, mesh, [Shard(0)])
    assert distribute_tensor(tensor, mesh, [Shard(0)]) is tensor
    with pytest.raises(ValueError, match="to a different device mesh"):
        distribute_tensor(tensor, grid, [Shard(0), Replicate()])
    backwards = DeviceMesh("cpu", list(reversed(range(dist.get_world_size()))))
    with pytest.raises(ValueError, match="to a different device mesh"):
        distribute_tensor(tensor, backwards, [Shard(0)])
    for placement in (Shard(1), Replicate()):
        with pytest.raises(ValueError, match="to a different placements"):
            distribute_tensor(tensor, mesh, [placement])


def test_distribute_tensor_refuses_wrong_calls(run: Run) -> None:
    run(_refuses_to_distribute)


# distribute_module.


class Model(nn.Module):
    """Two convolutions, the second without bias, a buffer and a frozen parameter."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, device=device, dtype=dtype)
        self.second = nn.Conv2d(8, 4, 3, stride=2, padding=1, bias=False, device=device, dtype=dtype)
        self.register_buffer("scale", torch.full((4, 1, 1), 2.0, device=device, dtype=dtype))
        self.shift = nn.Parameter(torch.full((4, 1, 1), 0.5, device=device, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()) * self.scale + self.shift


SIZE = (2, 3, 10, 14)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum() / output.numel()


def _assert_same_gradients(sharded: nn.Module, plain: nn.Module, atol: float = 1e-10) -> None:
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in sharded.named_parameters()] == names
    for name, got, want in zip(names, sharded.parameters(), plain.parameters(), strict=True):
        if want.grad is None:
            assert got.grad is None, name
        else:
            assert isinstance(got.grad, DTensor) and got.grad.shape == want.shape and got.grad.dtype == want.grad.dtype
            torch.testing.assert_close(whole(got.grad), want.grad, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")  # noqa: B023


def _replicates_module() -> None:
    for mesh, placements in (_line(), [Shard(3)]), (_grid(), [Shard(2), Shard(3)]):
        torch.manual_seed(dist.get_rank())  # the first rank's weights must be those of all
        model = Model()
        torch.manual_seed(0)
        plain = Model()
        assert distribute_module(model, mesh) is model
        for name, tensor in model.state_dict().items():
            assert isinstance(tensor, DTensor) and tensor.placements == _replicated(mesh), name
            assert torch.equal(tensor.to_local(), plain.state_dict()[name]), name
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, nn.Parameter) and parameter.is_leaf
            assert parameter.requires_grad == (name != "shift")
        output, expected = model(distribute_tensor(_random(*SIZE), mesh, placements)), plain(_random(*SIZE))
        assert isinstance(output, DTensor) and output.placements == tuple(placements)
        torch.testing.assert_close(whole(output), expected, rtol=0, atol=1e-10)
        _loss(output).backward()
        _loss(expected).backward()
        _assert_same_gradients(model, plain)


def test_distribute_module_replicates(run: Run) -> None:
    run(_replicates_module)


def _partitions_module() -> None:
    mesh = _line()
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    seen = []

    def partition(name: str, module: nn.Module, given: DeviceMesh) -> None:
        assert given == mesh
        seen.append((name, type(module)))
        if name == "second":
            for key, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, given, [Shard(0)])))

    distribute_module(model, mesh, partition)
    assert seen == [(name, type(module)) for name, module in plain.named_modules()]
    assert model.second.weight.placements == (Shard(0),)
    for tensor in (model.first.weight, model.first.bias, model.scale, model.shift):
        assert tensor.placements == (Replicate(),)

    for placement in (Replicate(), Shard(0), Shard(3)):
        model.zero_grad()
        plain.zero_grad()
        output, expected = model(distribute_tensor(_random(*SIZE), mesh, [placement])), plain(_random(*SIZE))
        torch.testing.assert_close(whole(output), expected, rtol=0, atol=1e-10)
        _loss(output).backward()
        _loss(expected).backward()
        _assert_same_gradients(model, plain)
        assert model.second.weight.grad.placements == (Shard(0),)


def test_distribute_module_with_a_partition_function(run: Run) -> None:
    run(_partitions_module)


def _hooks_module() -> None:
    mesh = _line()
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)

    def shard_input(module: nn.Module, inputs: tuple[torch.Tensor], given: DeviceMesh) -> tuple[DTensor]:
        assert module is model and given == mesh and not isinstance(inputs[0], DTensor)
        return (distribute_tensor(inputs[0], given, [Shard(3)]),)

    def gather_output(module: nn.Module, output: DTensor, given: DeviceMesh) -> torch.Tensor:
        assert module is model and given == mesh and output.placements == (Shard(3),)
        return output.full_tensor()

    distribute_module(model, mesh, input_fn=shard_input, output_fn=gather_output)
    output, expected = model(_random(*SIZE)), plain(_random(*SIZE))
    assert not isinstance(output, DTensor)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    _loss(output).backward()
    _loss(expected).backward()
    _assert_same_gradients(model, plain)

    # All three at once.
    torch.manual_seed(0)
    model = Model()

    def shard_first(name: str, module: nn.Module, given: DeviceMesh) -> None:
        if name == "first":
            for key, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, given, [Shard(0)])))

    def gather(module: nn.Module, output: DTensor, given: DeviceMesh) -> torch.Tensor:
        return output.full_tensor()

    def replicate_input(module: nn.Module, inputs: tuple[torch.Tensor], given: DeviceMesh) -> tuple[DTensor]:
        return (distribute_tensor(inputs[0], given, [Replicate()]),)

    distribute_module(model, mesh, shard_first, replicate_input, gather)
    assert model.first.weight.placements == model.first.bias.placements == (Shard(0),)
    plain.zero_grad()
    output, expected = model(_random(*SIZE)), plain(_random(*SIZE))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    _loss(output).backward()
    _loss(expected).backward()
    _assert_same_gradients(model, plain)


def test_distribute_module_with_input_and_output_functions(run: Run) -> None:
    run(_hooks_module)


def _distributes_module_once() -> None:
    mesh = _line()
    model = distribute_module(Model(), mesh)
    with pytest.raises(RuntimeError, match="should only be called once"):
        distribute_module(model, mesh)


def test_distribute_module_twice_raises(run: Run) -> None:
    run(_distributes_module_once)


# bfloat16 keeps 8 bits: results that are summed in another order differ by a few units in the last of them.
BFLOAT16 = 2**-6


def _assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(whole(got), want.detach(), rtol=0, atol=BFLOAT16 * float(want.detach().abs().max()))


def _casts_to_bfloat16() -> None:
    mesh = _line()
    for tensor in (
        distribute_tensor(_random(10, 6), mesh, [Shard(0)]),
        distribute_tensor(_random(10, 6), mesh, [Replicate()]),
        DTensor.from_local(_random(10, 6), mesh, [Replicate()]),
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
    x = _random(*SIZE, dtype=torch.float32).to(torch.bfloat16)
    output, expected = model(distribute_tensor(x, mesh, [Shard(3)])), plain(x)
    assert output.dtype == output.to_local().dtype == torch.bfloat16
    _assert_near(output, expected)
    grad = _random(*expected.shape, dtype=torch.float32).to(torch.bfloat16)
    output.backward(distribute_tensor(grad, mesh, output.placements))
    expected.backward(grad)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        if want.requires_grad:
            assert got.grad is not None and got.grad.to_local().dtype == torch.bfloat16
            _assert_near(got.grad, want.grad)


def test_cast_to_bfloat16(run: Run) -> None:
    run(_casts_to_bfloat16)


def _autocasts() -> None:
    mesh = _line()
    torch.manual_seed(0)
    model = Model(dtype=torch.float32)
    plain = copy.deepcopy(model)
    distribute_module(model, mesh)
    x = _random(*SIZE, dtype=torch.float32)
    for placement in (Shard(3), Shard(2), Shard(0), Replicate()):
        model.zero_grad()
        plain.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            middle, expected_middle = model.first(distribute_tensor(x, mesh, [placement])), plain.first(x)
            assert middle.dtype == middle.to_local().dtype == torch.bfloat16
            output, expected = model(distribute_tensor(x, mesh, [placement])), plain(x)
        _assert_near(middle, expected_middle)
        _assert_near(output, expected)
        assert output.dtype == output.to_local().dtype
        grad = _random(*expected.shape, dtype=torch.float32).to(expected.dtype)
        output.backward(distribute_tensor(grad, mesh, output.placements))
        expected.backward(grad)
        for got, want in zip(model.parameters(), plain.parameters(), strict=True):
            assert got.dtype == torch.float32
            if want.requires_grad:
                assert got.grad is not None and got.grad.dtype == got.grad.to_local().dtype == torch.float32
                _assert_near(got.grad, want.grad)
    linear = distribute_module(nn.Linear(14, 5), mesh)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(distribute_tensor(x, mesh)).dtype == torch.bfloat16


def test_autocast(run: Run) -> None:
    run(_autocasts)


def _initialises_from_meta() -> None:
    mesh = _line()

    def partition(name: str, module: nn.Module, given: DeviceMesh) -> None:
        if name == "second":
            module.weight = nn.Parameter(distribute_tensor(module.weight, given, [Shard(0)]))

    for function, placement in (None, Replicate()), (partition, Shard(0)):
        model = distribute_module(Model(device="meta"), mesh, function)
        for tensor in (*model.parameters(), *model.buffers()):
            assert isinstance(tensor, DTensor) and tensor.is_meta and tensor.to_local().is_meta
        assert model.to_empty(device="cpu") is model
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            expected = placement if name == "second.weight" else Replicate()
            assert isinstance(tensor, DTensor) and tensor.placements == (expected,), name
            assert tensor.device.type == tensor.to_local().device.type == "cpu", name
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
            for name, tensor in model.named_parameters():
                if name != "shift":
                    assert torch.equal(tensor.to_local(), plain.get_parameter(name)), name
        # What each rank drew for its shard is its own affair; the model must then be right with those weights.
        plain = Model()
        plain.load_state_dict({name: whole(tensor) for name, tensor in model.state_dict().items()})
        assert plain.second.weight.std() > 0 and plain.scale.eq(1).all() and plain.shift.eq(0).all()
        output, expected = model(distribute_tensor(_random(*SIZE), mesh, [Shard(3)])), plain(_random(*SIZE))
        torch.testing.assert_close(whole(output), expected, rtol=0, atol=1e-10)
        _loss(output).backward()
        _loss(expected).backward()
        _assert_same_gradients(model, plain)


def test_meta_device_initialisation(run: Run) -> None:
    run(_initialises_from_meta)


# Training over replicated weights.


def _trains_a_little() -> None:
    """Several losses and options of SGD, on a model small enough to be compared in float64."""
    cases: list[tuple[DeviceMesh, list[Placement]]] = [
        (_line(), [Shard(3)]),
        (_line(), [Shard(0)]),
        (_grid(), [Shard(2), Shard(3)]),
        (_grid(), [Shard(0), Shard(3)]),
    ]
    variants: list[tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]] = [
        (_loss, {}),
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
            for network, x in (model, distribute_tensor(_random(*SIZE), mesh, placements)), (plain, _random(*SIZE)):
                optimizer = torch.optim.SGD(network.parameters(), lr=0.1, **options)
                for _ in range(4):
                    optimizer.zero_grad()
                    loss = loss_of(network(x))
                    loss.backward()
                    optimizer.step()
                    losses.append(float(whole(loss)))
            assert losses[:4] == pytest.approx(losses[4:], rel=0, abs=1e-10) and losses[3] < losses[0]
            for (name, got), want in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert got.placements == _replicated(mesh), name
                torch.testing.assert_close(got.to_local(), want, rtol=0, atol=1e-10)
                assert name == "shift" or not torch.equal(want, before.get_parameter(name)), name


def test_training_with_sgd(run: Run) -> None:
    run(_trains_a_little)


class Training(NamedTuple):
    """A convolution that learns to give one value per channel, all made from seeds so that every process makes the same."""

    channels: tuple[int, int]
    options: dict[str, int]
    size: tuple[int, int, int, int]

    def layer(self) -> nn.Conv2d:
        layer = nn.Conv2d(*self.channels, **self.options)
        # Far enough from zero, before and after training, that errors can be compared with the values.
        nn.init.uniform_(layer.weight, 0.8, 1.2, generator=torch.Generator().manual_seed(0))
        nn.init.constant_(layer.bias, 2)
        return layer

    def steps(self) -> Iterator[list[torch.Tensor]]:
        """Train; weight and bias after each step."""
        layer, generator = self.layer(), torch.Generator().manual_seed(1)
        input = torch.rand(self.size, generator=generator)
        target = layer.weight[0].numel() * (0.375 + 0.25 * torch.rand(1, self.channels[1], 1, 1, generator=generator))
        if dist.get_world_size() > 1:
            mesh = _line()
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
        assert (after - before).square().mean() > 1e-3, "training must change what is compared"
    for steps in trained:
        for step, want in zip(steps, expected, strict=True):
            for got in step:
                for mine, theirs in zip(got, want, strict=True):
                    assert (mine - theirs).square().mean() <= 1e-6
                    assert ((mine - theirs) / theirs).square().mean() <= 1e-6


# Convolutions that need no halo.


def _convolves_without_halo() -> None:
    def conv1d(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, w, b, stride=2, padding=1)

    def conv2d(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b, padding=1)

    def conv3d(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv3d(x, w, b, padding=(1, 0, 2), dilation=(1, 2, 1))

    for mesh in (_line(), _grid()):
        whole_, batch = _replicated(mesh), (Shard(0), *_replicated(mesh)[1:])
        for x in (_random(3, 4, 11), _random(4, 11)):  # batched and not
            result = assert_parity(conv1d, [x, _random(6, 4, 3), _random(6)], mesh, [whole_] * 3)
            assert result.placements == whole_
        for size in (4, 6, 3):  # also uneven, and fewer samples than ranks
            tensors = [_random(size, 2, 5, 6, 7), _random(3, 2, 3, 2, 3), _random(3)]
            result = assert_parity(conv3d, tensors, mesh, [batch, whole_, whole_])
            assert result.placements == batch
        # Where the input needs no gradient it gets none, and the others are right.
        for x_placements in (whole_, batch, (Shard(3), *_replicated(mesh)[1:]), (*_replicated(mesh)[1:], Shard(2))):
            tensors = [_random(4, 3, 9, 10), _random(5, 3, 3, 3), _random(5)]
            for needs_grad in ((False, True, True), (False, True, False), (False, False, True)):
                assert_parity(conv2d, tensors, mesh, [x_placements, whole_, whole_], needs_grad=needs_grad)


def test_replicated_and_batch_sharded_inputs_and_inputs_without_gradient(run: Run) -> None:
    run(_convolves_without_halo)


# Other ops on replicated inputs.


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
    for mesh in (_line(), _grid()):
        for index in SLICES:
            result = assert_parity(lambda x: x[index] * 1, [_random(5, 4, 7)], mesh, [_replicated(mesh)], atol=0)  # noqa: B023
            assert result.placements == _replicated(mesh)
        for function in (
            lambda x: x.narrow(2, 1, 4),
            lambda x: x.select(1, -1),
            lambda x: torch.cat([x[:, 2:], x[:, :2]], 1),
            lambda x: x[1:4] * x[:3],
            lambda x: x[:, :, 1:][:, 1:][1:],
            lambda x: torch.cat(x.chunk(3, 2)[::-1], 2),
            lambda x: torch.cat(x.split([3, 4], 2)[::-1], 2),
        ):
            assert_parity(function, [_random(5, 4, 7)], mesh, [_replicated(mesh)])
        # Writing through a slice:
        plain, tensor = _random(5, 4, 7), distribute_tensor(_random(5, 4, 7), mesh)
        for each in (plain, tensor):
            each[1:3, :, ::2] = 4 * each[3:, :, ::2]
            each[..., -1] *= 3
        assert torch.equal(tensor.to_local(), plain)


def test_slicing_of_replicated_inputs(run: Run) -> None:
    run(_slices)


def _draws() -> tuple[torch.Tensor, ...]:
    """What this rank drew, all of it."""
    drawn = []
    for mesh in (_line(), _grid()):
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
        assert isinstance(result, DTensor) and result.placements == _replicated(mesh)
        assert result.shape == tensor.shape and result.dtype == tensor.dtype
        assert result[0].to_local().eq(0).all() and result[1].to_local().eq(1).all()
        assert 0.4 < float(whole(result).mean()) < 0.6
        drawn += [result.to_local().detach(), torch.bernoulli(tensor).to_local().detach()]
        assert not torch.equal(drawn[-2], drawn[-1]), "another draw gives other values"

        weight = distribute_tensor(_random(64, 33), mesh)
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
        result = assert_parity(loss, tensors, mesh, [_replicated(mesh)] * len(tensors), needs_grad=needs_grad)
        assert result.placements == _replicated(mesh)

    for mesh, shapes in (_line(), [(9, classes), (classes,), (2, classes, 4, 3)]), (_grid(), [(3, classes, 5)]):
        for shape in shapes:
            scores = _random(*shape)
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
                shares = _random(*shape, seed=1).softmax(dim)
                check(lambda x, y: F.cross_entropy(x, y, reduction=reduction), [scores, shares], mesh)  # noqa: B023


def test_cross_entropy_of_replicated_inputs(run: Run) -> None:
    run(_takes_cross_entropy)
