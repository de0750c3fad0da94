"""Reductions along sharded dims against one process: value, gradient, and what travels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import DEVICE, assert_parity, shard, simulated, whole, wire
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from memory import MEMORIES, Memory, memories
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torchhalo
from torchhalo.kernels import norms
from torchhalo.ops.statistics import products

Op = Callable[..., torch.Tensor]

OVER_DIMS: dict[str, Op] = {
    "mean": lambda x, dims, keep: x.mean(dims, keep),
    "sum": lambda x, dims, keep: x.sum(dims, keep),
    "var": lambda x, dims, keep: x.var(dims, correction=0, keepdim=keep),
    "std": lambda x, dims, keep: x.std(dims, correction=0.5, keepdim=keep),
    "var_mean": lambda x, dims, keep: sum(torch.var_mean(x, dims, correction=0, keepdim=keep)),
    "std_mean": lambda x, dims, keep: math.prod(torch.std_mean(x, dims, correction=0.5, keepdim=keep)),
    "amax": lambda x, dims, keep: x.amax(dims, keep),
    "amin": lambda x, dims, keep: x.amin(dims, keep),
    "logsumexp": lambda x, dims, keep: x.logsumexp(dims, keep),
    "norm": lambda x, dims, keep: torch.linalg.vector_norm(x, 2, dims, keep),
    "norm 3": lambda x, dims, keep: torch.linalg.vector_norm(x, 3, dims, keep),
    "norm inf": lambda x, dims, keep: torch.linalg.vector_norm(x, math.inf, dims, keep),
    "norm -inf": lambda x, dims, keep: torch.linalg.vector_norm(x, -math.inf, dims, keep),
}
ALONG_DIM: dict[str, Op] = {
    "max": lambda x, dim, keep: x.max(dim, keep)[0],
    "min": lambda x, dim, keep: x.min(dim, keep)[0],
    "softmax": lambda x, dim, keep: x.softmax(dim),
    "log_softmax": lambda x, dim, keep: x.log_softmax(dim),
    "cumsum": lambda x, dim, keep: x.cumsum(dim),
}
FULL: dict[str, Op] = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum(),
    "var": lambda x: x.var(correction=0),
    "std": lambda x: x.std(correction=0.5),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "norm": lambda x: x.norm(),
}
WHOLE_NUMBERS: dict[str, Op] = {  # no gradient; equal to the last bit
    "max index": lambda x, dim, keep: x.max(dim, keep)[1],
    "min index": lambda x, dim, keep: x.min(dim, keep)[1],
    "argmax": lambda x, dim, keep: x.argmax(dim, keep),
    "argmin": lambda x, dim, keep: x.argmin(dim, keep),
    "argmax of all": lambda x, dim, keep: x.argmax(),
    "argmin of all": lambda x, dim, keep: x.argmin(),
    "aminmax": lambda x, dim, keep: sum(torch.aminmax(x, dim=dim, keepdim=keep)),  # torch 2.11 has no gradient of it
    "all": lambda x, dim, keep: (x > 0).all(dim, keep),
    "any": lambda x, dim, keep: (x > 1).any(dim, keep),
    "all of all": lambda x, dim, keep: (x > -2).all(),
    "any of all": lambda x, dim, keep: (x > 2).any(),
    "integer cumsum": lambda x, dim, keep: x.round().int().cumsum(dim),
    "integer max": lambda x, dim, keep: x.round().int().max(dim, keep)[0],
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    with maybe_disable_local_tensor_mode():
        return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")  # stock DTensor, for dims of size 1 that it cuts
@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # shrinking takes many minutes here
)
@given(data=st.data())
def test_random_reductions(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2)]))
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    placements = [data.draw(st.sampled_from([Replicate(), Partial(), *map(Shard, range(len(shape)))])) for _ in mesh]
    keep, dim = data.draw(st.booleans()), data.draw(st.integers(-len(shape), len(shape) - 1))
    kind = data.draw(st.sampled_from(["dims", "dim", "full", "whole"]))
    if kind == "dims":
        dims = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=3, unique=True))
        op, args = data.draw(st.sampled_from(sorted(OVER_DIMS))), (dims, keep)
        function = OVER_DIMS[op]
    elif kind == "full":
        op, args = data.draw(st.sampled_from(sorted(FULL))), ()
        function = FULL[op]
    else:
        table = ALONG_DIM if kind == "dim" else WHOLE_NUMBERS
        op, args = data.draw(st.sampled_from(sorted(table))), (dim, keep)
        function = table[op]
    if op in ("std", "std_mean", "var", "norm", "norm 3") and any(n == 1 for n in shape):
        return  # a standard deviation of 0 has no gradient
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        x = random(*shape)
        with maybe_disable_local_tensor_mode():
            x = x.round() if op == "argmax" else x  # ties: the first wins
            x = x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 and data.draw(st.booleans()) else x
        needs_grad = [kind != "whole"]
        memory = data.draw(memories(1))
        assert_parity(lambda x: function(x, *args), [x], devices, [placements], needs_grad=needs_grad, memory=memory)


@pytest.mark.parametrize("shape", [(1, 32, 4, 8), (2, 4, 2, 1), (1, 1, 3, 3), (2, 3, 4, 1, 5), (2, 3, 1), (2, 3, 1, 1)])
@pytest.mark.parametrize("small", [0, 2**13])
def test_sums_of_products_in_any_memory(shape: tuple[int, ...], small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the norms sum up, by a kernel that is not made for this, equals the sums, and nothing beyond the tensors is read."""
    monkeypatch.setattr(norms, "SMALL", small)
    spatial = list(range(2, len(shape)))
    for first, second in itertools.product(MEMORIES.values(), repeat=2):
        x, y = first(random(*shape)), second(random(*shape, seed=1))
        for dims, rows in ((spatial, shape[0]), ([0, *spatial], 1)):
            centers = random(rows, shape[1], *[1] * len(spatial), seed=2)
            for center in (None, centers, Memory(repeated=(0, 1))(centers)):
                found = products(x, y, center, dims)
                a, b = (t.clone(memory_format=torch.contiguous_format) for t in (x, y))
                b = b if center is None else b - center
                expected = torch.stack([a.sum(dims, keepdim=True), (a * b).sum(dims, keepdim=True)])
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_product() -> None:
    """Forward stock DTensor is right: nothing travels, and the result is Partial. Its gradient needs cumprod."""
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        for size in (7, 4):
            for function in (lambda x: x.prod(2), lambda x: x.prod(), lambda x: x.cumprod(2)):
                assert_parity(function, [random(2, 3, size)], mesh, [[Shard(2)]], needs_grad=[False])


