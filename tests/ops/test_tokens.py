"""Tokens of a sharded image: they stay where they are, and all that is done to them is what one process does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torchhalo
from torchhalo.ops import attention_work
from torchhalo.torch_internals.grid_shard import GridShard

Function = Callable[[torch.Tensor], torch.Tensor]


def weight(*shape: int) -> torch.Tensor:
    """The same numbers on every rank, of about one in all."""
    count = math.prod(shape)
    values = torch.sin(torch.arange(1.0, count + 1, dtype=torch.float64) * 1.7).view(shape)
    return values.to(DEVICE) / math.sqrt(shape[-1])


def like(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A plain tensor beside ``x``."""
    if not isinstance(x, DTensor):
        return value
    return DTensor.from_local(value, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)


#: What blocks do to tokens (batch, tokens, 4), which stay of that shape.
STEPS: dict[str, Function] = {
    "linear": lambda t: F.linear(t, like(t, weight(4, 4)), like(t, weight(4))),
    "mlp": lambda t: F.linear(F.gelu(F.linear(t, like(t, weight(8, 4)))), like(t, weight(4, 8))),
    "matmul": lambda t: t @ like(t, weight(4, 4)),
    "einsum": lambda t: torch.einsum("bnc,cd->bnd", t, like(t, weight(4, 4))),
    "norm": lambda t: F.layer_norm(t, (4,), like(t, weight(4)), like(t, weight(4))),
    "rms": lambda t: F.rms_norm(t, (4,), like(t, weight(4))),
    "residual": lambda t: t + torch.tanh(t),
    "positions": lambda t: t + like(t, weight(1, t.shape[1], 4)),
    "scale": lambda t: t * like(t, weight(4)) * 0.5,
    "gate": lambda t: torch.mul(*F.linear(t, like(t, weight(8, 4))).chunk(2, -1)),
    "join": lambda t: F.linear(torch.cat([t, t.sin()], -1), like(t, weight(4, 8))),
    "mean": lambda t: t - t.mean(1, keepdim=True),
    "sum": lambda t: t + t.sum((1, 2), keepdim=True) / 7,
    "halves": lambda t: torch.stack([t[..., :2], t[..., 2:]], -1).flatten(-2),
    "select": lambda t: t * t.unflatten(-1, (2, 2))[..., 1].sum(-1, keepdim=True),
    "where": lambda t: torch.where(t > 0, t, t * 0.1),
    "mask": lambda t: t.masked_fill(t.detach() < -0.5, 0.25),
    "softmax": lambda t: t.softmax(-1) * 3,
    "channels": lambda t: t.transpose(1, 2).contiguous().softmax(1).transpose(1, 2),
    "heads": lambda t: t.unflatten(-1, (2, 2)).transpose(1, 2).contiguous().transpose(1, 2).flatten(2),
    "expand": lambda t: t.unsqueeze(1).expand(-1, 2, -1, -1).sum(1),
    "written": lambda t: _written(t.clone()),
    # what no rank can do with its own tokens alone
    "flip": lambda t: t + t.flip(1),
    "cumsum": lambda t: t.cumsum(1) / t.shape[1],
    "first": lambda t: t + t[:, :1],
    "halved": lambda t: torch.cat([t[:, : t.shape[1] // 2] * 2, t[:, t.shape[1] // 2 :]], 1),
    "tokens softmax": lambda t: t.softmax(1) + t,
    "largest": lambda t: t - t.amax(1, keepdim=True),
    "roll": lambda t: t.roll(1, 1) - t,
    "pad": lambda t: F.pad(t, (0, 0, 1, 1))[:, 1:-1],
    "attention": lambda t: (t @ t.transpose(1, 2)).softmax(-1) @ t,
    "fused attention": lambda t: _attention(t, t),
    "few keys": lambda t: _attention(t, t.sin().mean(1, keepdim=True).expand(-1, 3, -1).contiguous()),
    "group norm": lambda t: F.group_norm(t.transpose(1, 2), 2, like(t, weight(4))).transpose(1, 2),
    "table": lambda t: t + like(t, weight(9, 4))[torch.arange(t.shape[1], device=DEVICE) % 9] * t.detach(),
    "batch norm": lambda t: F.batch_norm(t.transpose(1, 2), None, None, like(t, weight(4)), training=True).transpose(1, 2),
    "masked attention": lambda t: _attention(t, t, like(t, weight(1, 1, t.shape[1], t.shape[1]))),
    "written piece": lambda t: _written_piece(t.clone()),
}


def _attention(t: torch.Tensor, s: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    query, key = (x.unflatten(-1, (2, 2)).transpose(1, 2) for x in (t, s))
    out = F.scaled_dot_product_attention(query, key, key * 0.5, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def _reduced(x: torch.Tensor) -> torch.Tensor:
    """Attention to the tokens of a smaller image, whose grid is another."""
    t = x.flatten(2).transpose(1, 2)
    s = F.avg_pool2d(x, 2, ceil_mode=True).flatten(2).transpose(1, 2)
    return (t + _attention(t, s)).transpose(1, 2).reshape(x.shape)


def _written(t: torch.Tensor) -> torch.Tensor:
    t.mul_(2).sub_(0.1)
    t[..., 1] = 0.5
    t.masked_fill_(t > 1, 0.75)
    return t


def _written_piece(t: torch.Tensor) -> torch.Tensor:
    t[:, 1:] = t[:, 1:] * 3
    t[:, 0].zero_()
    return t


def network(names: list[str]) -> Function:
    def forward(x: torch.Tensor) -> torch.Tensor:
        t = x.flatten(2).transpose(1, 2)
        for name in names:
            t = STEPS[name](t)
        return t.transpose(1, 2).reshape(x.shape)

    return forward


MESHES = [
    ((1,), (3,)),
    ((2,), (3,)),
    ((3,), (3,)),
    ((2,), (2,)),
    ((4,), (3,)),
    ((2, 2), (2, 3)),
    ((2, 2), (3, 2)),
    ((2, 2), (0, 3)),
]


#: Where there is one token, DTensor gathers it rather than cut what it meets.
one_token = pytest.mark.filterwarnings("ignore::torchhalo.exchange.gathers.GatherWarning")


@pytest.mark.slow
@one_token
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str) -> None:
    """Each on batches, with uneven, tiny and empty shards, cut along height and width; the image comes back as it went."""
    for mesh, dims in MESHES:
        for shape in ((2, 4, 5, 7), (1, 4, 2, 3))[: 2 if mesh in ((2,), (4,)) else 1]:
            with simulated(math.prod(mesh)):
                devices = init_device_mesh(DEVICE, mesh)
                x = weight(*shape)
                placements = [Shard(dim) for dim in dims]
                out = assert_parity(network([name]), [x], devices, [placements], long_strides=True)
                if shape[0] > 1 and mesh != (1,):
                    assert list(out.placements) == placements or name in NEED_OTHERS


@pytest.mark.parametrize("in_ring", [False, True])
@pytest.mark.parametrize("function", [_reduced, network(["fused attention"])])
def test_attention_moves_keys_and_values_alone(monkeypatch: pytest.MonkeyPatch, function: Function, in_ring: bool) -> None:
    monkeypatch.setattr(attention_work, "RING_BYTES", -1 if in_ring else 2**40)
    for mesh, dims in MESHES[1:]:
        with simulated(math.prod(mesh)), torchhalo.strict(moves=0 not in dims):
            devices = init_device_mesh(DEVICE, mesh)
            placements = [Shard(dim) for dim in dims]
            out = assert_parity(function, [weight(2, 4, 6, 8)], devices, [placements])
            assert list(out.placements) == placements


NEED_OTHERS = {"masked attention", "flip", "cumsum", "halved", "tokens softmax", "roll", "pad", "written piece"}
LOCAL = [
    name
    for name in STEPS
    if name
    not in NEED_OTHERS
    | {"first", "largest", "attention", "fused attention", "few keys", "mean", "sum", "group norm", "batch norm"}
]


@pytest.mark.parametrize("name", LOCAL)
def test_what_treats_each_token_alone_sends_nothing(name: str) -> None:
    """Forward; and backward but for sums of gradients of parameters, which here are no parameters."""
    for mesh, dims in MESHES[1:]:
        with simulated(math.prod(mesh)):
            devices = init_device_mesh(DEVICE, mesh)
            x = shard(weight(2, 4, 5, 7), devices, [Shard(dim) for dim in dims]).requires_grad_()
            with wire() as sent, torchhalo.strict():
                out = network([name])(x)
                out.backward(out.detach())
            assert not [each for each in sent if any(each.received.values())], (name, mesh, dims, sent)


@one_token
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_networks_of_tokens(data: st.DataObject) -> None:
    mesh, dims = data.draw(st.sampled_from(MESHES))
    shape = data.draw(st.tuples(st.integers(1, 3), st.just(4), st.integers(1, 6), st.integers(1, 7)))
    names = data.draw(st.lists(st.sampled_from(list(STEPS)), min_size=2, max_size=5))
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x = torch.randn(shape, dtype=torch.float64, device=DEVICE)
        assert_parity(network(names), [x], devices, [[Shard(dim) for dim in dims]], atol=1e-9, long_strides=True)


def test_dropout_of_tokens_draws_what_it_draws_anywhere() -> None:
    found = []
    for ranks, dim in ((1, 2), (2, 2), (2, 3), (3, 3)):
        with simulated(ranks):
            torch.manual_seed(3)
            x = shard(weight(2, 4, 5, 7), init_device_mesh(DEVICE, (ranks,)), [Shard(dim)])
            found.append(whole(F.dropout(x.flatten(2).transpose(1, 2), 0.4)))
    assert all(torch.equal(each, found[0]) for each in found) and 0 < (found[0] == 0).double().mean() < 1


def test_a_piece_that_was_cut_before_a_write_is_stale() -> None:
    with simulated(2):
        x = shard(weight(1, 2, 4, 6), init_device_mesh(DEVICE, (2,)), [Shard(3)])
        y = x * 1
        piece = y[..., 1:4]
        y.flatten(2).mul_(2)
        with pytest.raises(RuntimeError, match=r"was\s+written to in place since"):
            piece + 1


def test_tokens_of_a_parallelized_model_have_placements_of_torchs_own(pool) -> None:
    pool(2).run(check_outputs)


class Tokens(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 4, 2, stride=2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"tokens": self.patches(x).flatten(2).transpose(1, 2)}


def check_outputs() -> None:
    mesh = mesh_of((2,))
    torch.manual_seed(0)
    model = Tokens()
    x = torch.randn(1, 3, 8, 12, dtype=torch.float64)
    expected = model(x)["tokens"]
    torchhalo.parallelize(model, mesh, dims=3)
    out = model(x)["tokens"]
    assert isinstance(out, DTensor) and out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor(), expected, rtol=0, atol=1e-12)
    out.square().sum().backward()


def check_processes(inference: bool) -> None:
    mesh = mesh_of((3,))
    for name, step in STEPS.items():
        x = weight(2, 4, 5, 7)
        with torch.inference_mode(inference):
            y = network([name])(distribute_tensor(x, mesh, [Shard(3)]))
            torch.testing.assert_close(y.full_tensor(), network([name])(x), rtol=0, atol=1e-10, msg=f"{name} {step}")


@pytest.mark.parametrize("inference", [False, True])
def test_processes(pool, inference: bool) -> None:
    pool(3).run(check_processes, inference)


def check_compiled(names: list[str], dim: int) -> None:
    mesh = mesh_of((3,))
    eager, compiled = (distribute_tensor(weight(2, 4, 5, 7), mesh, [Shard(dim)]).requires_grad_() for _ in range(2))
    torch._dynamo.reset()
    step = network(names)
    expected = step(eager)
    expected.square().sum().backward()
    result = torch.compile(step, backend="aot_eager", fullgraph=True)(compiled)
    result.square().sum().backward()
    assert result.placements == expected.placements
    torch.testing.assert_close(result.full_tensor(), expected.full_tensor(), rtol=0, atol=1e-12)
    torch.testing.assert_close(compiled.grad.full_tensor(), eager.grad.full_tensor(), rtol=0, atol=1e-12)


def check_tokens_out_of_a_graph() -> None:
    """Tokens that leave one graph and enter another, and a gradient between them."""
    mesh = mesh_of((3,))
    x = distribute_tensor(weight(2, 4, 5, 7), mesh, [Shard(3)]).requires_grad_()
    torch._dynamo.reset()
    there = torch.compile(lambda x: x.flatten(2).transpose(1, 2) * 2, backend="aot_eager", fullgraph=True)
    back = torch.compile(lambda t: t.sin().transpose(1, 2).reshape(2, 4, 5, 7), backend="aot_eager", fullgraph=True)
    tokens = there(x)
    assert tokens.placements == (GridShard(1, (5, 7), 1),)
    y = back(tokens)
    y.sum().backward()
    assert y.placements == x.grad.placements == (Shard(3),)
    torch.testing.assert_close(x.grad.full_tensor(), 2 * torch.cos(2 * weight(2, 4, 5, 7)), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["norm", "mlp", "residual", "positions"], ["gate", "mean", "attention"]])
def test_compiled(pool, names: list[str]) -> None:
    pool(3).run(check_compiled, names, 3)


def test_tokens_out_of_a_graph(pool) -> None:
    pool(3).run(check_tokens_out_of_a_graph)


@pytest.mark.filterwarnings("ignore::torchhalo.exchange.gathers.GatherWarning")  # what is written to a whole tensor is gathered
@pytest.mark.parametrize("mesh, dims", [((2,), (2,)), ((2,), (3,)), ((3,), (3,)), ((2, 2), (2, 3))])
def test_writes_between_tokens_and_others(mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """Into tokens from a tensor that is cut along them, whole, or a sum; and the other way round."""
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        x, y = weight(2, 4, 5, 7), weight(2, 4, 35).flip(2)
        for placements in ([Shard(2)], [Replicate()], [Partial()], [Shard(1)]):
            others = [*placements, *[Replicate()] * (len(mesh) - 1)]
            tokens = shard(x, devices, [Shard(dim) for dim in dims]).flatten(2)
            other = shard(y, devices, others)
            expected = whole(tokens) + whole(other)
            into = tokens.clone()
            assert into.add_(other) is into
            torch.testing.assert_close(whole(into), expected, rtol=0, atol=1e-12)
            if placements != [Partial()]:
                into = other.clone()
                assert into.add_(tokens) is into
                torch.testing.assert_close(whole(into), expected, rtol=0, atol=1e-12)
                into.copy_(tokens)
                torch.testing.assert_close(whole(into), whole(tokens), rtol=0, atol=0)


def test_no_tensor_is_made_or_saved_as_a_grid() -> None:
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        tokens = shard(weight(2, 3, 5, 7), mesh, [Shard(3)]).flatten(2)
        with pytest.raises(NotImplementedError, match=r"cannot be made or saved .*redistribute"):
            torch.distributed.tensor.zeros(2, 3, 35, device_mesh=mesh, placements=tokens.placements)
        with pytest.raises(RuntimeError, match="GridShard"):
            DTensor.from_local(tokens.to_local(), mesh, tokens.placements, run_check=False)


def check_collectives() -> None:
    """Metrics gather tokens that they kept into tensors like them, which are a grid too."""
    mesh = mesh_of((2,))
    x = weight(2, 4, 5, 7)
    tokens = distribute_tensor(x, mesh, [Shard(3)]).flatten(2)
    found = [torch.zeros_like(tokens) for _ in range(2)]
    torch.distributed.all_gather(found, tokens.contiguous())
    for each in found:
        torch.testing.assert_close(each.full_tensor(), x.flatten(2), rtol=0, atol=0)


def test_collectives(pool) -> None:
    pool(2).run(check_collectives)


@pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")  # of stock's products, where a dim has one row
@pytest.mark.parametrize("size", [(5, 4), (3, 7), (1, 5), (6, 4)])
@pytest.mark.parametrize("way", ["gathered", "ring", "heads", "written out"])
def test_attention_whatever_axis_cuts_which_dim(way: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first axis may cut the width, so that owners of tokens are not in the order of ranks; shards are uneven."""
    monkeypatch.setattr(attention_work, "RING_BYTES", -1 if way == "ring" else 1 << 40)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        if way == "written out":
            found = (tokens @ (tokens @ w).mT).softmax(-1) @ tokens
        else:
            heads = 2 if way == "heads" else 1
            q, k, v = ((tokens @ w * f).unflatten(-1, (heads, -1)).transpose(1, 2) for f in (1.0, 0.5, 2.0))
            found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (tokens + found).transpose(1, 2).unflatten(2, size)

    for placements in ([Shard(3), Shard(2)], [Shard(2), Shard(3)]):
        with simulated(6):
            mesh = init_device_mesh(DEVICE, (2, 3))
            assert_parity(function, [weight(2, 4, *size), weight(4, 4)], mesh, [placements, [Replicate()] * 2], 1e-11)
