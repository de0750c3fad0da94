"""Attention over sharded tokens against one process, forward and gradients, and what it sends."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchhalo
from torchhalo.ops import attention_formula

#: What `parallelize` calls for `F.scaled_dot_product_attention`, but for the choice of what to cut.
attend = attention_formula.dot_product
MASKS = ["none", "causal", "bool", "float", "rows", "heads"]


def mask_of(kind: str, batch: int, heads: int, queries: int, keys: int) -> torch.Tensor | None:
    shapes = {
        "bool": (queries, keys),
        "float": (batch, 1, queries, keys),
        "rows": (batch, 1, 1, keys),
        "heads": (1, heads, queries, keys),
    }
    if kind not in shapes:
        return None
    mask = torch.randn(shapes[kind], dtype=torch.float64, device=DEVICE)
    return mask > -1 if kind == "bool" else mask


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_attention(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2)]))
    batch, heads, size = (data.draw(st.integers(1, 3)) for _ in range(3))
    queries, keys = (data.draw(st.integers(1, 9)) for _ in range(2))
    kind = data.draw(st.sampled_from(MASKS))
    grouped = data.draw(st.booleans())
    choices = [Replicate(), Partial(), *map(Shard, range(4)), Shard(2), Shard(2), Shard(2)]
    placements: list[list[Placement] | None] = [[data.draw(st.sampled_from(choices)) for _ in mesh] for _ in range(3)]
    if data.draw(st.booleans()):
        placements = [placements[0]] * 3
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            shapes = [(batch, heads * (1 + grouped), queries, size), (batch, heads, keys, size), (batch, heads, keys, size)]
            tensors = [torch.randn(shape, dtype=torch.float64, device=DEVICE) for shape in shapes]
            mask = mask_of(kind, batch, shapes[0][1], queries, keys)
            if kind == "bool":  # a query that sees no key gives not-a-number
                mask[:, 0] = True
        cut = [Replicate(), *map(Shard, range(0 if mask is None else mask.ndim))]
        placements.append([data.draw(st.sampled_from(cut)) for _ in mesh])

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return attend(q, k, v, attn_mask=mask, is_causal=kind == "causal", enable_gqa=grouped, scale=0.3)

        assert_parity(function, [*tensors, mask], devices, placements, atol=1e-10, needs_grad=[True] * 3 + [False])


def test_only_keys_and_values_travel() -> None:
    """12 tokens over 3 ranks, 4 each, 2 samples of 2 heads of size 5: the 8 keys and 8 values that a rank lacks.

    Backward the same again, and the sums of their gradients.
    """
    with simulated(3), torchhalo.strict():
        mesh = init_device_mesh(DEVICE, (3,))
        q, k, v = (shard(torch.randn(2, 2, 12, 5), mesh, [Shard(2)]).requires_grad_() for _ in range(3))
        with wire() as forward:
            y = attend(q, k, v)
        grad = shard(torch.randn(y.shape), mesh, y.placements)
        with wire() as backward:
            y.backward(grad)
        assert y.placements == q.grad.placements == k.grad.placements == v.grad.placements == (Shard(2),)
    keys = Sent("all_gather_into_tensor", dict.fromkeys(range(3), 2 * 2 * 2 * 8 * 5))
    sums = Sent("reduce_scatter_tensor", dict.fromkeys(range(3), 2 * 2 * 2 * 4 * 5))
    assert forward == [keys] and backward == [keys, sums]


@pytest.mark.parametrize("dim", [0, 1])
def test_samples_and_heads_stay(dim: int) -> None:
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        q, k, v = (shard(torch.randn(2, 2, 6, 4), mesh, [Shard(dim)]).requires_grad_() for _ in range(3))
        mask = shard(torch.randn(2, 2, 6, 6), mesh, [Replicate()])
        with wire() as sent:
            y = attend(q, k, v, attn_mask=mask)
            y.sum().backward()
    assert not [each for each in sent if each.name != "all_reduce"]


def test_a_kernel_without_dropout_raises() -> None:
    with simulated(2):
        q = shard(torch.randn(2, 2, 6, 4), init_device_mesh(DEVICE, (2,)), [Shard(2)])
        cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        with pytest.raises(NotImplementedError, match=r"dropout_p \(=0.1\) must be 0 for this kernel"):
            cpu(q, q, q, 0.1)


def test_bfloat16() -> None:
    """The same kernel runs on the same numbers; only the gradients of keys and values are summed in another order."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        tensors = [torch.randn(2, 2, 64, 16, device=DEVICE).bfloat16() for _ in range(3)]
        assert_parity(attend, tensors, mesh, [[Shard(2)]] * 3, atol=3 * 2**-8)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_linear_attention_sends_partial_sums_alone(mesh: tuple[int, ...]) -> None:
    """Keys times values are summed over tokens: few numbers, with which the tokens of a query need not be gathered."""

    def linear(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.bmm(query, torch.bmm(key.transpose(1, 2), value))

    with simulated(math.prod(mesh)), torchhalo.strict():
        tensors = [torch.randn(2, 11, 3, dtype=torch.float64, device=DEVICE) for _ in range(3)]
        result = assert_parity(linear, tensors, init_device_mesh(DEVICE, mesh), [[Shard(1)] * len(mesh)] * 3)
        assert result.placements == (Shard(1),) * len(mesh)


@pytest.mark.parametrize("ranks, tokens", [(2, 8), (3, 7), (4, 6)])
def test_gradients_of_written_out_attention_are_shared_out(ranks: int, tokens: int) -> None:
    """Those of keys and values are sums over the queries of all ranks, of which each rank gets its own tokens'."""

    def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)

    with simulated(ranks), torchhalo.strict():
        mesh, cut = init_device_mesh(DEVICE, (ranks,)), [Shard(1)]
        tensors = [torch.randn(2, tokens, 3, dtype=torch.float64, device=DEVICE) for _ in range(3)]
        assert_parity(written_out, tensors, mesh, [cut] * 3)
        sharded = [shard(t, mesh, cut).requires_grad_() for t in tensors]
        out = written_out(*sharded)
        with wire() as sent:
            out.backward(out.detach())
        assert [each.name for each in sent].count("reduce_scatter_tensor") == 2
        assert not [each for each in sent if each.name == "all_reduce"]
        assert all(list(t.grad.placements) == cut for t in sharded)