def test_ties_and_nans_and_infinities() -> None:
    """The first of equals wins, nan is the largest and the smallest, and rows that are all -inf do as plain torch's."""
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        with maybe_disable_local_tensor_mode():
            ties = torch.tensor([[1.0, 3, 2, 3, 3, 0, 0], [5.0, 5, 5, 5, 5, 5, 5]])
            nans = torch.tensor([[1.0, 3, 2, math.nan, 3, 0, math.nan], [5.0, 5, 5, 5, 5, 5, 5]])
            low = torch.tensor([[1.0, 3, -math.inf, -math.inf, -math.inf, -math.inf, 2.0], [-math.inf] * 7])
        for values in (t.to(DEVICE) for t in (ties, nans, low)):
            for function in (
                lambda x: x.max(1)[0],
                lambda x: x.max(1)[1],
                lambda x: x.min(1)[1],
                lambda x: x.argmax(1),
                lambda x: x.argmax(),
                lambda x: x.argmin(),
                lambda x: x.amax(1),
                lambda x: x.amin(),
                lambda x: x.softmax(1),
                lambda x: x.log_softmax(1),
                lambda x: x.logsumexp(1),
            ):
                with maybe_disable_local_tensor_mode():
                    expected = function(values)
                result = whole(function(shard(values, mesh, [Shard(1)])))
                torch.testing.assert_close(result, expected, rtol=0, atol=1e-6, equal_nan=True)


# What a rank takes part with, forward and backward, for [2, 3, 9] over 3 ranks: names of the collectives and elements.
GATHER, REDUCE = "all_gather_into_tensor", "all_reduce"
TRAFFIC: dict[str, tuple[Op, list[tuple[str, int]], list[tuple[str, int]]]] = {
    "mean": (lambda x: x.mean(2), [], []),
    "mean of all": (lambda x: x.mean(), [(REDUCE, 1)], []),
    "mean keepdim": (lambda x: x.mean(2, keepdim=True), [(REDUCE, 6)], []),
    "sum": (lambda x: x.sum(2), [], []),
    "var": (lambda x: x.var(2), [(GATHER, 2 * 2 * 6)], [(REDUCE, 6)]),
    "std of all": (lambda x: x.std(), [(GATHER, 2 * 2)], [(REDUCE, 1)]),
    "amax": (lambda x: x.amax(2), [(GATHER, 2 * 6)], [(REDUCE, 6)]),
    "max": (lambda x: x.max(), [(GATHER, 2)], [(REDUCE, 1)]),
    "max.dim (bytes)": (lambda x: x.max(2)[0], [(GATHER, 2 * 6 * (8 + 8))], []),
    "argmax (bytes)": (lambda x: x.argmax(2), [(GATHER, 2 * 6 * (8 + 8))], []),
    "logsumexp": (lambda x: x.logsumexp(2), [(GATHER, 2 * 6)], []),
    "softmax": (lambda x: x.softmax(2), [(GATHER, 2 * 2 * 6)], [(REDUCE, 6)]),
    "log_softmax": (lambda x: x.log_softmax(2), [(GATHER, 2 * 2 * 6)], [(REDUCE, 6)]),
    "softmax, other dim": (lambda x: x.softmax(1), [], []),
    "cumsum, other dim": (lambda x: x.cumsum(1), [], []),
    "all": (lambda x: (x > 0).all(2), [(GATHER, 2 * 6)], []),
    "any": (lambda x: (x > 0).any(), [(GATHER, 2)], []),
}


