"""Attention by a ring against plain torch, forward and gradients, what it sends and what it holds; and its dropout."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import cuda_kernels
import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_attention import MASKS, mask_of
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchhalo
from benchmarks.common import peak_memory
from torchhalo.ops import attention_formula, attention_work
from torchhalo.torch_internals import dtensors, simulation

#: What `parallelize` calls for `F.scaled_dot_product_attention`, but for the choice of what to cut.
attend = attention_formula.dot_product
MESHES = [(1,), (2,), (3,), (4,), (2, 2)]


@pytest.fixture(autouse=True)
def in_ring() -> Iterator[None]:
    """Keys and values travel in a ring, however few."""
    with mock.patch.object(attention_work, "RING_BYTES", -1):
        yield


@contextmanager
def without_kernels(on: bool) -> Iterator[None]:
    """Inside, torch has no fused kernel for any attention."""
    with contextlib.ExitStack() as stack:
        for module in (attention_formula, attention_work) if on else ():
            stack.enter_context(mock.patch.object(module, "has_kernel", lambda *_: False))
        yield


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_attention(data: st.DataObject) -> None:
    """Any number of queries and keys, so that shards are uneven or empty, any mask, on one or two sharded dims."""
    written_out = data.draw(st.booleans())
    mesh = data.draw(st.sampled_from(MESHES))
    batch, heads, size = (data.draw(st.integers(1, 2)) for _ in range(3))
    keys = data.draw(st.integers(1, 13))
    queries = data.draw(st.one_of(st.just(keys), st.integers(1, 13)))
    kind = data.draw(st.sampled_from(MASKS))
    grouped = data.draw(st.booleans())
    tokens = [Shard(2)] * len(mesh)
    placements = [tokens, tokens, tokens]
    if len(mesh) == 2:
        placements = data.draw(
            st.sampled_from([placements, [[Shard(1), Shard(2)]] * 3, [tokens, *[[Shard(2), Replicate()]] * 2]])
        )
    with simulated(math.prod(mesh)), without_kernels(written_out):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            shapes = [(batch, heads * (1 + grouped), queries, size), *[(batch, heads, keys, size)] * 2]
            tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
            mask = mask_of(kind, batch, shapes[0][1], queries, keys)

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
            return attend(q, k, v, attn_mask=mask, is_causal=kind == "causal", enable_gqa=grouped, scale=0.3)

        # of a bool mask some rows hide all keys of a block, and some all keys there are
        needs_grad = [True, True, True, False]
        given = [*placements, [Replicate()] * len(mesh)]
        # what torch writes out is contiguous, other than what its kernel of the CPU makes of the plain tensors
        any_strides = [None] * 5 if written_out and DEVICE == "cpu" else None
        result = assert_parity(function, [*tensors, mask], devices, given, 1e-11, needs_grad, any_strides)
        if placements[0] == tokens:  # heads that share a key are made whole where they would be on two ranks
            assert list(result.placements) == tokens


def fused(op: torch._ops.OpOverload, causal: bool) -> Callable[..., torch.Tensor]:
    """``op`` for sharded tensors; plain attention for plain ones."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(q, DTensor):
            given = [] if op is cuda_kernels.FLASH else [bias, True]
            return op(q, k, v, *given, is_causal=causal)[0].contiguous()
        with sdpa_kernel(SDPBackend.MATH):
            return attend(q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return function


@pytest.mark.parametrize("op", [cuda_kernels.FLASH, cuda_kernels.EFFICIENT, cuda_kernels.CUDNN], ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "bias"])
@pytest.mark.parametrize("mesh, tokens", [((3,), 11), ((4,), 6), ((2, 2), 9)])
@pytest.mark.parametrize("ring", [True, False])
def test_kernels_of_cuda(
    op: torch._ops.OpOverload, kind: str, mesh: tuple[int, ...], tokens: int, ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own way with masks and logsumexp; here they are plain formulas with these ways."""
    if kind == "bias" and op is cuda_kernels.FLASH:
        return
    monkeypatch.setattr(attention_work, "RING_BYTES", -1 if ring else 1 << 40)
    heads = 4 if op is cuda_kernels.FLASH else 2
    with cuda_kernels.on_cpu(), simulated(math.prod(mesh)), maybe_disable_local_tensor_mode():
        sizes = (4, 4, 6 if op is cuda_kernels.EFFICIENT else 4)  # that of the values may be another
        tensors = [torch.randn(2, h, tokens, size, dtype=torch.float64) for h, size in zip((heads, 2, 2), sizes, strict=True)]
        if kind == "bias":
            tensors.append(torch.randn(2, heads, tokens, tokens, dtype=torch.float64))
            tensors[3][:, :, 1, : tokens - 1] = -math.inf  # the second query sees the last key alone
    with cuda_kernels.on_cpu(), simulated(math.prod(mesh)):
        placements = [[Shard(2)] * len(mesh)] * len(tensors)
        needs_grad = [True] * 3 + [op is cuda_kernels.EFFICIENT] * (kind == "bias")
        devices = init_device_mesh(DEVICE, mesh)
        assert_parity(fused(op, kind == "causal"), tensors, devices, placements, 1e-11, needs_grad)


@pytest.mark.parametrize("tokens", [7, 1])
def test_without_gradient(tokens: int) -> None:
    """The kernel is asked for no logsumexp then, and must give one all the same."""
    with cuda_kernels.on_cpu(), simulated(3):
        x, bias = torch.randn(2, 2, tokens, 4, dtype=torch.float64), torch.randn(2, 2, tokens, tokens, dtype=torch.float64)
        mesh = init_device_mesh(DEVICE, (3,))
        q, mask = shard(x, mesh, [Shard(2)]), shard(bias, mesh, [Replicate()])
        out, sums, *_ = cuda_kernels.EFFICIENT(q, q, q, mask, False)
        with maybe_disable_local_tensor_mode():
            expected = attend(x, x, x, attn_mask=bias)
        torch.testing.assert_close(whole(out), expected, rtol=0, atol=1e-12)
        assert sums.shape == (2, 2, 0)


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("hidden, rows", [(-math.inf, [1, 4]), (torch.finfo(torch.float64).min, [1, 4]), (-1e9, [1, 4])])
def test_queries_that_see_no_key(
    hidden: float, rows: list[int], ring: bool, written_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero from this kernel; with a number for infinity, which swallows the scores, the mean of all values."""
    monkeypatch.setattr(attention_work, "RING_BYTES", -1 if ring else 1 << 40)
    with simulated(3), without_kernels(written_out):
        x = [torch.randn(1, 2, 7, 4, dtype=torch.float64) for _ in range(3)]
        mask = torch.randn(7, 7, dtype=torch.float64)
        mask[rows], mask[5, :4] = hidden, hidden
        # torch's kernel makes wrong gradients of it, and a ring as well
        lowest = hidden < -1e300 and hidden != -math.inf
        needs_grad = [not lowest or (written_out and not ring)] * 3 + [False]

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.MATH) if lowest and not isinstance(q, DTensor) else contextlib.nullcontext():
                return attend(q, k, v, attn_mask=mask)

        tolerance = 1e-6 if hidden == -1e9 else 1e-11  # the rounding of the scores there
        mesh = init_device_mesh(DEVICE, (3,))
        any_strides = [None] * 5 if written_out and DEVICE == "cpu" else None
        assert_parity(function, [*x, mask], mesh, [[Shard(2)]] * 3 + [[Replicate()]], tolerance, needs_grad, any_strides)


