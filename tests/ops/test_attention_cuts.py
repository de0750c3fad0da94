"""Attention that cuts samples or heads where its tokens were cut: one process's numbers, and what it sends."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_attention import MASKS, mask_of
from test_ring_attention import check_streamed
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import torchhalo
from torchhalo.ops import attention_cuts
from torchhalo.torch_internals.grid_shard import GridShard

attend = F.scaled_dot_product_attention
Function = Callable[..., torch.Tensor]


def in_model(function: Function) -> Function:
    """``function`` as a parallelized model calls it."""

    def call(*args: torch.Tensor) -> torch.Tensor:
        with torchhalo.plain_as_replicated():
            return function(*args)

    return call


def by_matmul(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.3
    return (scores if bias is None else scores + bias).softmax(-1) @ v


def by_einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * 0.3
    return torch.einsum("bhij,bhjd->bhid", (scores if bias is None else scores + bias).softmax(-1), v)


def by_bmm(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    q_, k_, v_ = (t.flatten(0, 1) for t in (q, k, v))
    return torch.bmm((torch.bmm(q_, k_.mT) * 0.3).softmax(-1), v_).unflatten(0, q.shape[:2])


WRITTEN_OUT: dict[str, Function] = {"matmul": by_matmul, "einsum": by_einsum, "bmm": by_bmm}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")  # other placements are stock's affair
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_attention(data: st.DataObject) -> None:
    """Any sizes, masks and placements; most of them cut the tokens of all three tensors."""
    mesh = data.draw(st.sampled_from([(2,), (3,), (4,), (2, 2)]))
    batch, heads = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([4, 12, 2, 3, 1]))
    size, width, keys = (data.draw(st.integers(1, top)) for top in (3, 3, 9))
    queries = data.draw(st.sampled_from([keys, keys, 5]))
    how = data.draw(st.sampled_from(["fused", "fused", *WRITTEN_OUT]))
    kind = data.draw(st.sampled_from(MASKS)) if how == "fused" else "none"
    grouped = how == "fused" and data.draw(st.booleans())
    placements: list[list[Placement]] = [[Shard(2)] * len(mesh)] * 3
    if data.draw(st.sampled_from([False, False, True])):
        choices: list[Placement] = [Shard(2), Replicate(), Partial(), *map(Shard, range(4))]
        placements = [[data.draw(st.sampled_from(choices)) for _ in mesh] for _ in range(3)]
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            shapes = [(batch, heads * (1 + grouped), queries, size), (batch, heads, keys, size), (batch, heads, keys, width)]
            tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
            mask = mask_of(kind, batch, shapes[0][1], queries, keys)
            if kind == "bool" and mask is not None:  # a query that sees no key gives not-a-number
                mask[:, 0] = True

        def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return attend(q, k, value=v, attn_mask=mask, is_causal=kind == "causal", enable_gqa=grouped, scale=0.3)

        function = in_model(fused if how == "fused" else WRITTEN_OUT[how])
        spread = [*placements, [Replicate()] * len(mesh)]
        assert_parity(function, [*tensors, mask], devices, spread, 1e-10, needs_grad=[True] * 3 + [False])


def sent(function: Function, shape: tuple[int, ...], ranks: int, training: bool = True) -> tuple[list[Sent], list[Sent]]:
    with simulated(ranks), torchhalo.strict(moves=True):
        mesh = init_device_mesh(DEVICE, (ranks,))
        q, k, v = (shard(torch.randn(shape), mesh, [Shard(2)]).requires_grad_(training) for _ in range(3))
        with wire() as forward:
            y = in_model(function)(q, k, v)
        assert y.placements == (Shard(2),)
        with wire() as backward:
            if training:
                y.backward(shard(torch.randn(shape), mesh, [Shard(2)]))
                assert q.grad.placements == k.grad.placements == v.grad.placements == (Shard(2),)
    return list(forward), list(backward)


@pytest.mark.parametrize("function", [attend, by_matmul, by_einsum])
@pytest.mark.parametrize("shape, ranks", [((1, 4, 8, 3), 2), ((1, 4, 8, 3), 4), ((6, 1, 9, 3), 3)])
def test_each_tensor_travels_once_there_and_once_back(function: Function, shape: tuple[int, ...], ranks: int) -> None:
    """Of q, k, v and the output, and of their gradients, each rank gets what it lacks of its part: (n - 1)/n of an nth."""
    for passes in sent(function, shape, ranks):
        assert [each.name for each in passes] == ["all_to_all_single"] * 4
        share = math.prod(shape) // ranks * (ranks - 1) // ranks
        assert all(set(each.received.values()) == {share} for each in passes)


@pytest.mark.parametrize("shape, ranks", [((1, 3, 8, 2), 2), ((1, 1, 8, 2), 2), ((2, 2, 9, 2), 3)])
def test_keys_travel_where_parts_would_be_uneven(shape: tuple[int, ...], ranks: int) -> None:
    forward, backward = sent(attend, shape, ranks)
    assert [each.name for each in (*forward, *backward)] == ["all_gather_into_tensor"] * 2 + ["reduce_scatter_tensor"]


def test_many_parts_may_be_slightly_uneven() -> None:
    assert {each.name for each in sent(attend, (49, 1, 4, 2), 2)[0]} == {"all_to_all_single"}


def test_without_gradients_keys_travel_if_that_is_no_more() -> None:
    """On two ranks two shares of keys and values are the four shares there and back."""
    for ranks, name in ((2, "all_gather_into_tensor"), (4, "all_to_all_single")):
        assert {each.name for each in sent(attend, (1, 4, 8, 3), ranks, training=False)[0]} == {name}


def test_few_keys_travel() -> None:
    """To attend to a few keys moves fewer bytes than to share out many queries."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        q = shard(torch.randn(1, 2, 64, 4), mesh, [Shard(2)]).requires_grad_()
        k = shard(torch.randn(1, 2, 4, 4), mesh, [Shard(2)]).requires_grad_()
        with wire() as forward:
            in_model(attend)(q, k, k)
    assert [each.name for each in forward] == ["all_gather_into_tensor"]


