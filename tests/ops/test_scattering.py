"""Reading and writing by index against one process: values, gradients, and what travels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from memory import memories
from pools import Pool
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torchhalo

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]
random = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
gathering = pytest.mark.filterwarnings("ignore::torchhalo.exchange.gathers.GatherWarning")


def layouts(data: st.DataObject, ndim: int, mesh: tuple[int, ...], partial: bool = True) -> list[object]:
    found = [Replicate(), *([Partial()] if partial else []), *map(Shard, range(ndim))]
    return [data.draw(st.sampled_from(found)) for _ in mesh]


def subscript(data: st.DataObject, shape: list[int], distinct: bool) -> tuple[list[int], list[torch.Tensor]]:
    """Some dims of a tensor of ``shape``, and indices for them that broadcast; if ``distinct``, no element is named twice."""
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=3, unique=True).map(sorted))
    points = data.draw(st.lists(st.integers(1, 6), max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    volume = math.prod(shape[dim] for dim in dims)
    if distinct:
        points = [min(math.prod(points), volume)]
        flat = torch.randperm(volume, generator=generator)[: points[0]]
        found = list(torch.unravel_index(flat, [shape[dim] for dim in dims]))
    else:
        found = []
        for dim in dims:
            cut = data.draw(st.integers(0, len(points)))
            own = [
                1 if data.draw(st.booleans()) and dim != dims[0] else size for size in points[cut if dim != dims[0] else 0 :]
            ]
            found.append(torch.randint(-shape[dim], shape[dim], own, generator=generator))
    return dims, [index.to(DEVICE) for index in found]


def place(dims: list[int], indices: tuple[torch.Tensor, ...], ndim: int) -> tuple[object, ...]:
    each = iter(indices)
    return tuple(next(each) if dim in dims else slice(None) for dim in range(ndim))


def numbers(data: st.DataObject, shape: list[int]) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float64, device=DEVICE)
    channels_last = len(shape) == 4 and data.draw(st.booleans())
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


@random
@given(data=st.data())
@gathering  # of indexed dims that are cut
def test_random_reads(data: st.DataObject) -> None:
    mesh, shape = data.draw(st.sampled_from(MESHES)), data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    with simulated(math.prod(mesh)):
        with maybe_disable_local_tensor_mode():
            dims, indices = subscript(data, shape, distinct=False)
            x = numbers(data, shape)
        placements = [layouts(data, len(shape), mesh), *(layouts(data, index.ndim, mesh, False) for index in indices)]
        assert_parity(
            lambda x, *indices: x[place(dims, indices, x.ndim)],
            [x, *indices],
            init_device_mesh(DEVICE, mesh),
            placements,
            needs_grad=[True, *[False] * len(indices)],
            long_strides=True,
            memory=data.draw(memories(1 + len(indices))),
        )


@random
@given(data=st.data())
@gathering
def test_random_writes(data: st.DataObject) -> None:
    """Added or written, in place or not, by values that may broadcast."""
    mesh, shape = data.draw(st.sampled_from(MESHES)), data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    accumulate, in_place = data.draw(st.booleans()), data.draw(st.booleans())
    with simulated(math.prod(mesh)):
        with maybe_disable_local_tensor_mode():
            dims, indices = subscript(data, shape, distinct=not accumulate)
            x = numbers(data, shape)
            read = list(x[place(dims, tuple(indices), x.ndim)].shape)
            missing = data.draw(st.integers(0, len(read)))
            values = torch.randn([1 if data.draw(st.booleans()) else size for size in read[missing:]], dtype=torch.float64)

        def write(x: torch.Tensor, values: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
            each = iter(indices)
            where = [next(each) if dim in dims else None for dim in range(dims[-1] + 1)]
            if in_place:
                return torch.ops.aten.index_put_(x * 2, where, values, accumulate)
            return torch.ops.aten.index_put(x, where, values, accumulate)

        assert_parity(
            write,
            [x, values, *indices],
            init_device_mesh(DEVICE, mesh),
            [
                layouts(data, len(shape), mesh),
                layouts(data, values.ndim, mesh),
                *(layouts(data, index.ndim, mesh, False) for index in indices),
            ],
            needs_grad=[True, True, *[False] * len(indices)],
            long_strides=True,
            memory=data.draw(
                memories(2 + len(indices)).filter(lambda each: accumulate or not each or not any(m.repeated for m in each[2:]))
            ),
        )


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "index_select": lambda x, i, v: x.index_select(1, i) * v,
    "index_add": lambda x, i, v: x.index_add(1, i, v, alpha=3),
    "index_add_": lambda x, i, v: (x * 1).index_add_(1, i, v),
    "index_copy": lambda x, i, v: x.index_copy(1, i, v),
    "index_copy_": lambda x, i, v: (x * 1).index_copy_(1, i, v),
    "take": lambda x, i, v: x.take(i) * v[0, :, 0],
    "put": lambda x, i, v: x.put(i, v[0, :, 0], accumulate=True),
    "gather": lambda x, i, v: x.gather(1, i[None, :, None].expand(2, -1, 3)) * v[:, :, :3],
    "scatter_add": lambda x, i, v: x.scatter_add(1, i[None, :, None].expand(2, -1, 3), v[:2, :, :3]),
    "scatter": lambda x, i, v: x.scatter(1, i[None, :, None].expand(2, -1, 3), v),
    "scatter_": lambda x, i, v: (x * 1).scatter_(1, i[None, :, None].expand(3, -1, 4), v),
    "scatter value": lambda x, i, v: x.scatter(1, i[None, :, None].expand(3, -1, 3), 7) * v.mean(),
    "scatter_ value": lambda x, i, v: (x * 1).scatter_(1, i[None, :, None].expand(1, -1, 4), 7) * v.mean(),
    "cumprod": lambda x, i, v: x.cumprod(1).index_select(1, i) * v,
    "cumprod of zeros": lambda x, i, v: x.index_fill(1, i[:1], 0).cumprod(1).index_select(1, i) * v,
    "scatter_add_": lambda x, i, v: (x * 1).scatter_add_(1, i[None, :, None].expand(3, -1, 4), v),
}


def test_an_index_without_dims() -> None:
    """Beside one with dims: torch's fake tensors, of which shapes are learned, forget these."""
    with simulated(2):
        with maybe_disable_local_tensor_mode():
            x, i, j = torch.randn(5, 3, 2, dtype=torch.float64), torch.tensor([4, 0, 0, 2]), torch.tensor(1)
        placements = [[Shard(1)], [Replicate()], [Replicate()]]
        for where in (lambda i, j: [i, None, j], lambda i, j: [j, None, i % 2], lambda i, j: [j]):
            assert_parity(
                lambda x, i, j: torch.ops.aten.index(x, where(i, j)).sin(),  # noqa: B023
                [x, i, j],
                init_device_mesh(DEVICE, (2,)),
                placements,
                needs_grad=[True, False, False],
            )


