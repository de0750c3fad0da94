"""distribute_tensor and distribute_module, as users of DTensor know them, keep working while torchhalo is enabled.

Above each test stands the function that it runs on every rank of real gloo processes, which compares with plain torch.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import DEVICE, assert_parity, whole
from stock import SIZE, Model, Run, assert_same_gradients, grid_mesh, line_mesh, mean_square, random, replicated
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor


def _distributes_leaves() -> None:
    mesh = line_mesh()
    for requires_grad in (True, False):
        for placement in (Shard(0), Shard(1), Replicate()):
            plain = random(6, 8).requires_grad_(requires_grad)
            tensor = distribute_tensor(plain, mesh, [placement])
            assert isinstance(tensor, DTensor) and tensor.placements == (placement,)
            assert tensor.is_leaf and tensor.requires_grad == requires_grad
            assert tensor.shape == plain.shape and tensor.stride() == plain.stride() and tensor.dtype == plain.dtype
            assert torch.equal(whole(tensor), plain)
            if requires_grad:
                (tensor * tensor).sum().backward()
                assert plain.grad is None, "the DTensor is a leaf of its own"
                assert tensor.grad is not None and torch.equal(whole(tensor.grad), 2 * plain)
    assert distribute_tensor(random(4), mesh).placements == (Replicate(),)
    # The first rank's values are those of all.
    tensor = distribute_tensor(random(8, seed=dist.get_rank()), mesh, [Shard(0)])
    assert torch.equal(whole(tensor), random(8, seed=0))
    # A parameter that is distributed can be made a parameter again, and a convolution takes its gradient there.
    weight = nn.Parameter(distribute_tensor(random(4, 3, 3, 3), mesh))
    F.conv2d(distribute_tensor(random(2, 3, 8, 9), mesh, [Shard(3)]), weight, padding=1).sum().backward()
    expected = random(4, 3, 3, 3).requires_grad_()
    F.conv2d(random(2, 3, 8, 9), expected, padding=1).sum().backward()
    assert weight.is_leaf
    torch.testing.assert_close(whole(weight.grad), expected.grad, rtol=0, atol=1e-10)


def test_distribute_tensor_keeps_requires_grad_and_makes_leaves(run: Run) -> None:
    run(_distributes_leaves)


def _distributes_along_negative_dims() -> None:
    mesh = line_mesh()
    plain = random(2, 3, 8, 12)
    for dim in (-1, -2, -3, -4):
        tensor = distribute_tensor(plain, mesh, [Shard(dim)])
        assert tensor.placements == (Shard(4 + dim),)
        assert torch.equal(whole(tensor), plain)
    tensor = distribute_tensor(plain, grid_mesh(), [Shard(-1), Shard(-2)])
    assert tensor.placements == (Shard(3), Shard(2))
    assert torch.equal(whole(tensor), plain)

    def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, padding=1)

    tensors = [plain, random(4, 3, 3, 3)]
    result = assert_parity(convolve, tensors, mesh, [[Shard(-1)], [Replicate()]])
    assert result.placements == (Shard(3),)


def test_distribute_tensor_takes_negative_dims(run: Run) -> None:
    run(_distributes_along_negative_dims)


def _distributes_as_chunk_does() -> None:
    mesh, rank, ranks = line_mesh(), dist.get_rank(), dist.get_world_size()
    for dim in (0, 1, 2):
        for size in (*range(2 * ranks + 2), 13):
            shape = [3, 4, 2]
            shape[dim] = size
            plain = random(*shape)
            tensor = distribute_tensor(plain, mesh, [Shard(dim)])
            chunks = plain.chunk(ranks, dim)
            expected = chunks[rank] if rank < len(chunks) else plain.narrow(dim, 0, 0)
            assert tensor.shape == plain.shape
            assert tensor.to_local().shape == expected.shape and torch.equal(tensor.to_local(), expected)
            assert torch.equal(whole(tensor), plain)
    # A grid chunks first along one axis and then each chunk along the other.
    grid = grid_mesh()
    row, column = grid.get_coordinate()
    plain = random(5, 7)
    tensor = distribute_tensor(plain, grid, [Shard(0), Shard(0)])
    chunks = plain.chunk(2)[row].chunk(grid.size(1))
    assert torch.equal(tensor.to_local(), chunks[column])
    assert torch.equal(whole(tensor), plain)
    tensor = distribute_tensor(plain, grid, [Shard(0), Shard(1)])
    assert torch.equal(tensor.to_local(), plain.chunk(2)[row].chunk(grid.size(1), 1)[column])


def test_distribute_tensor_cuts_uneven_sizes_as_chunk_does(run: Run) -> None:
    run(_distributes_as_chunk_does)


def _refuses_to_distribute() -> None:
    mesh, grid = line_mesh(), grid_mesh()
    plain = random(8, 8)
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
    backwards = DeviceMesh(DEVICE, list(reversed(range(dist.get_world_size()))))
    with pytest.raises(ValueError, match="to a different device mesh"):
        distribute_tensor(tensor, backwards, [Shard(0)])
    for placement in (Shard(1), Replicate()):
        with pytest.raises(ValueError, match="to a different placements"):
            distribute_tensor(tensor, mesh, [placement])


def test_distribute_tensor_refuses_wrong_calls(run: Run) -> None:
    run(_refuses_to_distribute)


def _replicates_module() -> None:
    for mesh, placements in (line_mesh(), [Shard(3)]), (grid_mesh(), [Shard(2), Shard(3)]):
        torch.manual_seed(dist.get_rank())  # the first rank's weights must be those of all
        model = Model()
        torch.manual_seed(0)
        plain = Model()
        assert distribute_module(model, mesh) is model
        for name, tensor in model.state_dict().items():
            assert isinstance(tensor, DTensor) and tensor.placements == replicated(mesh), name
            assert torch.equal(tensor.to_local(), plain.state_dict()[name]), name
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, nn.Parameter) and parameter.is_leaf
            assert parameter.requires_grad == (name != "shift")
        output, expected = model(distribute_tensor(random(*SIZE), mesh, placements)), plain(random(*SIZE))
        assert isinstance(output, DTensor) and output.placements == tuple(placements)
        torch.testing.assert_close(whole(output), expected, rtol=0, atol=1e-10)
        mean_square(output).backward()
        mean_square(expected).backward()
        assert_same_gradients(model, plain)


def test_distribute_module_replicates(run: Run) -> None:
    run(_replicates_module)


def _partitions_module() -> None:
    mesh = line_mesh()
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
        output, expected = model(distribute_tensor(random(*SIZE), mesh, [placement])), plain(random(*SIZE))
        torch.testing.assert_close(whole(output), expected, rtol=0, atol=1e-10)
        mean_square(output).backward()
        mean_square(expected).backward()
        assert_same_gradients(model, plain)
        assert model.second.weight.grad.placements == (Shard(0),)


def test_distribute_module_with_a_partition_function(run: Run) -> None:
    run(_partitions_module)


def _hooks_module() -> None:
    mesh = line_mesh()
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
    output, expected = model(random(*SIZE)), plain(random(*SIZE))
    assert not isinstance(output, DTensor)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    mean_square(output).backward()
    mean_square(expected).backward()
    assert_same_gradients(model, plain)

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
    output, expected = model(random(*SIZE)), plain(random(*SIZE))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    mean_square(output).backward()
    mean_square(expected).backward()
    assert_same_gradients(model, plain)


def test_distribute_module_with_input_and_output_functions(run: Run) -> None:
    run(_hooks_module)


def _distributes_module_once() -> None:
    mesh = line_mesh()
    model = distribute_module(Model(), mesh)
    with pytest.raises(RuntimeError, match="should only be called once"):
        distribute_module(model, mesh)


def test_distribute_module_twice_raises(run: Run) -> None:
    run(_distributes_module_once)
