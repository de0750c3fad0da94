"""Sharded pooling against one process: values, indices to the bit, gradients; simulated ranks and real ones; what is sent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from harness import DEVICE, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import torchhalo
from torchhalo.exchange import parts
from torchhalo.geometry import Span
from torchhalo.ops.adaptive_pooling import Bins

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]
ATOL = 1e-12  # a few terms of size one are added, perhaps in another order


class Case(NamedTuple):
    """One random pool."""

    name: str
    mesh: tuple[int, ...]
    placements: list[Placement]
    shape: tuple[int, ...]
    parameters: dict[str, Any]
    values: str
    channels_last: bool

    def input(self, device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.shape, dtype=torch.float64, generator=generator)
        if self.values == "ties":
            x = x.round()
        if self.values == "infinite":
            x = torch.where(x < 0.7, float("-inf"), x)
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        # Of a window of nothing but -inf torch's channels-last CUDA kernel gives the index 0, and drops its gradient.
        last = self.channels_last and (device == "cpu" or self.values != "infinite")
        format = formats.get(x.ndim, torch.contiguous_format) if last else torch.contiguous_format
        return x.contiguous(memory_format=format).to(device)

    def check(self, device: str = "cpu") -> None:
        mesh = init_device_mesh(device, self.mesh)
        with maybe_disable_local_tensor_mode():
            x = self.input(device)
        indices: list[torch.Tensor] = []

        def function(x: torch.Tensor) -> torch.Tensor:
            out = getattr(F, self.name)(x, **self.parameters)
            if isinstance(out, tuple):
                indices.append(out[1])
            return out[0] if isinstance(out, tuple) else out

        result = assert_parity(function, [x], mesh, [self.placements], atol=ATOL)
        if indices:
            plain, sharded = indices
            assert sharded.stride() == plain.stride()
            assert torch.equal(whole(sharded), plain)
        if all(n > 1 for n in result.shape):  # a dim of size one may be anywhere after `squeeze`
            assert list(result.placements) == [Replicate() if isinstance(p, Partial) else p for p in self.placements]


@st.composite
def layouts(draw: st.DrawFn, ndim: int, batched: bool) -> tuple[tuple[int, ...], list[Placement]]:
    mesh = draw(st.sampled_from(MESHES))
    space = [Shard(d) for d in range(1 + batched, 1 + batched + ndim)]
    anywhere = [Replicate(), Partial(), *[Shard(d) for d in range(1 + batched)], *space * 3]
    return mesh, [draw(st.sampled_from(anywhere)) for _ in mesh]


@st.composite
def pools(draw: st.DrawFn) -> Case:
    ndim, kind = draw(st.integers(1, 3)), draw(st.sampled_from(["max", "max", "avg", "avg", "lp"]))
    batched = draw(st.booleans())
    each = st.lists(st.integers(1, 4 if ndim < 3 else 3), min_size=ndim, max_size=ndim)
    kernel, stride = draw(each), draw(each)
    padding = [draw(st.integers(0, k // 2)) for k in kernel] if kind != "lp" else [0] * ndim
    dilation = draw(st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim)) if kind == "max" else [1] * ndim
    # A dilation above the size may step over the whole input: refused, and tested below.
    least = [max(1, d * (k - 1) + 1 - 2 * p, d) for k, p, d in zip(kernel, padding, dilation, strict=True)]
    if kind != "max" and ndim == 3:
        least = [max(n, k) for n, k in zip(least, kernel, strict=True)]  # as torch's averages in 3-d want it
    sizes = [n + draw(st.integers(0, 12 if ndim < 3 else 5)) for n in least]
    parameters: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "ceil_mode": draw(st.booleans())}
    if kind != "lp":
        parameters["padding"] = padding
    if kind == "max":
        parameters |= {"dilation": dilation, "return_indices": True}
    elif kind == "avg":
        parameters["count_include_pad"] = draw(st.booleans())
        if ndim > 1:
            parameters["divisor_override"] = draw(st.sampled_from([None, None, 3]))
    elif ndim == 1:
        parameters |= {"norm_type": 2.0, "kernel_size": kernel[0], "stride": stride[0]}
    else:
        parameters["norm_type"] = 2.0
    mesh, placements = draw(layouts(ndim, batched))
    values = draw(st.sampled_from(["any", "ties", "infinite"])) if kind == "max" and Partial() not in placements else "any"
    shape = (*([draw(st.integers(1, 3))] if batched else []), draw(st.integers(1, 3)), *sizes)
    return Case(f"{kind}_pool{ndim}d", mesh, placements, shape, parameters, values, draw(st.booleans()))


@st.composite
def adaptive_pools(draw: st.DrawFn) -> Case:
    ndim, kind = draw(st.integers(1, 3)), draw(st.sampled_from(["max", "avg"]))
    batched = draw(st.booleans())
    sizes = draw(st.lists(st.integers(1, 13 if ndim < 3 else 7), min_size=ndim, max_size=ndim))
    output = [draw(st.integers(1, n) | st.integers(1, 20 if ndim < 3 else 9)) for n in sizes]
    if kind == "avg" and set(output) == {1}:
        output[-1] = 2  # else torch takes the mean
    parameters: dict[str, Any] = {"output_size": output if ndim > 1 else output[0]}
    if kind == "max":
        parameters["return_indices"] = True
    mesh, placements = draw(layouts(ndim, batched))
    values = draw(st.sampled_from(["any", "ties", "infinite"])) if kind == "max" and Partial() not in placements else "any"
    shape = (*([draw(st.integers(1, 3))] if batched else []), draw(st.integers(1, 3)), *sizes)
    return Case(f"adaptive_{kind}_pool{ndim}d", mesh, placements, shape, parameters, values, draw(st.booleans()))


@settings(max_examples=90, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=pools())
def test_random_pools(case: Case) -> None:
    with simulated(math.prod(case.mesh)):
        case.check(DEVICE)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=adaptive_pools())
def test_random_adaptive_pools(case: Case) -> None:
    with simulated(math.prod(case.mesh)):
        case.check(DEVICE)


def check_all(cases: list[Case]) -> None:
    for case in cases:
        try:
            case.check()
        except BaseException:
            print(case)
            raise


@pytest.mark.parametrize("ranks", [3, 4])
def test_random_pools_on_gloo(pool, ranks: int) -> None:
    found: list[Case] = []

    @settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=(pools() | adaptive_pools()).filter(lambda case: math.prod(case.mesh) == ranks))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    pool(ranks).run(check_all, found)


@pytest.mark.parametrize("inputs, outputs", list(itertools.product([1, 2, 5, 7, 12], [1, 2, 3, 4, 5, 7, 9, 24])))
def test_bins_are_those_of_torch(inputs: int, outputs: int) -> None:
    """What each output reads, by asking torch; and no bin is wider than the width that is made for all."""
    bins = Bins(inputs, outputs)
    reads = [row.nonzero()[:, 0].tolist() for row in F.adaptive_avg_pool1d(torch.eye(inputs), outputs).T]
    assert [list(range(*bins.interval(o)[:2])) for o in range(outputs)] == reads
    assert max(map(len, reads)) == bins.width
    assert all(bins.reads(Span(o, outputs)) == (Span(reads[o][0], inputs),) for o in range(outputs))


@pytest.mark.parametrize(
    "pool", [lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), lambda x: F.adaptive_max_pool2d(x, (5, 4), True)]
)
@pytest.mark.parametrize("placements", [[Shard(2), Shard(3)], [Shard(3), Shard(3)]])
def test_nan_as_torch_has_it(pool: Callable[..., tuple[torch.Tensor, ...]], placements: list[Placement]) -> None:
    x = torch.randn(2, 3, 11, 13, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[x > 1] = float("nan")
    expected, expected_indices = pool(x)
    with simulated(4):
        values, indices = pool(shard(x, init_device_mesh(DEVICE, (2, 2)), placements))
        assert torch.equal(whole(values.nan_to_num(7.0)), expected.nan_to_num(7.0))
        assert torch.equal(whole(indices), expected_indices)


def test_dilation_that_steps_over_the_input() -> None:
    """Such a window reads nothing: the lowest value, as torch gives, but no gradient, which torch writes out of bounds."""
    x = torch.randn(1, 2, 2)
    expected = F.max_pool1d(x, 2, 1, 1, 3, return_indices=True)
    with simulated(2):
        sharded = shard(x, init_device_mesh(DEVICE, (2,)), [Shard(2)]).requires_grad_()
        values, indices = F.max_pool1d(sharded, 2, 1, 1, 3, return_indices=True)
        assert torch.equal(whole(values), expected[0]) and torch.equal(whole(indices), expected[1])
        with pytest.raises(NotImplementedError, match=r"dilation \(=3\) may step over all 2 elements of dim 3"):
            values.backward(shard(torch.ones(1, 2, 1), values.device_mesh, [Replicate()]))


# The wire.


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("name", ["max_pool3d", "avg_pool3d"])
def test_channels_last_in_3d(name: str, in_parts: bool) -> None:
    """Some of torch's kernels there write the gradient as if it were contiguous, whatever they are given to write to."""
    with simulated(3), parts.in_parts(in_parts):
        mesh = init_device_mesh(DEVICE, (3,))
        with maybe_disable_local_tensor_mode():
            x = torch.randn(2, 3, 6, 12, 18, dtype=torch.float64, device=DEVICE).contiguous(
                memory_format=torch.channels_last_3d
            )
        for dim, window in itertools.product((2, 3, 4), ((2, 2, 0), (3, 2, 1))):
            assert_parity(lambda x, w=window: getattr(F, name)(x, *w), [x], mesh, [[Shard(dim)]], atol=ATOL)