def over_image(x: torch.Tensor, heads: int, **options: object) -> torch.Tensor:
    q, k, v = (t.flatten(2).transpose(1, 2).unflatten(-1, (heads, -1)).transpose(1, 2) for t in (x, x.sin(), x * 0.5))
    return attend(q, k, v, **options).transpose(1, 2).flatten(2).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("mesh, dims", [((2,), (3,)), ((2,), (2,)), ((2, 2), (2, 3)), ((2, 2), (3, 2)), ((2, 2), (0, 3))])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_grids_keep_their_order(mesh: tuple[int, ...], dims: tuple[int, ...], kind: str) -> None:
    """Masks and causality mind which token is which: with heads cut all tokens are there, in order; nothing else moves."""
    placements = [Shard(dim) for dim in dims]
    with simulated(math.prod(mesh)), torchhalo.strict(moves=True):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            mask = mask_of(kind, 2, 4, 35, 35)
            if kind == "bool" and mask is not None:
                mask[:, 0] = True
            x = torch.randn(2, 8, 5, 7, dtype=torch.float64)

        def function(x: torch.Tensor) -> torch.Tensor:
            return over_image(x, 4, attn_mask=mask, is_causal=kind == "causal")

        out = assert_parity(in_model(function), [x], devices, [placements], 1e-11)
        assert list(out.placements) == placements


def test_dropout_of_a_grid() -> None:
    """The draws depend on which weight it is, not on who computes it."""
    found = []
    for dims in ([Replicate()], [Shard(2)], [Shard(3)]):
        with simulated(2):
            torch.manual_seed(1)
            mesh = init_device_mesh(DEVICE, (2,))
            with maybe_disable_local_tensor_mode():
                x = torch.sin(torch.arange(8 * 35.0, dtype=torch.float64)).view(1, 8, 5, 7)
            y = in_model(lambda x: over_image(x, 4, dropout_p=0.4))(shard(x, mesh, dims).requires_grad_())
            found.append(whole(y))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=1e-12)