@pytest.mark.parametrize("keys", [1, 2, 5])
@pytest.mark.parametrize("rows", [[0], [3], [2, 3], [0, 1, 2, 3]])
def test_hidden_queries_of_ranks_without_keys(keys: int, rows: list[int]) -> None:
    """All gradients too: of one key the second rank owns none, and has nothing to begin with."""
    with simulated(2):
        x = [torch.randn(1, 2, size, 4, dtype=torch.float64) for size in (4, keys, keys)]
        mask = torch.ones(4, keys, dtype=torch.bool)
        mask[rows] = False
        mesh, placements = init_device_mesh(DEVICE, (2,)), [*[[Shard(2)]] * 3, [Replicate()]]
        assert_parity(attend, [*x, mask], mesh, placements, 1e-11, [True] * 3 + [False])


def elements(tokens: int) -> int:
    """Of keys and values of so many tokens, in a batch of 2 with 2 heads of size 5."""
    return 2 * 2 * 2 * tokens * 5


def sent_by(tokens: int, ranks: int, causal: bool) -> tuple[list[Sent], list[Sent]]:
    with simulated(ranks), torchhalo.strict():
        mesh = init_device_mesh(DEVICE, (ranks,))
        q, k, v = (shard(torch.randn(2, 2, tokens, 5), mesh, [Shard(2)]).requires_grad_() for _ in range(3))
        with wire() as forward:
            y = attend(q, k, v, is_causal=causal)
        grad = shard(torch.randn(y.shape), mesh, y.placements)
        with wire() as backward:
            y.backward(grad)
    return forward, backward


