"""Random numbers: the same for one seed on any number of ranks and any layout, and good ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, Sent, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import torchhalo
from torchhalo.kernels import draws
from torchhalo.ops import randomness
from torchhalo.torch_internals import streams
from torchhalo.torch_internals.simulation import fake_world


def stochastic_depth(x: torch.Tensor) -> torch.Tensor:
    """As timm and torchvision write it: one draw per sample."""
    keep = x.new_empty((x.shape[0], *[1] * (x.ndim - 1))).bernoulli_(0.6)
    return x * keep.div_(0.6)


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "stochastic depth": stochastic_depth,
    "native dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rand_like": lambda x: torch.rand_like(x) * x,
    "randn_like": lambda x: torch.randn_like(x) * x,
    "randint_like": lambda x: torch.randint_like(x, -3, 9) * x,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) * x,
    "bernoulli p": lambda x: torch.bernoulli(x, 0.2) * x,
    "bernoulli_ tensor": lambda x: torch.empty_like(x).bernoulli_(x.detach()[..., :1].sigmoid()) * x,
    "uniform_": lambda x: torch.empty_like(x).uniform_(2, 3) * x,
    "normal_": lambda x: torch.empty_like(x).normal_(2, 3) * x,
    "normal": lambda x: torch.normal(x.detach(), 0.5) * x,
    "exponential_": lambda x: torch.empty_like(x).exponential_(2) * x,
    "random_": lambda x: torch.empty_like(x).random_(3, 8) * x,
    "generator": lambda x: torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(3)) * x,
}
SPATIAL = {
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x, 0.3),
    "dropout3d": lambda x: F.dropout3d(x, 0.3),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
}


def drawn(
    draw: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, mesh: tuple[int, ...], placements: list[Placement], seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second draw after a seed, and the gradient of its sum."""
    with simulated(math.prod(mesh)):
        sharded = shard(x, init_device_mesh(DEVICE, mesh), placements).detach().requires_grad_()
        torch.manual_seed(seed)
        draw(sharded)
        result = draw(sharded)
        result.sum().backward()
        assert isinstance(result, DTensor) and result.stride() == sharded.stride() and result.dtype == x.dtype
        return whole(result), whole(sharded.grad)


@pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")  # stock pointwise ops, of a mix of Partial and Shard
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_same_draw_on_any_layout(data: st.DataObject) -> None:
    """To the bit, against one rank, forward and gradient."""
    name = data.draw(st.sampled_from([*DRAWS, *SPATIAL]))
    dims = {"dropout1d": 3, "dropout2d": 4, "dropout3d": 5}.get(name)
    shape = data.draw(st.lists(st.integers(1, 6), min_size=dims or 1, max_size=dims or 4))
    if name in SPATIAL and not dims:
        shape = [*shape, 2]  # batch and channels at least
    mesh = data.draw(st.sampled_from([(2,), (3,), (4,), (2, 2)]))
    placements = [data.draw(st.sampled_from([Replicate(), Partial(), *map(Shard, range(len(shape)))])) for _ in mesh]
    with maybe_disable_local_tensor_mode():
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        x = x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 and data.draw(st.booleans()) else x
    draw, seed = (DRAWS | SPATIAL)[name], data.draw(st.integers(0, 3))
    expected, gradient = drawn(draw, x, (1,), [Replicate()], seed)
    got, got_gradient = drawn(draw, x, mesh, placements, seed)
    # A Partial tensor is added up, in another order
    atol = 1e-12 if Partial() in placements else 0.0
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
    torch.testing.assert_close(got_gradient, gradient, rtol=0, atol=atol)


