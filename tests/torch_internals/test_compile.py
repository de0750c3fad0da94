"""torch.compile of sharded convolutions: eager's numbers, and the same collectives in the graphs of all ranks.

Each rank compiles for its own shard, so the graphs differ. If one of them lacked a collective, or held it in its backward graph
where the others have it in the forward one, the ranks would wait for each other forever; so the sequences are compared, not
only the numbers.
"""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from harness import mesh_of
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchhalo
from torchhalo.exchange import parts

EVEN, UNEVEN, EMPTY = 12, 11, 4
PARTITIONS = {"min-cut": min_cut_rematerialization_partition, "default": default_partition}


def network(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    y = F.relu(F.conv2d(x, a, padding=1))
    y = F.relu(F.conv2d(y, b, stride=2, padding=1))
    y = F.conv_transpose2d(y, c, stride=2, padding=1)
    return (y * torch.tanh(y)).sum()


def inputs(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 6, size), (4, 3, 3, 3), (5, 4, 3, 3), (5, 2, 4, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def check(size: int, ranks: tuple[int, ...], backend: str, input_needs_grad: bool = True) -> list[list[str]]:
    """Compile and run on this rank; the collectives of its forward and backward graphs, where the backend shows them."""
    mesh = mesh_of(ranks)
    placements = [Shard(3)] if len(ranks) == 1 else [Shard(2), Shard(3)]
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append([str(n.target) for n in graph.graph.nodes if "_c10d_functional" in str(n.target)])
        return make_boxed_func(graph.forward)

    def leaves() -> list[DTensor]:
        needs_grad = [input_needs_grad, True, True, True]
        return [
            distribute_tensor(t, mesh, placements if i == 0 else [Replicate()] * mesh.ndim).requires_grad_(needs_grad[i])
            for i, t in enumerate(inputs(size))
        ]

    torch._dynamo.reset()
    compiler = backend
    if backend in PARTITIONS:
        compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=PARTITIONS[backend])
    if backend == "inductor's":  # of the graph that inductor makes before it cuts it in two
        from torch._inductor.compile_fx import partition_fn  # some releases warn
        from torch._inductor.decomposition import select_decomp_table

        table = select_decomp_table()
        compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition_fn, decompositions=table)
    eager, compiled = leaves(), leaves()
    expected = network(*eager)
    expected.backward()
    result = torch.compile(network, backend=compiler, fullgraph=True)(*compiled)
    result.backward()
    torch.testing.assert_close(result.full_tensor(), expected.full_tensor(), rtol=0, atol=1e-9)
    for got, want in zip(compiled, eager, strict=True):
        assert (got.grad is None) == (want.grad is None)
        if want.grad is not None:
            torch.testing.assert_close(got.grad.full_tensor(), want.grad.full_tensor(), rtol=0, atol=1e-9)
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, size, partition, input_needs_grad",
    [
        ((3,), EVEN, "min-cut", True),
        ((3,), UNEVEN, "min-cut", True),
        ((3,), UNEVEN, "default", True),
        ((3,), EMPTY, "min-cut", True),
        ((3,), EMPTY, "min-cut", False),
        ((3,), EMPTY, "inductor's", True),
        ((3,), EMPTY, "inductor's", False),
        ((2, 2), UNEVEN, "min-cut", True),
    ],
)
def test_all_ranks_hold_the_same_collectives(pool, ranks, size, partition, input_needs_grad) -> None:
    graphs = pool(math.prod(ranks)).run(check, size, ranks, partition, input_needs_grad)
    assert all(other == graphs[0] for other in graphs), graphs
    forward, backward = ([name for name in graph if "all_to_all" in name] for graph in graphs[0])
    assert len(forward) == 3 and len(backward) == 3, graphs[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [EVEN, UNEVEN, EMPTY])
def test_inductor_equals_eager(pool, size) -> None:
    pool(3).run(check, size, (3,), "inductor")


@pytest.mark.parametrize("size", [EVEN, UNEVEN, EMPTY])
def test_aot_eager_equals_eager(pool, size) -> None:
    pool(3).run(check, size, (3,), "aot_eager")


def check_inference() -> None:
    mesh = mesh_of((3,))
    tensors = [distribute_tensor(t, mesh, [Shard(3) if i == 0 else Replicate()]) for i, t in enumerate(inputs(UNEVEN))]
    with torch.no_grad():
        result = torch.compile(network, backend="aot_eager", fullgraph=True)(*tensors)
    torch.testing.assert_close(result.full_tensor(), network(*inputs(UNEVEN)), rtol=0, atol=1e-9)


def test_compiled_inference(pool) -> None:
    pool(3).run(check_inference)


class Small(nn.Module):
    """A U-Net with all that is usual in one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.last(torch.cat([y, self.up(self.low(y))], 1))


def check_unet(backend: str) -> None:
    mesh = mesh_of((2,))
    torch.manual_seed(0)
    plain = Small().double()
    image, target = (torchhalo.shard(torch.randn(1, 1, 24, 10, dtype=torch.float64), mesh) for _ in range(2))
    losses = []
    for compiled in (False, True):
        model = torchhalo.parallelize(copy.deepcopy(plain), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss(image: torch.Tensor, target: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return F.mse_loss(model(image), target)

        step = torch.compile(loss, backend=backend, fullgraph=True) if compiled else loss
        found = []
        with parts.in_parts(True):
            for _ in range(3):
                optimizer.zero_grad()
                value = step(image, target)
                value.backward()
                optimizer.step()
                found.append(value.full_tensor().item())
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert losses[0][2] < losses[0][0]


@pytest.mark.slow
def test_a_training_step_of_a_unet_compiles_without_a_graph_break(pool) -> None:
    pool(2).run(check_unet, "aot_eager")


def check_plain_input() -> None:
    mesh = mesh_of((2,))
    torch.manual_seed(0)
    model = torchhalo.parallelize(Small().double(), mesh)
    image = torch.randn(1, 1, 24, 10, dtype=torch.float64)
    expected = model(image).full_tensor()
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = torch.compile(model, backend="aot_eager", fullgraph=True)(image)
        result.sum().backward()
    # What torch says of a tensor with hooks around it is its own.
    assert not [w for w in caught if "cache" in str(w.message) or "torchhalo" in w.filename], caught
    torch.testing.assert_close(result.full_tensor(), expected, rtol=0, atol=1e-9)


def test_a_plain_tensor_is_sharded_inside_the_graph_without_a_warning(pool) -> None:
    pool(2).run(check_plain_input)