@random
@given(data=st.data())
@gathering
def test_random_calls(data: st.DataObject) -> None:
    mesh, name = data.draw(st.sampled_from(MESHES)), data.draw(st.sampled_from(sorted(CALLS)))
    with simulated(math.prod(mesh)):
        with maybe_disable_local_tensor_mode():
            index = torch.randperm(7, device=DEVICE)[:5]
            x, values = (torch.randn(3, size, 4, dtype=torch.float64, device=DEVICE) for size in (7, 5))
            if name in ("gather", "scatter"):  # of which torch gives no gradient for what it does not read
                values = values[:2, :, : 3 if name == "scatter" else 4]
        with torchhalo.plain_as_replicated():  # autograd makes some in the gradient of cumprod
            assert_parity(
                CALLS[name],
                [x, index, values],
                init_device_mesh(DEVICE, mesh),
                [layouts(data, 3, mesh), layouts(data, 1, mesh, False), layouts(data, 3, mesh)],
                needs_grad=[True, False, True],
                memory=data.draw(memories(3).filter(lambda each: not each or not each[1].repeated)),
            )


def test_a_table_beside_an_activation_sends_its_gradient_alone() -> None:
    """The bias of an attention, as Swin and its kin have it: partial sums of the table's gradient, nothing else."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        with maybe_disable_local_tensor_mode():
            index = torch.randint(0, 9, (6, 5))
        x = shard(torch.randn(2, 3, 6, 5, dtype=torch.float64), mesh, [Shard(2)])
        table = shard(torch.randn(9, 3, dtype=torch.float64), mesh, [Replicate()]).requires_grad_()
        with wire() as sent, torchhalo.plain_as_replicated(), torchhalo.strict():
            (x * table[index].permute(2, 0, 1)).sum().backward()
        assert table.grad.placements == (Partial(),)
        assert sent == []


@pytest.mark.parametrize("dim", [2, 3])
def test_a_flat_table(dim: int) -> None:
    """As a random network found it: read by a flat index, and then viewed."""
    with simulated(3):
        with maybe_disable_local_tensor_mode():
            tensors = torch.randn(1, 3, 6, 7).double(), torch.randn(9, 3).double(), torch.randint(0, 9, (6, 7))
        assert_parity(
            lambda x, table, i: x + table[i.view(-1)].view(6, 7, 3).permute(2, 0, 1),
            tensors,
            init_device_mesh(DEVICE, (3,)),
            [[Shard(dim)], [Replicate()], [Replicate()]],
            needs_grad=[True, True, False],
        )


def check_masks(placement: Replicate | Shard) -> None:
    mesh = mesh_of((3,))
    x, mask = torch.randn(4, 5, 3, dtype=torch.float64), torch.rand(4, 5) > 0.4
    values = torch.randn(int(mask.sum()), 3, dtype=torch.float64)

    def read_and_write(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        inside = distribute_tensor(mask, mesh, [Replicate()]) if isinstance(x, DTensor) else mask
        y = x * 2
        y[inside] = values
        return y[inside] * x[:, :, 0][inside].unsqueeze(-1) + values

    with torchhalo.strict():
        assert_parity(read_and_write, [x, values], mesh, [[placement], [Replicate()]])


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(2)])
def test_masks(pool: Callable[[int], Pool], placement: Replicate | Shard) -> None:
    """On processes, as each rank waits for how many elements the others chose."""
    pool(3).run(check_masks, placement)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, i: x[:, i + 7],
        lambda x, i: x[:, i - 9],
        lambda x, i: x[:, i.double()],
        lambda x, i: x[i[:2] > 0],
        lambda x, i: x[:, :, i > 0],
        lambda x, i: x[i, i[:2]],
        lambda x, i: x.index_put([i], x[0, :2]),
        lambda x, i: x.index_select(3, i),
        lambda x, i: x.index_add(1, i, x),
        lambda x, i: torch.ops.aten.index_put_(x * 1, [None, i + 7], x.mean()),
        lambda x, i: torch.ops.aten.index_put_(x * 1, [None, None, i + 4], x.mean(), True),
        lambda x, i: x.scatter_add(0, i, x),
    ],
)
def test_wrong_calls_send_nothing(call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """On a CPU: an index out of range ends all that a process does on a GPU, also with plain tensors."""
    with simulated(2), torch.device("cpu"):
        with maybe_disable_local_tensor_mode():
            x, i = torch.randn(3, 5, 4, dtype=torch.float64), torch.tensor([0, 1, 2])
            with pytest.raises((RuntimeError, IndexError)):
                call(x, i)
        mesh = init_device_mesh("cpu", (2,))
        with wire() as sent, pytest.raises((RuntimeError, IndexError)):
            call(shard(x, mesh, [Shard(2)]), shard(i, mesh, [Replicate()]))
    assert all(each.name == "all_reduce" for each in sent)  # of a mean


# Embeddings.


class Biased(nn.Module):
    """A convolution, attention in windows with a bias read from a table, and an embedding of the place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, dtype=torch.float64)
        self.table = nn.Parameter(torch.randn(49, 2, dtype=torch.float64))
        self.place = nn.Embedding(8, 4, dtype=torch.float64, scale_grad_by_freq=True)
        steps = torch.arange(4)
        offsets = (steps[:, None] - steps[None, :] + 3) * 7
        self.register_buffer("index", (offsets[:, None, :, None] + offsets[None, :, None, :] // 7).reshape(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        b, c, h, w = x.shape
        x = x + self.place(torch.arange(w) // 2).transpose(0, 1)[:, None, :]
        windows = x.view(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
        heads = windows.view(-1, 16, 2, c // 2).transpose(1, 2)
        bias = self.table[self.index.view(-1)].view(16, 16, 2).permute(2, 0, 1).contiguous()
        found = (heads @ heads.transpose(-2, -1) + bias).softmax(-1) @ heads
        found = found.transpose(1, 2).reshape(b, h // 4, w // 4, 4, 4, c)
        return found.permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)


def train(mesh: tuple[int, ...], dims: tuple[int, ...], compiled: bool) -> None:
    torch.manual_seed(0)
    model = Biased()
    again = Biased()
    again.load_state_dict(model.state_dict())
    x = torch.randn(1, 2, 12, 16, dtype=torch.float64)
    plain = x.clone().requires_grad_()
    expected = model(plain)
    expected.sin().sum().backward()
    torchhalo.parallelize(again, mesh_of(mesh))
    run = torch.compile(again, backend="aot_eager", fullgraph=True) if compiled else again
    sharded = distribute_tensor(x, mesh_of(mesh), [Shard(dim) for dim in dims]).requires_grad_()
    with torchhalo.strict():
        found = run(sharded)
        found.sin().sum().backward()
    torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, rtol=0, atol=1e-10)
    for (name, p), q in zip(again.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=0, atol=1e-10, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("mesh, dims", [((2,), (3,)), ((4,), (3,)), ((3,), (2,)), ((2, 2), (2, 3))])
def test_a_model_with_tables(pool, mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    pool(math.prod(mesh)).run(train, mesh, dims, False)


def test_a_compiled_model_with_tables(pool) -> None:
    pool(2).run(train, (2,), (3,), True)


def on_a_submesh() -> None:
    mesh = DeviceMesh(DEVICE, [1, 2])
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([[0, 2, 1], [4, 4, 0]])
    sharded = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
    where = distribute_tensor(index, mesh, [Replicate()])
    found = sharded[:, where].index_add(1, where[0].clamp(max=1), sharded[:, :, None][:, :3, :, :].expand(3, 3, 3, 4) * 1)
    found.sin().sum().backward()
    plain = x.clone().requires_grad_()
    expected = plain[:, index].index_add(1, index[0].clamp(max=1), plain[:, :, None][:, :3, :, :].expand(3, 3, 3, 4) * 1)
    expected.sin().sum().backward()
    if mesh.get_coordinate() is not None:
        torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, rtol=0, atol=1e-12)


def test_on_a_submesh(pool) -> None:
    pool(3).run(on_a_submesh)


def test_what_is_written_to_a_cut_dim_stays_where_it_is() -> None:
    """Each rank writes what it owns of values that all have."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        y = shard(torch.zeros(1, 2, 6), mesh, [Shard(2)])
        with wire() as sent:
            y[:, :, shard(torch.tensor([1, 5, 2]), mesh, [Replicate()])] = shard(torch.ones(1, 2, 3), mesh, [Replicate()])
        assert sent == [] and whole(y)[0, 0].tolist() == [0, 1, 1, 0, 0, 1]
        with wire() as sent:
            y[:, :, shard(torch.tensor([1, 5]), mesh, [Replicate()])] = shard(torch.ones(1, 2, 2), mesh, [Shard(1)])
        assert sent == [Sent("all_to_all_single", {0: 2, 1: 2})]