class WrittenOut(nn.Module):
    """As older diffusion and segmentation models do it."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.projections = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (projection(x) for projection in self.projections[:3])
        if self.how == "bmm":
            y = torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)
        elif self.how == "einsum":
            y = torch.einsum("bnm,bmc->bnc", torch.einsum("bnc,bmc->bnm", q, k).softmax(-1), v)
        else:
            q, k, v = (t.reshape(len(x), -1, 2, 4).transpose(1, 2) for t in (q, k, v))
            fused = self.how == "flash" and x.device.type == "cpu"  # on CUDA no fused kernel takes float64
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH):
                y = attend(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.projections[3](y) + x


class ManyHeads(nn.Module):
    def __init__(self, batch_first: bool, need_weights: bool):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.attention.batch_first else x.transpose(0, 1)
        y, weights = self.attention(x, x, x, need_weights=self.need_weights)
        y = y if self.attention.batch_first else y.transpose(0, 1)
        return y if weights is None else y * weights.square().sum(-1, keepdim=True)


class Image(nn.Module):
    """Attention in an image: flatten, attend, unflatten, add."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = WrittenOut("flash")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2).unflatten(2, (-1, 1))
        return self.attention(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape) * 2


def layer(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)


MODULES: dict[str, Callable[[], nn.Module]] = {
    **{how: functools.partial(WrittenOut, how) for how in ("bmm", "einsum", "math", "flash")},
    **{f"heads {b:d}{w:d}": functools.partial(ManyHeads, b, w) for b in (True, False) for w in (True, False)},
    "layer": functools.partial(layer, False),
    "layer, norm first": functools.partial(layer, True),
    "image": Image,
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mesh, dims", [((2,), (1,)), ((3,), (1,)), ((2, 2), (0, 1)), ((2, 2), (1, 1))])
def test_modules(name: str, mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    if DEVICE == "cuda" and torch.__version__ < "2.12" and name in ("heads 10", "heads 00", "layer", "layer, norm first"):
        pytest.skip("torch 2.11 cannot simulate the plain kernel on a DTensor that is a view; see test_modules_on_one_gpu")
    with simulated(math.prod(mesh)):
        check_module(name, init_device_mesh(DEVICE, mesh), dims)


def test_modules_on_one_gpu(gpu: str) -> None:
    for name in MODULES:
        check_module(name, init_device_mesh(gpu, (1,)), (1,))


def check_module(name: str, mesh: DeviceMesh, dims: tuple[int, ...]) -> None:
    """Output and the gradients of input and parameters; weights that shift all scores alike have none, but for rounding."""
    with maybe_disable_local_tensor_mode():
        torch.manual_seed(0)
        plain = MODULES[name]().double().to(mesh.device_type)
        sharded = copy.deepcopy(plain)
        x = torch.randn(2, 7, 8, dtype=torch.float64, device=mesh.device_type)
        expected = plain(x.requires_grad_())
        grad = torch.randn_like(expected)
        expected.backward(grad)
    sharded = distribute_module(sharded, mesh)
    y = shard(x.detach(), mesh, [Shard(dim) for dim in dims]).requires_grad_()
    result = sharded(y)
    torch.testing.assert_close(whole(result), expected.detach(), rtol=0, atol=1e-12)
    result.backward(shard(grad, mesh, result.placements))
    torch.testing.assert_close(whole(y.grad), x.grad, rtol=0, atol=1e-11)
    for got, want in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), want.grad, rtol=0, atol=1e-11)


