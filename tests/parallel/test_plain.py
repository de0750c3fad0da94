"""Plain tensors mixed with sharded ones: one process's numbers inside the scope, an error outside, and no way to be wrong."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchhalo
from torchhalo.exchange import debug

SIZES = 2, 3, 5, 6


def where(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return torch.where(x > p, x, p)


def coordinates(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    axes = [torch.linspace(0, 1, n, dtype=x.dtype, device=x.device) for n in x.shape[2:]]
    grid = torch.stack(torch.meshgrid(*axes, indexing="ij"))
    return torch.cat([x, grid.expand(x.shape[0], -1, -1, -1), p], dim=1)


def in_place(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(p)
    y *= p
    return y


def convolution(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return F.conv2d(F.pad(x, (1, 1, 1, 1)), p[:1, :, :3, :3].expand(4, -1, -1, -1), p[0, 0, 0, :4])


def embedding(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """What a diffusion model does with its time step: a plain computation whose result is added to every pixel."""
    return x + torch.sin(p[:, :, 0, 0] @ p[0, :, 1, :3])[:, :, None, None]


def loss(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(x, p) + F.cross_entropy(x, p.detach()[:, 0].long().clamp(0, 2))


MIXES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, p: p + x * p,
    "cat": lambda x, p: torch.cat([p, x], 1),
    "stack": lambda x, p: torch.stack([x, p, x]),
    "where": where,
    "coordinates": coordinates,
    "in place": in_place,
    "convolution": convolution,
    "embedding": embedding,
    "loss": loss,
    "matmul": lambda x, p: x.transpose(1, 3) @ p[0, 0, :3],
    "index": lambda x, p: x.detach()[:, torch.tensor([2, 0])] * p[:, :2] + x[:, :2],
}


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_mixes(data: st.DataObject) -> None:
    """Result, the gradient of the sharded tensor and the plain gradient of the plain one, taken after the scope has ended."""
    mesh = data.draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2)]))
    mix = MIXES[data.draw(st.sampled_from(sorted(MIXES)))]
    placements = [data.draw(st.sampled_from([Replicate(), Shard(0), Shard(2), Shard(3)])) for _ in mesh]
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x, p = (torch.randn(SIZES, dtype=torch.float64, device=DEVICE).requires_grad_() for _ in range(2))
            expected = mix(x, p)
            expected.square().sum().backward()
        sharded, plain = shard(x.detach(), devices, placements).requires_grad_(), p.detach().clone().requires_grad_()
        with torchhalo.plain_as_replicated():
            result = mix(sharded, plain)
        assert isinstance(result, DTensor)
        result.square().sum().backward()
        torch.testing.assert_close(whole(result), expected.detach(), rtol=0, atol=1e-9)
        torch.testing.assert_close(whole(sharded.grad), x.grad, rtol=0, atol=1e-9)
        assert not isinstance(plain.grad, DTensor)
        torch.testing.assert_close(whole(plain.grad), p.grad, rtol=0, atol=1e-9)


@pytest.fixture
def x() -> Iterator[DTensor]:
    with simulated(2):
        yield shard(torch.ones(SIZES), init_device_mesh(DEVICE, (2,)), [Shard(3)])


def test_outside_the_scope_mixing_raises(x: DTensor) -> None:
    plain = torch.ones(SIZES)
    scope = torchhalo.plain_as_replicated()
    with pytest.raises(ZeroDivisionError), scope, scope:
        with torchhalo.plain_as_replicated():
            x + plain
        x + plain
        raise ZeroDivisionError
    for mix in (lambda: x + plain, lambda: F.conv2d(x, torch.ones(3, 3, 1, 1)), lambda: where(x, plain)):
        with pytest.raises(RuntimeError, match="got mixed"):
            mix()


def test_nothing_is_sent(x: DTensor) -> None:
    with torchhalo.plain_as_replicated(), wire() as sent:
        x * torch.ones(SIZES) + torch.arange(6.0)
        torch.cat([x, torch.zeros(SIZES)], 1)
    assert sent == []


def each_rank(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for each of two simulated ranks, or both would write to one."""
    return LocalTensor({rank: tensor.clone() for rank in range(2)})


