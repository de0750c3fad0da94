"""Indexing along sharded dims against one process: values, gradients, writes in place, and what travels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import torchhalo

Function = Callable[..., torch.Tensor]
READS = ["slice", "select", "split", "chunk", "unbind", "narrow", "flip", "roll", "flat", "unfold", "expand"]
READS += ["cat", "mixed", "stack", "tri", "repeat", "diff", "rot90", "scatter", "masked"]
MESHES = [(1,), (2,), (3,), (4,), (2, 2)]
random = settings(
    max_examples=70,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


def layouts(data: st.DataObject, ndim: int, mesh: tuple[int, ...]) -> list[object]:
    return [data.draw(st.sampled_from([Replicate(), Partial(), *map(Shard, range(ndim))])) for _ in mesh]


def tensor(data: st.DataObject, shape: list[int]) -> torch.Tensor:
    with maybe_disable_local_tensor_mode():
        x = torch.randn(shape, dtype=torch.float64, device=DEVICE)
        channels_last = len(shape) == 4 and data.draw(st.booleans())
        return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def reading(data: st.DataObject, shape: list[int]) -> Function:
    """A random call that takes a tensor of ``shape`` apart, or moves it."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    size = shape[dim]
    integer = st.integers(-size - 1, size + 1)
    kind = data.draw(st.sampled_from(READS))
    if kind == "slice":
        cut = slice(data.draw(st.none() | integer), data.draw(st.none() | integer), data.draw(st.integers(1, 3)))
        return lambda x: x[(slice(None),) * dim + (cut,)]
    if kind == "select":
        index = data.draw(st.integers(-size, size - 1))
        return lambda x: x.select(dim, index)
    if kind in ("split", "chunk"):
        count = data.draw(st.integers(1, size))
        part = data.draw(st.integers(0, 10))
        both = data.draw(st.booleans())

        def some(x: torch.Tensor) -> torch.Tensor:
            parts = x.split(count, dim) if kind == "split" else x.chunk(count, dim)
            first = parts[part % len(parts)]
            return torch.cat([first, parts[0]], dim) if both else first * 1

        return some
    if kind == "unbind":
        return lambda x: x.unbind(dim)[0] * 2 + x.unbind(dim)[-1]
    if kind == "narrow":
        start = data.draw(st.integers(0, size))
        return lambda x: x.narrow(dim, start, size - start).clone()
    if kind == "flip":
        dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
        return lambda x: x.flip(dims)
    if kind == "roll":
        dims = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1))
        shifts = [data.draw(integer) for _ in dims]
        return lambda x: x.roll(shifts, dims)
    if kind == "flat":
        shift = data.draw(st.integers(-30, 30))
        return lambda x: x.roll(shift)
    if kind == "unfold":
        window, step = data.draw(st.integers(1, size)), data.draw(st.integers(1, 3))
        return lambda x: x.unfold(dim, window, step)
    if kind == "cat":
        return lambda x: torch.cat([x, x.narrow(dim, 0, -(-size // 2)), x * 2], dim)
    if kind == "stack":
        return lambda x: torch.stack([x, x * 2], dim)
    if kind == "repeat":
        counts = [data.draw(st.integers(1, 3)) for _ in shape]
        return lambda x: x.repeat(*counts)
    if kind == "tri":
        diagonal = data.draw(st.integers(-3, 3))
        return lambda x: x.tril(diagonal) + x.triu(diagonal + 1) * 2 if x.ndim > 1 else x * 1
    if kind == "expand":
        return lambda x: x.narrow(dim, size - 1, 1).expand(*shape[:dim], 5, *shape[dim + 1 :]) * 1
    if kind == "mixed":  # the other one is sharded otherwise, as far as it goes
        return lambda x: torch.cat([x, x.detach().roll(1, dim).sum(dim, keepdim=True)], dim)
    if kind == "rot90":
        times = data.draw(st.integers(-3, 3))
        return lambda x: x.rot90(times, (0, x.ndim - 1)) if x.ndim > 1 else x * 1
    if kind == "scatter":
        index = data.draw(st.integers(0, size - 1))
        return lambda x: x.slice_scatter(x.narrow(dim, 0, size - index) * 2, dim, index).select_scatter(
            x.select(dim, 0) * 3, dim, index
        )
    if kind == "masked":
        return lambda x: x.masked_fill(x.detach() > 0, 2.0) + torch.where(x.detach() < 1, x, x * 3)
    return lambda x: x.diff(dim=dim)


@random
@given(data=st.data())
def test_random_reads(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    function = reading(data, shape)
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        assert_parity(function, [tensor(data, shape)], devices, [layouts(data, len(shape), mesh)])


def writing(data: st.DataObject, shape: list[int]) -> Function:
    """A random write to a part of a tensor, or to a part of a part."""
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2, unique=True))
    index: list[object] = [slice(None)] * len(shape)
    for dim in dims:
        if data.draw(st.booleans()):
            index[dim] = data.draw(st.integers(-shape[dim], shape[dim] - 1))
        else:
            first = data.draw(st.integers(0, shape[dim]))
            index[dim] = slice(first, data.draw(st.integers(first, shape[dim])), data.draw(st.integers(1, 3)))
    place = tuple(index)
    chain = data.draw(st.booleans())
    kinds = ["number", "fill", "zero", "add", "scale", "copy", "shifted", "masked", "square", "twice"]
    kind = data.draw(st.sampled_from(kinds))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        part = y.view_as(y)[place].unsqueeze(0) if chain else y[place]
        if kind == "number":
            y[place] = 5.0
        elif kind == "fill":
            part.fill_(3.0)
        elif kind == "zero":
            part.zero_()
        elif kind == "add":
            y[place] += x[place]
        elif kind == "scale":
            y[place] *= 3
        elif kind == "copy":
            part.copy_(x[place] * 7)
        elif kind == "shifted":
            part.copy_(x.flip(dims)[place])
        elif kind == "masked":
            part.masked_fill_(part > 0, -1.0)
        elif kind == "square":
            part.mul_(x[place])
        else:
            part.add_(1)
            part.mul_(3)
            y[place] = y[place] + 1
        return y * x

    return function


# Stock addition and multiplication gather a tensor whose cut dim is smaller than the mesh.
@pytest.mark.filterwarnings("ignore:aten.(add|mul|sub).Tensor gathers:torchhalo.GatherWarning")
@random
@given(data=st.data())
def test_random_writes(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    function = writing(data, shape)
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        placements = [data.draw(st.sampled_from([Replicate(), *map(Shard, range(len(shape)))])) for _ in mesh]
        assert_parity(function, [tensor(data, shape)], devices, [placements])


def test_unused_parts_of_a_split() -> None:
    """Autograd makes plain zeros for them, which join the DTensors of the others."""
    with simulated(3):
        x = torch.randn(2, 7, 5, dtype=torch.float64)
        for dim in (0, 1, 2):
            for cut in (lambda x, d: x.chunk(2, d), lambda x, d: x.unbind(d), lambda x, d: x.split([1, x.shape[d] - 1], d)):
                for part in (0, -1):
                    assert_parity(
                        lambda x, c=cut, d=dim, p=part: c(x, d)[p] * 2, [x], init_device_mesh(DEVICE, (3,)), [[Shard(1)]]
                    )


def chunk(size: int, parts: int) -> list[set[int]]:
    spans = [set(part.tolist()) for part in torch.arange(size).chunk(parts)]
    return spans + [set()] * (parts - len(spans))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, 2:9],
        lambda x: x[:, 1::3],
        lambda x: x[:, 10:],
        lambda x: x.flip(1),
        lambda x: x.roll(4, 1),
        lambda x: x.unfold(1, 4, 1),
        lambda x: x.repeat(1, 2),
        lambda x: F.pad(x.view(1, 1, -1), (2, 3), mode="circular").view(1, -1),
    ],
)
def test_only_what_changes_owner_travels(function: Function) -> None:
    """Of a tensor that holds its own indices, each rank gets those that its part of the result holds and it did not own."""
    ranks, size = 3, 11
    plain = torch.arange(size, dtype=torch.float64).unsqueeze(0)
    expected = function(plain)
    owned = chunk(size, ranks)
    lacks = {}
    for rank, mine in enumerate(chunk(expected.shape[1], ranks)):
        lacks[rank] = len({int(n) for i in mine for n in expected[0, i].flatten()} - owned[rank])
    with simulated(ranks):
        x = shard(plain, init_device_mesh(DEVICE, (ranks,)), [Shard(1)])
        with wire() as sent:
            function(x)
    got = {rank: sum(each.received[rank] for each in sent) for rank in range(ranks)}
    assert {each.name for each in sent} <= {"all_to_all_single"}
    if "pad" not in function.__code__.co_names:
        assert got == lacks


def test_what_select_and_writes_send() -> None:
    """A slab goes from its owner to all others; what is replicated is written back without a word."""
    with simulated(3):
        x = shard(torch.randn(2, 11, 4), init_device_mesh(DEVICE, (3,)), [Shard(1)])
        with wire() as sent:
            row = x.select(1, 5)
        assert sent == [Sent("all_to_all_single", {0: 8, 1: 0, 2: 8})]
        known = shard(torch.randn(2, 4), x.device_mesh, [Replicate()])
        for write in (lambda p: p.fill_(1.0), lambda p: p.zero_(), lambda p: p.copy_(known)):
            piece = x.select(1, 5)
            with wire() as sent:
                write(piece)
            assert sent == []
        row = x.select(1, 5)
        with wire() as sent:
            row.mul_(2)  # all have it, and its owner writes it
        assert sent == []
        piece = x[:, 2:8]  # ranks own 0..3, 4..7, 8..10, and of the piece 2..3, 4..5, 6..7
        with wire() as sent:
            piece.mul_(2)
        assert sent == [Sent("all_to_all_single", {0: 0, 1: 16, 2: 0})]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_dtypes(dtype: torch.dtype) -> None:
    """Nothing is computed, so the results are the same to the bit."""
    x = (torch.randn(2, 3, 7) * 4).to(dtype)
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        for function in (lambda x: x[..., 1:6:2], lambda x: x.flip(2), lambda x: torch.cat([x, x], 2), lambda x: x[..., 4]):
            assert_parity(function, [x], mesh, [[Shard(2)]], atol=0, needs_grad=[False])
        y = shard(x, mesh, [Shard(2)])
        y[..., 2:5] = 1
        written = whole(y)
    x[..., 2:5] = 1
    assert torch.equal(written, x)


def test_errors_are_torchs_own() -> None:
    wrong: list[Function] = [
        lambda x: x.select(1, 9),
        lambda x: x.narrow(1, 3, 9),
        lambda x: torch.cat([x, x[:, :, 1:]], 1),
        lambda x: x.unfold(1, 9, 1),
        lambda x: x.roll((1, 2), (0,)),
        lambda x: x.split([1, 2], 1),
    ]
    x = torch.randn(2, 7, 4)
    with simulated(2):
        y = shard(x, init_device_mesh(DEVICE, (2,)), [Shard(1)])
        for function in wrong:
            with maybe_disable_local_tensor_mode(), pytest.raises((RuntimeError, IndexError)) as plain:
                function(x)
            with pytest.raises(plain.type), wire() as sent:
                function(y)
            assert [each for each in sent if each.received != {0: 0, 1: 0}] == [] or "cat" in function.__code__.co_names
        with pytest.raises(NotImplementedError, match=r"as_strided: size \(=\(2, 8\)\)"):
            y.as_strided((2, 8), (28, 3))


def test_as_strided_that_is_slices() -> None:
    with simulated(3):
        x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
        for args in [((2, 3, 5, 7), (105, 35, 7, 1)), ((2, 3, 2, 3), (105, 35, 14, 1), 9), ((2, 5, 1, 3), (105, 7, 9, 35), 2)]:
            assert_parity(
                lambda x, a=args: x.as_strided(*a), [x], init_device_mesh(DEVICE, (3,)), [[Shard(3)]], needs_grad=[False]
            )


def network(x: torch.Tensor) -> torch.Tensor:
    y = F.pad(x, (1, 2, 2, 1), mode="circular")
    a, b = y.chunk(2, dim=3)
    z = torch.cat([a.flip(3), b.roll(1, 3)], 3)[..., 1::2] * 1
    z[..., 1:3] = 5.0
    z[..., 2:4] *= y[..., :2]
    z[:, :, :, 0] = x[:, :, :, 1].sum(2, keepdim=True)
    z[:, :, 1:3, 2:].copy_(y[:, :, 2:4, 2 : z.shape[3]])
    return z


def on_processes(size: int, compiled: bool, inference: bool = False) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, size, dtype=torch.float64)
    plain = x.clone().requires_grad_()
    expected = network(plain)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    mesh = mesh_of((3,))
    y = distribute_tensor(x, mesh, [Shard(3)]).requires_grad_(not inference)
    torch._dynamo.reset()
    function = torch.compile(network, backend="aot_eager", fullgraph=True) if compiled else network
    with torch.inference_mode(inference):
        result = function(y)
        torch.testing.assert_close(result.full_tensor(), expected.detach(), rtol=0, atol=1e-12)
    if not inference:
        (result * distribute_tensor(weight, mesh, result.placements)).sum().backward()
        torch.testing.assert_close(y.grad.full_tensor(), plain.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [12, 5])