@pytest.mark.parametrize("tokens, ranks", [(12, 3), (7, 3), (2, 3), (6, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_each_key_travels_once(tokens: int, ranks: int, causal: bool) -> None:
    """Each rank gets every key and value that it needs and does not own once forward and once backward, and their owner each
    gradient. Of a causal attention those before it. A rank without queries needs none.
    """
    forward, backward = sent_by(tokens, ranks, causal)
    parts = [len(part) for part in torch.arange(tokens).chunk(ranks)]
    parts += [0] * (ranks - len(parts))
    steps = sum(map(bool, parts)) - 1
    assert len(forward) == steps and len(backward) == 2 * steps
    assert {each.name for each in (*forward, *backward)} <= {"all_to_all_single"}
    for rank, own in enumerate(parts):
        others = sum(parts[:rank]) if causal else tokens - own
        readers = sum(map(bool, parts[rank + 1 :])) if causal else steps
        keys, grads = elements(others) if own else 0, elements(own) * readers
        assert sum(each.received[rank] for each in forward) == keys
        assert sum(each.received[rank] for each in backward) == keys + grads


def test_few_keys_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their bytes: 12 tokens of 2 samples of 2 heads of size 5 in float32 have 1920."""
    for limit, name in ((1919, "all_to_all_single"), (1920, "all_gather_into_tensor")):
        monkeypatch.setattr(attention_work, "RING_BYTES", limit)
        assert sent_by(12, 3, False)[0][0].name == name


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_memory_is_that_of_blocks(passes: str) -> None:
    """However many ranks there are: the next block beside the one that is here, and sums of what this rank owns.

    A rank among others that are not there; all tensors in float32, of the size of a shard. Forward: two blocks of keys and
    values, the output, and that of one block. Backward: two blocks, their gradients on the way out and in, and the sums.
    """

    def peak(ranks: int) -> float:
        with simulation.fake_world(ranks, 1), torchhalo.enable():
            mesh = init_device_mesh(DEVICE, (ranks,))
            meta = dtensors.meta(torch.empty(1, 4, 64 * ranks, 32, device="meta"))
            q, k, v, grad = (dtensors.wrap(torch.randn(1, 4, 64, 32), mesh, [Shard(2)], meta) for _ in range(4))
            if passes == "forward":
                return peak_memory(lambda: attend(q, k, v), "cpu") / one
            y = attend(*(t.requires_grad_() for t in (q, k, v)))
            return peak_memory(lambda: torch.autograd.grad(y, (q, k, v), grad, retain_graph=True), "cpu") / one

    one = 4 * 64 * 32 * 4 / 2**20
    few, many = peak(3), peak(9)
    assert many < few + 0.5
    assert many < (2 * 2 + 2 if passes == "forward" else 2 * 2 + 3 * 2 + 2 * 3) + 1.5


def check_gloo() -> None:
    with mock.patch.object(attention_work, "RING_BYTES", -1):
        mesh = mesh_of((3,))
        for tokens, causal in ((9, False), (7, True), (2, False)):
            x = [torch.randn(2, 2, tokens, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
            expected = attend(*x, is_causal=causal)
            expected.square().sum().backward()
            y = [distribute_tensor(t.detach(), mesh, [Shard(2)]).requires_grad_() for t in x]
            result = attend(*y, is_causal=causal)
            result.square().sum().backward()
            torch.testing.assert_close(result.full_tensor(), expected, rtol=0, atol=1e-12)
            for got, want in zip(y, x, strict=True):
                torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")  # squares of two tokens on three ranks
def test_processes(pool) -> None:
    pool(3).run(check_gloo)


def check_compiled(tokens: int, queries: int, causal: bool, partition: str) -> list[list[str]]:
    """The numbers of eager mode; the collectives of this rank's graphs."""
    from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append([str(n.target) for n in graph.graph.nodes if "_c10d_functional" in str(n.target)])
        return make_boxed_func(graph.forward)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (attend(q, k, v, is_causal=causal) * 2).sum()

    mesh = mesh_of((3,))
    partitions = {"min-cut": min_cut_rematerialization_partition, "default": default_partition}
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partitions[partition])
    x = [torch.randn(1, 2, size, 4, dtype=torch.float64) for size in (queries, tokens, tokens)]
    eager, compiled = ([distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in x] for _ in range(2))
    torch._dynamo.reset()
    with mock.patch.object(attention_work, "RING_BYTES", -1):
        expected = function(*eager)
        expected.backward()
        result = torch.compile(function, backend=backend, fullgraph=True)(*compiled)
        result.backward()
    torch.testing.assert_close(result.full_tensor(), expected.full_tensor(), rtol=0, atol=1e-11)
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad.full_tensor(), rtol=0, atol=1e-11)
    return graphs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")
@pytest.mark.parametrize("partition", ["min-cut", "default"])
@pytest.mark.parametrize("tokens, queries, causal", [(7, 7, True), (4, 4, False), (2, 2, True), (2, 9, False), (9, 2, True)])
def test_all_ranks_hold_the_same_collectives(pool, tokens: int, queries: int, causal: bool, partition: str) -> None:
    first, *others = pool(3).run(check_compiled, tokens, queries, causal, partition)
    assert len(first) == 2 and sum("all_to_all" in name for name in first[1]) == 2 * sum("all_to_all" in n for n in first[0])
    assert all(graphs == first for graphs in others)


def multiplier(shape: tuple[int, ...], p: float) -> torch.Tensor:
    """What dropout multiplies with, of the first draw after the seed."""
    with simulated(2):
        torch.manual_seed(5)
        ones = shard(torch.ones(shape, dtype=torch.float64), init_device_mesh(DEVICE, (2,)), [Replicate()])
        return whole(F.dropout(ones, p))


@pytest.mark.parametrize("op", [cuda_kernels.FLASH, cuda_kernels.EFFICIENT, cuda_kernels.CUDNN], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ring", [True, False])
def test_dropout(op: torch._ops.OpOverload, causal: bool, ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draw of `F.dropout` on the weights of an attention that is written out, however many ranks there are."""
    monkeypatch.setattr(attention_work, "RING_BYTES", -1 if ring else 1 << 40)
    monkeypatch.setattr("torchhalo.kernels.attention.SLICE", 50)
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(2, heads, 7, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]
    drops = multiplier((2, 4, 7, 7), 0.3)
    assert 0 < (drops == 0).sum() < drops.numel()

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.repeat_interleave(2, 1).mT / 2
        scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf) if causal else scores
        return (scores.softmax(-1) * drops) @ v.repeat_interleave(2, 1)

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensors[0], DTensor):
            return plain(*tensors)
        torch.manual_seed(5)
        given = [] if op is cuda_kernels.FLASH else [None, True]
        return op(*tensors, *given, dropout_p=0.3, is_causal=causal)[0].contiguous()

    choices: list[tuple[tuple[int, ...], list[Placement]]] = [
        *(((ranks,), [Shard(2)]) for ranks in (1, 2, 3, 4)),
        ((2,), [Shard(0)]),
        ((2,), [Shard(1)]),
        ((2,), [Replicate()]),
        ((2, 2), [Shard(0), Shard(2)]),
        ((2, 2), [Shard(2), Shard(2)]),
    ]
    for mesh, placements in choices:
        with simulated(math.prod(mesh)):
            assert_parity(function, x, init_device_mesh(DEVICE, mesh), [placements] * 3, 1e-11)


def test_dropout_with_a_bias() -> None:
    """The efficient kernel's, which has a gradient; and all weights dropped."""
    x = [torch.randn(1, 2, 7, 4, dtype=torch.float64) for _ in range(3)]
    bias = torch.randn(1, 2, 7, 7, dtype=torch.float64)
    for p, drops in ((0.3, multiplier((1, 2, 7, 7), 0.3)), (1.0, torch.zeros(()))):

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            if not isinstance(q, DTensor):
                return ((q @ k.mT / 2 + bias).softmax(-1) * drops) @ v  # noqa: B023
            torch.manual_seed(5)
            return cuda_kernels.EFFICIENT(q, k, v, bias, True, dropout_p=p)[0].contiguous()  # noqa: B023

        with simulated(3):
            assert_parity(function, [*x, bias], init_device_mesh(DEVICE, (3,)), [[Shard(2)]] * 3 + [[Replicate()]], 1e-11)


class OverImage(nn.Module):
    """Self-attention over all places of an image, as in the middle of an autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(2, 12, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.flatten(2).transpose(1, 2).unsqueeze(1) for t in self.project(x).chunk(3, 1))
        return attend(q, k, v).squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:])


def check_streamed(plain: nn.Module, x: torch.Tensor, shards: int) -> None:
    """One device as all ranks in turn: what travels is a copy."""
    streamed = torchhalo.stream(copy.deepcopy(plain), shards=shards, progress=False)
    for model in (plain, streamed):
        model(x).square().sum().backward()
    torch.testing.assert_close(streamed(x), plain(x), rtol=0, atol=1e-12)
    for got, want in zip(streamed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=1e-12)


def test_streamed() -> None:
    check_streamed(OverImage().double(), torch.randn(1, 2, 7, 3, dtype=torch.float64), 3)