WRITES: list[Callable[[torch.Tensor, torch.Tensor], object]] = [
    lambda p, x: p.add_(x),
    lambda p, x: p.copy_(x),
    lambda p, x: p.__iadd__(x),
    lambda p, x: p.__setitem__(0, x[0]),
    lambda p, x: p[..., 1:].__setitem__(0, x[0, ..., 1:]),
    lambda p, x: torch.add(x.detach(), x.detach(), out=p),
    lambda p, x: torch.add(x.detach(), p, out=p),
    lambda p, x: p.scatter_(1, x.long().clamp(0, 2), 5.0),
]


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_a_plain_tensor_is_whole(write: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """One process's values on every rank, and its gradient of what was written; a gather that strict() forbids."""
    values = torch.randn(SIZES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ones = torch.ones(SIZES, dtype=torch.float64)
    expected, x = ones.clone(), values.clone().requires_grad_()
    write(expected, x)
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        sharded, plain = shard(values, mesh, [Shard(3)]).requires_grad_(), each_rank(ones)
        with torchhalo.strict(), torchhalo.plain_as_replicated(), pytest.raises(torchhalo.GatherError, match=r"dim (2|3)"):
            write(plain, sharded)
        assert torch.equal(whole(plain), ones)
        with torchhalo.plain_as_replicated(), pytest.warns(torchhalo.GatherWarning):
            write(plain, sharded)
        assert not isinstance(plain, DTensor)
        torch.testing.assert_close(whole(plain), expected.detach(), rtol=0, atol=0)
        if expected.requires_grad:
            with maybe_disable_local_tensor_mode():
                expected.square().sum().backward()
            plain.square().sum().backward()
            torch.testing.assert_close(whole(sharded.grad), x.grad, rtol=0, atol=1e-12)


def test_a_sum_that_is_added_to_a_plain_number_is_no_gather(x: DTensor) -> None:
    """As metrics do with their state: one all-reduce of the number."""
    state = each_rank(torch.zeros(()))
    with torchhalo.plain_as_replicated(), torchhalo.strict(), wire() as sent:
        state += x.sum()
    assert whole(state) == math.prod(SIZES) and [each.name for each in sent] == ["all_reduce"]


def test_parallelize_permits_mixing_on_its_mesh(x: DTensor) -> None:
    """Plain labels and the learned weight of a loss beside a sharded prediction; other meshes raise, and so do shards."""
    mesh, other = x.device_mesh, DeviceMesh(DEVICE, [1, 0])
    elsewhere = shard(torch.ones(SIZES), other, [Shard(3)])
    labels, weight = torch.arange(6.0), torch.tensor(2.0, requires_grad=True)
    for inputs, mixes in (("shard", False), ("whole", True)):
        model = torchhalo.parallelize(torch.nn.Conv2d(3, 3, 1), mesh, inputs=inputs)
        if mixes:
            x.requires_grad_()
            loss = (F.mse_loss(x, labels.expand(SIZES)) * weight).square() + model(x).mean() * 0
            assert isinstance(loss, DTensor)
            loss.backward()
            mse = (torch.ones(SIZES) - labels).square().mean()
            assert not isinstance(weight.grad, DTensor)
            torch.testing.assert_close(whole(weight.grad), 4 * mse.square())
            torch.testing.assert_close(whole(x.grad), 16 * mse * (1 - labels).expand(SIZES) / math.prod(SIZES))
        else:
            with pytest.raises(RuntimeError, match="got mixed"):
                x * labels
        with pytest.raises(RuntimeError, match="got mixed"):
            elsewhere * labels
    torchhalo.disable()
    with pytest.raises(RuntimeError, match="got mixed"):
        x * labels
    torchhalo.enable()


class Named(torch.Tensor):
    """A subclass that only adds attributes, as the images of data loaders are."""


def test_subclasses_that_hold_nothing_else_mix_too(x: DTensor) -> None:
    with maybe_disable_local_tensor_mode():
        labels = torch.arange(6.0).as_subclass(Named)
    with torchhalo.plain_as_replicated():
        for result in (labels * x, x * labels):
            assert type(result._local_tensor._local_tensors[0]) is torch.Tensor
            torch.testing.assert_close(whole(result), torch.arange(6.0).expand(SIZES))


def test_plain_code_is_left_alone(x: DTensor) -> None:
    with torchhalo.plain_as_replicated():
        plain = torch.ones(SIZES, requires_grad=True)
        assert not isinstance(plain * 2, DTensor)
        y = (x * plain).sum()
        (grad,) = torch.autograd.grad(y, [plain])
        assert not isinstance(grad, DTensor) and whole(grad).sum() == math.prod(SIZES)
        plain.grad = grad
        assert not isinstance(DTensor.from_local(torch.ones(3), x.device_mesh, [Replicate()]).to_local(), DTensor)


def differ(rank_dependent: bool) -> str:
    """On this rank, mix a plain tensor that is the same everywhere or not; the error, if any."""
    mesh = mesh_of((3,))
    x = distribute_tensor(torch.ones(4, 7), mesh, [Shard(1)])
    plain = torch.arange(7.0)
    if rank_dependent and torch.distributed.get_rank() == 2:
        plain[3] = float("nan")
    try:
        with pytest.MonkeyPatch.context() as patch, torchhalo.plain_as_replicated():
            patch.setattr(debug, "ON", True)
            torch.testing.assert_close((x + plain).full_tensor(), 1 + torch.arange(7.0).expand(4, 7))
    except RuntimeError as error:
        return str(error)
    return ""


def test_debugging_finds_what_differs(pool) -> None:
    assert pool(3).run(differ, False) == [""] * 3
    messages = pool(3).run(differ, True)
    assert len(set(messages)) == 1
    assert all(word in messages[0] for word in ("add", "(7,)", "ranks [2]", "rank 0"))


def compiled(inside: bool) -> None:
    mesh = mesh_of((2,))
    torch._dynamo.reset()

    def function(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        if inside:
            with torchhalo.plain_as_replicated():
                return (coordinates(x, p) * torch.arange(6, dtype=x.dtype)).square().sum()
        return (coordinates(x, p) * torch.arange(6, dtype=x.dtype)).square().sum()

    generator = torch.Generator().manual_seed(0)
    x, p = (torch.randn(SIZES, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
    expected = (coordinates(x, p) * torch.arange(6, dtype=x.dtype)).square().sum()
    expected.backward()
    sharded, plain = distribute_tensor(x.detach(), mesh, [Shard(3)]).requires_grad_(), p.detach().clone().requires_grad_()
    with contextlib.nullcontext() if inside else torchhalo.plain_as_replicated():
        result = torch.compile(function, backend="aot_eager", fullgraph=True)(sharded, plain)
    result.backward()
    torch.testing.assert_close(result.full_tensor(), expected.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(sharded.grad.full_tensor(), x.grad, rtol=0, atol=1e-9)
    torch.testing.assert_close(plain.grad, p.grad, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
def test_compiled(pool, inside: bool) -> None:
    pool(2).run(compiled, inside)