def traffic(function: Op, size: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        x = shard(random(2, 3, size), mesh, [Shard(2)]).requires_grad_()
        with wire() as forward:
            y = function(x)
        backward: list[Any] = []
        if y.requires_grad:
            grad = shard(torch.ones(y.shape).double(), mesh, [p if isinstance(p, Shard) else Replicate() for p in y.placements])
            with wire() as backward:
                y.backward(grad)
        return [(s.name, s.received[0]) for s in forward], [(s.name, s.received[0]) for s in backward]


def test_extrema_of_empty_shards() -> None:
    """Some ranks hold nothing along a dim that stays: they must come through as the others do."""
    with simulated(4):
        x = torch.randn(1, 1, 1, 3, dtype=torch.float64, device=DEVICE)
        assert_parity(lambda x: x.max(3, keepdim=True)[0], [x], init_device_mesh(DEVICE, (2, 2)), [[Shard(2), Shard(3)]])


@pytest.mark.parametrize("name", TRAFFIC)
@pytest.mark.parametrize("size", [9, 7, 4])
def test_only_results_travel(name: str, size: int) -> None:
    """A few numbers per result, however many elements are reduced; the same with uneven and empty shards."""
    function, forward, backward = TRAFFIC[name]
    assert traffic(function, size) == (forward, backward)


def test_norms_are_reduced_by_stock_dtensor() -> None:
    """Nothing but results travels: added up at once in torch 2.15, when they are used in earlier releases."""
    for size in (9, 7, 4):
        forward, backward = traffic(lambda x: torch.linalg.vector_norm(x, 2, 2), size)
        assert {*forward, *backward} == {(REDUCE, 6)} and len(forward + backward) <= 2


def test_cumsum_sends_totals() -> None:
    forward, backward = traffic(lambda x: x.cumsum(2), 9)
    assert forward == [(GATHER, 2 * 6)]
    # flip, cumsum, flip: what changes owner, twice, and the totals
    assert [name for name, _ in backward] == ["all_to_all_single", GATHER, "all_to_all_single"]


def test_one_collective_whatever_the_mesh() -> None:
    with simulated(4):
        mesh = init_device_mesh(DEVICE, (2, 2))
        x = shard(random(2, 5, 6), mesh, [Shard(1), Shard(2)]).requires_grad_()
        for function in (lambda x: x.var((1, 2)), lambda x: x.amax((1, 2)), lambda x: x.argmax()):
            with wire() as sent:
                function(x)
            assert [s.name for s in sent] == [GATHER]


def test_the_gradient_of_a_mean_takes_no_memory() -> None:
    """It is one number, repeated; not a tensor of the global size on every rank."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        for function in (lambda x: x.mean(), lambda x: x.mean((2, 3)).sum(), lambda x: x.abs().mean()):
            x = shard(random(2, 3, 8, 8), mesh, [Shard(3)]).requires_grad_()
            grads: list[torch.Tensor] = []
            y = x * 2
            y.register_hook(grads.append)
            function(y).backward()
            storage = next(iter(grads[0].to_local()._local_tensors.values())).untyped_storage()
            assert storage.nbytes() <= 2 * 3 * 8 * 4 * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype) -> None:
    """Sums are float32's, rounded once; a Partial mean is rounded on each of the two ranks."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        with maybe_disable_local_tensor_mode():
            x = (random(4, 301) + 3).to(dtype)
        for function in (
            lambda x: x.mean(1),
            lambda x: x.mean(1, keepdim=True),
            lambda x: x.var(1),
            lambda x: x.std(1),
            lambda x: x.softmax(1),
            lambda x: x.log_softmax(1),
            lambda x: x.cumsum(1),
            lambda x: x.logsumexp(1),
        ):
            result = function(shard(x, mesh, [Shard(1)]))
            assert result.dtype == dtype
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(whole(result).double(), function(x.double()), rtol=1.5 * eps, atol=0.01 * eps)


def test_variance_keeps_its_digits() -> None:
    """Values near 1e4 with unit variance, in float32: E[x^2] - E[x]^2 would be off by about 8."""
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        with maybe_disable_local_tensor_mode():
            x = (random(4, 1001) + 1e4).float()
        result = whole(shard(x, mesh, [Shard(1)]).var(1))
        torch.testing.assert_close(result.double(), x.double().var(1), rtol=1e-6, atol=0)


def test_in_place_and_out() -> None:
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        x, values = (shard(random(2, 7), mesh, [Shard(1)]) for _ in range(2))
        y = x.cumsum_(1)
        assert y is x
        torch.testing.assert_close(whole(x), whole(values).cumsum(1), rtol=0, atol=1e-12)
        out = shard(random(2), mesh, [Replicate()])
        torch.amax(values, 1, out=out)
        torch.testing.assert_close(whole(out), whole(values).amax(1), rtol=0, atol=0)


def run_on_real_ranks() -> None:
    mesh = init_device_mesh(DEVICE, (3,))
    for size in (9, 7, 2):
        x = torch.randn(2, 3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        sharded = distribute_tensor(x, mesh, [Shard(2)])
        for table in (OVER_DIMS, ALONG_DIM, WHOLE_NUMBERS):
            for name, function in table.items():
                args = ((0, 2), False) if table is OVER_DIMS else (2, False)
                result = function(sharded, *args)
                assert isinstance(result, DTensor)
                torch.testing.assert_close(result.full_tensor(), function(x, *args), rtol=0, atol=1e-10, msg=f"{name} {size}")
                with torch.inference_mode():
                    inferred = function(sharded, *args)
                    torch.testing.assert_close(inferred.full_tensor(), function(x, *args), rtol=0, atol=1e-10)


def test_real_ranks(pool) -> None:
    pool(3).run(run_on_real_ranks)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.norm(p=2, dim=(2, 3), keepdim=True),
        lambda x: x / (1 + x.sum((2, 3), keepdim=True).square()),
        lambda x: (x - x.mean((2, 3), keepdim=True)) / (x.std((2, 3), keepdim=True) + 1e-5),
    ],
    ids=["norm", "sum", "std"],
)
def test_a_result_that_meets_its_input_again_does_not_gather_it(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with simulated(4), torchhalo.strict():
        mesh = init_device_mesh(DEVICE, (2, 2))
        with maybe_disable_local_tensor_mode():
            x = torch.randn(2, 3, 8, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        assert_parity(function, [x], mesh, [[Shard(2), Shard(3)]])


@pytest.mark.parametrize("placement", [Replicate(), Shard(1), Shard(2), Shard(3)])
def test_a_softmax_of_masked_rows(placement: Replicate | Shard) -> None:
    """Rows of which all is masked are zero."""
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        with maybe_disable_local_tensor_mode():
            x, mask = torch.randn(2, 4, 6, 5, dtype=torch.float64), torch.zeros(2, 4, 6, 5, dtype=torch.bool)
            mask[0, 1, :, 2], mask[1, :, :3] = True, True

        def softmax(x: torch.Tensor) -> torch.Tensor:
            hidden = shard(mask, mesh, [placement]) if isinstance(x, DTensor) else mask
            return torch.ops.aten._safe_softmax(x.masked_fill(hidden, -math.inf), 2)

        with torchhalo.strict():
            assert_parity(softmax, [x], mesh, [[placement]])


def test_sums_of_numbers_alone() -> None:
    """`nansum`, and a norm of order one, which is a sum, beside others."""
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        with maybe_disable_local_tensor_mode():
            x = torch.randn(2, 5, 7, dtype=torch.float64)
            x[0, 1, 2] = float("nan")
        for dims in (None, (1,), (0, 2)):
            assert_parity(lambda t, dims=dims: torch.nansum(t, dims), [x], mesh, [[Shard(1)]], atol=1e-12, needs_grad=[False])

        def score(t: torch.Tensor) -> torch.Tensor:
            return torch.linalg.vector_norm(t, ord=1, dim=(0, 2)) + t.sum((0, 2))

        assert_parity(score, [x.nan_to_num()], mesh, [[Shard(2)]], atol=1e-12)