def values(
    draw: Callable[[torch.Tensor], object], shape: tuple[int, ...] = (64, 4096), dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    with simulated(1):
        x = shard(torch.zeros(shape, dtype=dtype), init_device_mesh(DEVICE, (1,)), [Replicate()])
        torch.manual_seed(7)
        return whole(draw(x))


MOMENTS = {
    "bernoulli": (lambda x: x.bernoulli_(0.3), 0.3, 0.3 * 0.7),
    "uniform": (lambda x: x.uniform_(-1, 2), 0.5, 9 / 12),
    "normal": (lambda x: x.normal_(2, 3), 2.0, 9.0),
    "log_normal": (lambda x: x.log_normal_(0, 0.5), math.exp(0.125), (math.exp(0.25) - 1) * math.exp(0.25)),
    "exponential": (lambda x: x.exponential_(2), 0.5, 0.25),
    "geometric": (lambda x: x.geometric_(0.3), 1 / 0.3, 0.7 / 0.09),
    "integers": (lambda x: x.random_(5, 15), 9.5, 99 / 12),
    "randn": (torch.randn_like, 0.0, 1.0),
    "bfloat16": (lambda x: torch.rand_like(x, dtype=torch.bfloat16), 0.5 - 2**-9, 1 / 12),
    "cauchy, its arc": (lambda x: x.cauchy_(1, 2).sub(1).div(2).atan(), 0.0, math.pi**2 / 12),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments(name: str) -> None:
    """Mean and variance within five standard errors of 262,144 draws; the variance's by the fourth moment that they have."""
    draw, mean, variance = MOMENTS[name]
    found = values(draw).double()
    n = found.numel()
    assert abs(found.mean() - mean) < 5 * math.sqrt(variance / n)
    fourth = (found - mean).pow(4).mean()
    assert abs((found - mean).square().mean() - variance) < 5 * math.sqrt((fourth - variance**2) / n)


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / counts.numel()
    return float(((counts - expected).square() / expected).sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_uniform_and_independent(dtype: torch.dtype) -> None:
    """Chi-square of 16 x 16 pairs: neighbours along both dims, far elements, successive draws, draws of successive seeds."""
    first, second = values(lambda x: torch.stack([x.uniform_().clone(), x.uniform_()]), dtype=dtype)
    with simulated(1):
        torch.manual_seed(8)
        x = shard(torch.zeros(64, 4096, dtype=dtype), init_device_mesh(DEVICE, (1,)), [Replicate()])
        other = whole(x.uniform_())
    pairs = [
        (first[:, :-1], first[:, 1:]),
        (first[:-1], first[1:]),
        (first[:, :2048], first[:, 2048:]),
        (first, second),
        (first, other),
        (second[:, 1:], first[:, :-1]),
    ]
    for a, b in pairs:
        counts = torch.bincount((a.double() * 16).long().flatten() * 16 + (b.double() * 16).long().flatten(), minlength=256)
        # 255 degrees of freedom: six standard deviations of 22.6 about the mean
        assert 255 - 6 * 22.6 < chi_square(counts.double()) < 255 + 6 * 22.6
    assert first.min() >= 0 and first.max() < 1


def test_every_bit_is_even() -> None:
    """Each of the 53 bits of a double is set in half of the draws, and no two elements or draws collide."""
    words = values(lambda x: torch.stack([x.uniform_().clone(), x.uniform_()])).mul(2.0**53).long().flatten()
    n = words.numel()
    for bit in range(53):
        assert abs(float(((words >> bit) & 1).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(n)
    assert words.unique().numel() == n


def test_large_tensors_are_drawn_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_draw = values(torch.rand_like, (3, 50, 41))
    monkeypatch.setattr(draws, "SLICE", dict.fromkeys(draws.SLICE, 100))
    assert torch.equal(values(torch.rand_like, (3, 50, 41)), whole_draw)


def test_only_the_check_is_sent() -> None:
    """Two numbers at the first draw on a mesh, and nothing for the next."""
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        torchhalo.ops.randomness._draws.pop(mesh, None)
        x = shard(torch.ones(2, 3, 4, 7), mesh, [Shard(3)])
        with wire() as sent:
            for _ in range(5):
                F.dropout(x, 0.3), F.dropout2d(x, 0.3), torch.randn_like(x)
    assert sent == [Sent("all_reduce", {0: 2, 1: 2, 2: 2})]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x.bernoulli_(1.5),
        lambda x: x.uniform_(3, 2),
        lambda x: x.normal_(0, -1),
        lambda x: x.random_(3, 3),
        lambda x: torch.randint_like(x, 0),
    ],
)
def test_wrong_parameters_raise_as_in_plain_torch(draw: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError) as expected:
        draw(torch.ones(4, 6))
    with simulated(2), pytest.raises(RuntimeError) as found:
        draw(shard(torch.ones(4, 6), init_device_mesh(DEVICE, (2,)), [Shard(1)]))
    assert str(found.value) == str(expected.value)


def test_edges() -> None:
    """Probabilities of 0 and 1, tensors with no dims and with no elements, dropout that is not in training."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        x = shard(torch.ones(4, 6), mesh, [Shard(1)])
        assert whole(F.dropout(x, 1.0)).sum() == 0 and whole(F.dropout(x, 0.0)).sum() == 24
        assert whole(torch.native_dropout(x, 1.0, True)[0]).sum() == 0
        out, mask = torch.native_dropout(x, 0.5, False)
        assert whole(out).sum() == 24 and whole(mask).all()
        assert whole(torch.rand_like(shard(torch.ones(()), mesh, [Replicate()]))).shape == ()
        assert whole(torch.rand_like(shard(torch.ones(0, 5), mesh, [Shard(1)]))).shape == (0, 5)


@pytest.mark.parametrize("name", ["dropout", "dropout in place", "alpha dropout", "feature alpha dropout", "dropout1d"])
def test_inference_mode_draws_the_same(name: str) -> None:
    """There composite ops reach DTensor whole."""
    with simulated(2):
        x = shard(torch.ones(2, 3, 7), init_device_mesh(DEVICE, (2,)), [Shard(2)])
        draw = (DRAWS | SPATIAL)[name]
        torch.manual_seed(0)
        expected = whole(draw(x))
        torch.manual_seed(0)
        with torch.inference_mode():
            torch.testing.assert_close(whole(draw(x)), expected)
            torch.testing.assert_close(whole(F.dropout(x, 0.5, training=False)), whole(x))


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU stock DTensor draws by shard, without a warning")
def test_torch_random_leaves_it_to_stock() -> None:
    with simulated(2):
        x = shard(torch.ones(4, 64), init_device_mesh(DEVICE, (2,)), [Shard(1)])
        torch.manual_seed(0)
        with torchhalo.torch_random(), pytest.warns(UserWarning, match="DTensor random operators"):
            mask = whole(F.dropout(x, 0.5))
        assert torch.equal(mask[:, :32], mask[:, 32:])  # on the CPU each rank draws the same for its shard
        mask = whole(F.dropout(x, 0.5))
        assert not torch.equal(mask[:, :32], mask[:, 32:])
        torchhalo.torch_random()
        torchhalo.torch_random(False)
        mask = whole(F.dropout(x, 0.5))
        assert not torch.equal(mask[:, :32], mask[:, 32:])


def network(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.dropout2d(F.dropout(x, 0.4) * w, 0.2) * torch.rand_like(x), 0.1).square()


def gradients(way: str, members: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of the network on real processes; None on a rank outside the mesh."""
    mesh = mesh_of((members,)) if members == torch.distributed.get_world_size() else DeviceMesh(DEVICE, list(range(members)))
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(2, 3, 4, 11, dtype=torch.float64, generator=generator) for _ in range(2))
    x, w = (distribute_tensor(t, mesh, [Shard(3)]).requires_grad_() for t in (x, w))
    torch.manual_seed(1)
    if way == "plain":
        out = network(x, w)
    elif way == "compiled":
        out = torch.compile(network, backend="aot_eager", fullgraph=True)(x, w)
    else:
        out = checkpoint(network, x, w, use_reentrant=way == "reentrant")
    if mesh.get_coordinate() is None:
        return None
    out.sum().backward()
    return out.full_tensor().detach(), w.grad.full_tensor()


@pytest.mark.parametrize("way", ["plain", "checkpointed", "reentrant", "compiled"])
def test_real_processes(pool, way: str) -> None:
    """Checkpointing draws the same again; compiled code draws as eager code does; a mesh need not be the world."""
    (expected, gradient), *others = pool(2).run(gradients, "plain", 1)
    assert others == [None]
    for found in pool(2).run(gradients, way, 2):
        for got, want in zip(found, (expected, gradient), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_seeds_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one records they are the device's, which the graph draws anew at each replay, and nothing is awaited or sent."""
    with simulated(2), wire() as sent:
        mesh = init_device_mesh(DEVICE, (2,))
        randomness._draws.pop(mesh, None)
        op, device = torch.ops.aten.bernoulli_.float, torch.device("meta")
        monkeypatch.setattr(streams, "capturing", lambda device: True)
        state = torch.get_rng_state()
        assert randomness.seed_of(op, mesh, device, None).device == device
        assert mesh not in randomness._draws and torch.equal(torch.get_rng_state(), state)
        with pytest.raises(RuntimeError, match="bernoulli_: a CUDA graph would repeat the draw of a generator of the CPU"):
            randomness.seed_of(op, mesh, device, torch.Generator())
        F.dropout(shard(torch.ones(4, 6), mesh, [Shard(1)]), 0.5)
    assert sent == []


def test_no_cuda_no_graph() -> None:
    """Fake tensors may be on CUDA where torch has none, and raises when asked whether a graph records."""
    assert not streams.capturing(torch.device("cuda"))
    with fake_world(2, 0), torchhalo.enable():
        mesh = init_device_mesh(DEVICE, (2,))
        with FakeTensorMode():
            x = DTensor.from_local(torch.ones(4, 3, device="cuda"), mesh, [Shard(1)], run_check=False)
            assert F.dropout(x, 0.5).shape == (4, 6)


def seeded_differently() -> str:
    mesh = DeviceMesh(DEVICE, list(range(torch.distributed.get_world_size())))
    torchhalo.ops.randomness._draws.pop(mesh, None)
    torch.manual_seed(torch.distributed.get_rank())
    try:
        F.dropout(distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None), 0.5)
    except RuntimeError as error:
        return str(error)
    finally:
        torchhalo.ops.randomness._draws.pop(mesh, None)
    return ""


def test_ranks_that_are_seeded_differently_raise(pool) -> None:
    messages = pool(2).run(seeded_differently)
    assert len(set(messages)) == 1 and "manual_seed" in messages[0]


def check_inductor() -> None:
    import torch._inductor.config as config

    x = distribute_tensor(torch.ones(2, 9, 7, 7, dtype=torch.float64), mesh_of((3,)), [Shard(2)]).requires_grad_()
    torch._dynamo.reset()
    with config.patch(fallback_random=True):  # else the seed is the inductor's own
        compiled = torch.compile(lambda x: F.dropout(x * 2, 0.3), backend="inductor", fullgraph=True)
        compiled(x)
        torch.manual_seed(3)
        result = compiled(x)
    result.sum().backward()
    torch.manual_seed(3)
    torch.testing.assert_close(result.full_tensor(), F.dropout(x * 2, 0.3).full_tensor(), rtol=0, atol=0)
    torch.testing.assert_close(x.grad.full_tensor(), result.full_tensor(), rtol=0, atol=1e-15)


@pytest.mark.slow
def test_inductor(pool) -> None:
    """It works out products of indices by itself, and raises where they do not fit into 64 bits."""
    pool(3).run(check_inductor)