def check_processes(inference: bool, gpu: str | None = None) -> None:
    mesh = mesh_of((3,)) if gpu is None else init_device_mesh(gpu, (1,))
    device = gpu or DEVICE
    x = torch.randn(2, 7, 8, dtype=torch.float64, device=device)
    for make in MODULES.values():
        torch.manual_seed(0)
        plain = make().double().eval().to(device)
        sharded = distribute_module(copy.deepcopy(plain), mesh)
        with torch.inference_mode(inference), torch.set_grad_enabled(False):
            for dim in (0, 1):
                result = sharded(distribute_tensor(x, mesh, [Shard(dim)]))
                torch.testing.assert_close(result.full_tensor(), plain(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("inference", [False, True])
def test_processes_without_gradient(pool, inference: bool) -> None:
    pool(3).run(check_processes, inference)


def test_one_gpu_without_gradient(gpu: str) -> None:
    for inference in (False, True):
        check_processes(inference, gpu)


def check_training() -> None:
    """On a mesh whose ranks are in descending order, with the shards that `distribute_tensor` would have made."""
    mesh = DeviceMesh(DEVICE, [2, 1, 0])
    x = [torch.randn(2, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    expected = attend(*x, is_causal=True)
    grad = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(grad)
    place = mesh.get_coordinate()[0]

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().chunk(3, 2)[place].contiguous()

    def sharded(tensor: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(own(tensor), mesh, [Shard(2)], run_check=False, shape=tensor.shape, stride=tensor.stride())

    y = [sharded(tensor).requires_grad_() for tensor in x]
    result = attend(*y, is_causal=True)
    torch.testing.assert_close(result.to_local(), own(expected), rtol=0, atol=1e-12)
    result.backward(sharded(grad))
    for got, want in zip(y, x, strict=True):
        torch.testing.assert_close(got.grad.to_local(), own(want.grad), rtol=0, atol=1e-12)


def test_processes_in_training(pool) -> None:
    pool(3).run(check_training)


def check_compiled(tokens: int) -> None:
    mesh = mesh_of((3,))
    torch.manual_seed(0)
    module = distribute_module(WrittenOut("flash").double(), mesh)
    x = torch.randn(1, tokens, 8, dtype=torch.float64)
    eager, compiled = (distribute_tensor(x, mesh, [Shard(1)]).requires_grad_() for _ in range(2))
    expected = module(eager).square().sum()
    expected.backward()
    wanted = [p.grad.full_tensor() for p in module.parameters()]
    module.zero_grad()
    torch._dynamo.reset()
    result = torch.compile(module, backend="aot_eager", fullgraph=True)(compiled).square().sum()
    result.backward()
    torch.testing.assert_close(result.full_tensor(), expected.full_tensor(), rtol=0, atol=1e-10)
    torch.testing.assert_close(compiled.grad.full_tensor(), eager.grad.full_tensor(), rtol=0, atol=1e-10)
    for got, want in zip(module.parameters(), wanted, strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [7, 2])
def test_compiled(pool, tokens: int) -> None:
    pool(3).run(check_compiled, tokens)