def test_on_processes(pool, size) -> None:
    pool(3).run(on_processes, size, False)
    pool(3).run(on_processes, size, False, True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [12, 5])
def test_compiled(pool, size) -> None:
    pool(3).run(on_processes, size, True)


def on_sub_mesh() -> None:
    mesh = DeviceMesh(DEVICE, [0, 2])
    x = distribute_tensor(torch.arange(14.0).view(2, 7), mesh, [Shard(1)])
    y = torch.cat([x[:, 1:6], x.flip(1)], 1) * 1
    y[:, 3:9] = 2.0
    z = y.unfold(1, 3, 2).select(2, 1)
    if torch.distributed.get_rank() in (0, 2):
        plain = torch.arange(14.0).view(2, 7)
        expected = torch.cat([plain[:, 1:6], plain.flip(1)], 1)
        expected[:, 3:9] = 2.0
        torch.testing.assert_close(z.full_tensor(), expected.unfold(1, 3, 2).select(2, 1))


def test_on_a_sub_mesh(pool) -> None:
    pool(3).run(on_sub_mesh)


def test_nothing_gathers() -> None:
    with simulated(2), torchhalo.strict():
        x = shard(torch.randn(2, 3, 8, 8), init_device_mesh(DEVICE, (2,)), [Shard(3)]).requires_grad_()
        network(x).square().sum().backward()


def test_partial_sums_are_copied_as_such() -> None:
    """As autograd copies a gradient whose strides are not the parameter's; where a compiler chose them, on some ranks only."""
    with simulated(2), wire() as sent:
        mesh = init_device_mesh(DEVICE, (2,))
        values = torch.randn(4, 3, dtype=torch.float64)
        gradient = shard(values, mesh, [Partial()])
        copied = gradient.new_empty_strided((4, 3), (1, 4)).copy_(gradient)
        assert copied.placements == (Partial(),) and copied.stride() == (1, 4) and not sent
        torch.testing.assert_close(whole(copied), values.to(DEVICE))