# Dtypes, modes, meshes, errors.

SOME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "avg": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "avg edges": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (4, 5)),
    "adaptive avg": lambda x: F.adaptive_avg_pool2d(x, (4, 5)),
}


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype, name: str) -> None:
    """A result is rounded once; a gradient is a sum of up to nine terms near one, which torch may round after each."""
    steps = 2 if dtype == torch.float32 else 8
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        with maybe_disable_local_tensor_mode():
            x = torch.randn(2, 4, 7, 10, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
        for placement in (Shard(2), Shard(3)):
            assert_parity(SOME[name], [x], mesh, [[placement]], atol=4 * steps * torch.finfo(dtype).eps)


def test_half_types_do_not_overflow() -> None:
    """Sums of float16 beyond its range whose average is within."""
    x = torch.full((1, 1, 4, 9), 4e4, dtype=torch.float16)
    with simulated(3):
        sharded = shard(x, init_device_mesh(DEVICE, (3,)), [Shard(3)])
        for name in ("avg edges", "adaptive avg"):
            assert torch.equal(whole(SOME[name](sharded)), SOME[name](x))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_integers(dtype: torch.dtype) -> None:
    x = torch.randint(0 if dtype == torch.uint8 else -9, 9, (2, 3, 8, 9), generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0] = torch.iinfo(dtype).min
    with simulated(3):
        sharded = shard(x, init_device_mesh(DEVICE, (3,)), [Shard(3)])
        if DEVICE != "cpu":  # CUDA has no kernels for them
            for t in (x, sharded):
                with pytest.raises(NotImplementedError, match="not implemented for"):
                    F.max_pool2d(t, 3, 2, 1, return_indices=True)
            return
        got, want = (F.max_pool2d(t, 3, 2, 1, return_indices=True) for t in (sharded, x))
        assert torch.equal(whole(got[0]), want[0]) and torch.equal(whole(got[1]), want[1])
        x[0] = 5
        if dtype == torch.int64:
            sharded = shard(x, sharded.device_mesh, [Shard(3)])
            assert torch.equal(whole(SOME["avg"](sharded)), SOME["avg"](x))
            assert torch.equal(whole(SOME["avg edges"](sharded)), SOME["avg edges"](x))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_inference(guard: Callable[[], Any]) -> None:
    """Composite ops reach DTensor as they are; they stay sharded."""
    x = torch.randn(2, 3, 7, 6, 9, dtype=torch.float64)
    with simulated(3), guard(), torchhalo.strict():
        mesh = init_device_mesh(DEVICE, (3,))
        for ndim in (1, 2, 3):
            plain = x.flatten(0, 3 - ndim)
            sharded = shard(plain, mesh, [Shard(plain.ndim - 1)])
            for name, args in (("max", (3, 2, 1)), ("avg", (3, 2, 1)), ("adaptive_max", (5,)), ("adaptive_avg", (5,))):
                pool = getattr(F, f"{name}_pool{ndim}d")
                result = pool(sharded, *args)
                assert result.placements == (Shard(plain.ndim - 1),)
                torch.testing.assert_close(whole(result), pool(plain, *args), rtol=0, atol=ATOL)
            got, want = (getattr(F, f"max_pool{ndim}d")(t, 3, 2, 1, return_indices=True)[1] for t in (sharded, plain))
            assert torch.equal(whole(got), want)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.max_pool2d(x, 9),
        lambda x: F.max_pool2d(x, 2, padding=2),
        lambda x: F.avg_pool2d(x, 9),
        lambda x: F.avg_pool2d(x, 2, divisor_override=0),
        lambda x: F.avg_pool3d(x, 3, padding=1),
        lambda x: F.avg_pool2d(x.int(), 2),
        lambda x: F.adaptive_max_pool2d(x.long(), 2),
        lambda x: F.adaptive_avg_pool2d(x.long(), 2),
        lambda x: F.max_pool2d(x.bool(), 2),
        pytest.param(
            lambda x: F.max_pool3d(x[0, 0], 2),
            marks=pytest.mark.skipif(DEVICE != "cpu", reason="CUDA's kernel looks for a fourth dim before it counts them"),
        ),
        lambda x: torch.ops.aten.max_unpool2d(x, x.long(), [3]),
    ],
)
def test_errors_are_those_of_torch(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(1, 2, 4, 5)
    with pytest.raises((RuntimeError, NotImplementedError)) as expected:
        call(x)
    with simulated(3):
        sharded = shard(x, init_device_mesh(DEVICE, (3,)), [Shard(3)])
        with wire() as sent, pytest.raises(type(expected.value)) as raised:
            call(sharded)
    assert str(raised.value) == str(expected.value) and sent == []


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool2d, F.adaptive_max_pool2d])
def test_nothing_to_pool(pool: Callable[..., torch.Tensor]) -> None:
    """No images, and no outputs."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        for shape, output, has_gradient in (((0, 3, 6, 5), (2, 3), True), ((2, 3, 6, 5), (2, 0), False)):
            with maybe_disable_local_tensor_mode():
                x = torch.randn(shape, dtype=torch.float64)
            assert_parity(lambda x, output=output: pool(x, output), [x], mesh, [[Shard(3)]], needs_grad=[has_gradient])


def check_sub_mesh() -> None:
    """A mesh over ranks 1 and 3 of 4, and a row of a two-axis mesh: the other ranks do not take part."""
    x = torch.randn(2, 3, 9, 11, dtype=torch.float64)

    def unpool(x: torch.Tensor) -> torch.Tensor:
        return F.max_unpool2d(*F.max_pool2d(x, 3, 2, return_indices=True), 3, 2, output_size=(9, 11))

    some = DeviceMesh(DEVICE, [1, 3])
    both = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "space"))
    for function in (*SOME.values(), unpool):
        if dist.get_rank() in (1, 3):
            assert_parity(function, [x], some, [[Shard(3)]])
        else:
            assert function(distribute_tensor(x, some, [Shard(3)])).shape == function(x).shape
        assert_parity(function, [x], both["space"], [[Shard(2)]])
        assert_parity(function, [x], both, [[Shard(0), Shard(2)]])
        assert_parity(function, [x], both, [[Shard(3), Shard(3)]])


def test_sub_meshes(pool) -> None:
    pool(4).run(check_sub_mesh)


# torch.compile.


def network(x: torch.Tensor) -> torch.Tensor:
    y = F.max_pool2d(x, 3, 1, 1)
    y = F.avg_pool2d(y * y, 3, 2, 1, count_include_pad=False)
    y = F.adaptive_avg_pool2d(torch.tanh(y), (5, 4))
    return F.adaptive_max_pool2d(y * y, (2, 3)).sum()


def check_compiled(size: int) -> list[list[str]]:
    """Eager's numbers; the collectives of this rank's forward and backward graphs."""
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append([str(n.target) for n in graph.graph.nodes if "_c10d_functional" in str(n.target)])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    x = torch.randn(2, 3, 6, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    watched = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    for compiler in (None, "aot_eager", watched):
        leaf = distribute_tensor(x, mesh_of((3,)), [Shard(3)]).requires_grad_()
        result = (network if compiler is None else torch.compile(network, backend=compiler, fullgraph=True))(leaf)
        result.backward()
        assert isinstance(leaf.grad, DTensor)
        seen.append((result.full_tensor().detach(), leaf.grad.full_tensor()))
    for got in seen[1:]:
        torch.testing.assert_close(got, seen[0], rtol=0, atol=ATOL)
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize("size, exchanges", [(11, 4), (4, 3)])  # of two columns four are made without a halo
def test_compiled(pool, size: int, exchanges: int) -> None:
    graphs = pool(3).run(check_compiled, size)
    assert all(other == graphs[0] for other in graphs), graphs
    assert [sum("all_to_all" in name for name in graph) for graph in graphs[0]] == [exchanges] * 2, graphs[0]