def grid_attention(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """As MaxViT has it: each pixel attends to those at the same place of all windows; written out, with a bias of positions."""
    b, h, w, c = x.shape
    y = x.view(b, 4, h // 4, 4, w // 4, c).permute(0, 2, 4, 1, 3, 5).reshape(-1, 16, 2, c // 2).transpose(1, 2)
    y = by_matmul(y, y.cos(), y * 0.5, table)
    y = y.transpose(1, 2).reshape(b, h // 4, w // 4, 4, 4, c)
    return y.permute(0, 3, 1, 4, 2, 5).reshape(b, h, w, c) + x


@pytest.mark.parametrize("mesh, dims", [((2,), (2,)), ((2,), (1,)), ((4,), (2,)), ((2, 2), (1, 2)), ((3,), (2,))])
def test_attention_across_a_grid(mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    """Three ranks cut twelve columns where four parts do not end: there the image is moved besides."""
    placements = [Shard(dim) for dim in dims]
    with simulated(math.prod(mesh)), torchhalo.strict():
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            tensors = [torch.randn(2, 8, 8 if mesh != (3,) else 12, 4), torch.randn(1, 2, 16, 16)]
            tensors = [t.double() for t in tensors]
        out = assert_parity(in_model(grid_attention), tensors, devices, [placements, [Replicate()] * len(mesh)], 1e-11)
        assert list(out.placements) == placements or mesh == (3,)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Conv2d(3, 24, 1), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).reshape(len(x), 3, 4, 2, -1).transpose(-1, -2).unbind(1)
        both = attend(q, k, v) + by_matmul(q, k, v)
        return self.out(both.transpose(1, 2).flatten(2))


def check_processes() -> None:
    mesh = mesh_of((2,))
    torch.manual_seed(0)
    plain, model = Block().double(), Block().double()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(1, 3, 5, 7, dtype=torch.float64)
    plain(x).square().sum().backward()
    torchhalo.parallelize(model, mesh, dims=3)
    with mock.patch.object(attention_cuts, "_less", wraps=attention_cuts._less) as less:
        model(x).square().sum().backward()
    assert less.call_count == 2
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(got.grad, DTensor)
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=0, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(model(x).full_tensor(), plain(x), rtol=0, atol=1e-12)


def test_processes(pool) -> None:
    pool(2).run(check_processes)


def test_streamed() -> None:
    check_streamed(Block().double(), torch.randn(1, 3, 5, 7, dtype=torch.float64), 2)


def check_compiled() -> None:
    """Compiled, keys and values travel: a graph has no functions to stand before."""
    mesh = mesh_of((2,))
    torch.manual_seed(0)
    plain = Block().double()
    model = torchhalo.parallelize(copy.deepcopy(plain), mesh, dims=3)
    x = torch.randn(1, 3, 5, 7, dtype=torch.float64)
    expected = plain(x)
    expected.square().sum().backward()
    result = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(result.full_tensor(), expected, rtol=0, atol=1e-11)
    result.square().sum().backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_compiled(pool) -> None:
    pool(2).run(check_compiled)


def test_second_derivatives() -> None:
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        with maybe_disable_local_tensor_mode():
            x = torch.randn(1, 2, 6, 3, dtype=torch.float64)

        def penalty(x: torch.Tensor) -> torch.Tensor:
            (grad,) = torch.autograd.grad(by_matmul(x, x.sin(), x).square().sum(), x, create_graph=True)
            return grad

        assert_parity(in_model(penalty), [x], mesh, [[Shard(2)]], 1e-10)


def test_a_grid_stays_a_grid() -> None:
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        x = shard(torch.randn(1, 8, 4, 6), mesh, [Shard(3)])
        q = x.flatten(2).transpose(1, 2).unflatten(-1, (4, 2)).transpose(1, 2).requires_grad_()
        assert q.placements == in_model(attend)(q, q, q).placements == (GridShard(2, (4, 6), 1),)
