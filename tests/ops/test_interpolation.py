"""Interpolation of a sharded tensor against one process, forward and gradient, and what it sends."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_wire import bound
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from torchhalo.geometry import Span
from torchhalo.ops.interpolation import KINDS
from torchhalo.ops.taps import Taps, counting

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
SCALES = [2, 2, 2, 3, 4, 0.5, 0.25, 1.5, 2.5, 0.7, 1 / 3, 1.3]


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(data=st.data())
def test_random_interpolations(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    ndim = data.draw(st.sampled_from([1, 2, 2, 2, 3]))
    modes = ["nearest", "nearest-exact", LINEAR[ndim]] + ["bicubic", "bilinear+aa", "bicubic+aa"] * (ndim == 2)
    mode, antialias, _ = data.draw(st.sampled_from(modes)).partition("+")
    kwargs: dict[str, Any] = {"mode": mode, "antialias": bool(antialias)}
    if "linear" in mode or mode == "bicubic":
        kwargs["align_corners"] = data.draw(st.booleans())
    shape = [data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4]))]
    shape += [data.draw(st.integers(1, 11)) for _ in range(ndim)]
    if data.draw(st.booleans()):
        kwargs["size"] = [data.draw(st.one_of(st.integers(1, 20), st.just(2 * n))) for n in shape[2:]]
    else:
        usable = [[s for s in SCALES if math.floor(n * s)] for n in shape[2:]]
        kwargs["scale_factor"] = [float(data.draw(st.sampled_from(each))) for each in usable]
        kwargs["recompute_scale_factor"] = data.draw(st.booleans()) and not antialias
    placements = [data.draw(st.sampled_from([Replicate(), Partial(), *map(Shard, range(len(shape)))])) for _ in mesh]
    format = FORMATS[len(shape)] if ndim > 1 and data.draw(st.booleans()) else torch.contiguous_format
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x = torch.randn(shape, dtype=torch.float64, device=DEVICE).contiguous(memory_format=format)
        result = assert_parity(lambda x: F.interpolate(x, **kwargs), [x], devices, [placements])
        assert list(result.placements) == [Replicate() if isinstance(p, Partial) else p for p in placements]


def matrix(
    op: torch._ops.OpOverload, mode: str, inputs: int, outputs: int, scale: float | None, corners: bool, dtype: torch.dtype
):
    """What ``op`` does along its last dim, asked of plain torch: a column per output, of the weights of all inputs."""
    ndim = int(next(c for c in op.name() if c.isdigit()))
    x = torch.eye(inputs, dtype=dtype).view(inputs, *[1] * ndim, inputs)
    rest = [] if mode.startswith("nearest") else [corners]
    return op(x, [1] * (ndim - 1) + [outputs], *rest, *[None] * (ndim - 1), scale).view(inputs, outputs)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.op.name().removeprefix("aten::"))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_taps_are_plain_torchs(kind, dtype: torch.dtype) -> None:
    """Every size from 1 to 9, and some larger and some scale factors, in which a coordinate is nearly a whole number."""
    cases: list[tuple[int, int, float | None]] = [(n, m, None) for n in range(1, 10) for m in range(1, 10)]
    cases += [(41, 123, None), (37, 259, None), (100, 7, None), (49, 343, None), (93, 62, None), (90, 150, None)]
    cases += [
        (n, math.floor(n * s), s) for n in (5, 6, 31, 70) for s in (2.1, 0.3, 1 / 3, 0.7, 1.3, 2.0, 3.0, 1.004, 3.1115243)
    ]
    for inputs, outputs, scale in cases:
        for corners in [False] if kind.nearest else [False, True]:
            want = matrix(kind.op, kind.mode, inputs, outputs, scale, corners, dtype).double()
            ndim = int(next(c for c in kind.op.name() if c.isdigit()))
            plain = DEVICE != "cpu" or (ndim == 2 and outputs + 1 <= 128)  # a CPU has another kernel for large outputs
            single = dtype == torch.float32 or (kind.nearest and plain)
            sizes = [1] * (ndim - 1)
            counted = counting(
                kind.mode, [*sizes, inputs], [*sizes, outputs], [*[None] * (ndim - 1), scale], plain, DEVICE == "cpu"
            )[-1]
            taps = Taps(inputs, outputs, kind.mode, corners, counted, single, plain)
            got = torch.zeros_like(want)
            for reads, weights in taps.table(Span(0, outputs)):
                got[reads, range(outputs)] += torch.tensor(weights, dtype=torch.float64)
            # torch computes the weights in the tensor's dtype, by polynomials of a few terms, from coordinates that some of
            # its builds round twice
            atol = 0 if kind.nearest else 1e-12 if dtype == torch.float64 else 2e-6 + inputs * 2**-23
            torch.testing.assert_close(got, want, rtol=0, atol=atol, msg=f"{inputs, outputs, scale, corners}")


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("factors", [(1.004, 1.3), (1.3, 1.004), (2.0, 1.004), (1.004, 1.004)], ids=str)
def test_a_size_that_stays_while_the_scale_factor_says_otherwise(mode: str, factors: tuple[float, float]) -> None:
    """Whether the factor counts then depends on the device and, on CUDA, on the other size.

    Some of torch's gradients go by the sizes where its forward heeds the factor, or the other way round.
    """
    wrong = mode == "bicubic" and factors[0] == factors[1] if DEVICE == "cpu" else mode.startswith("nearest")
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        for dim in (2, 3):
            x = torch.randn(1, 2, 6, 5, dtype=torch.float64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a default that changed
                resize = partial(F.interpolate, scale_factor=factors, mode=mode)
                assert_parity(resize, [x], mesh, [[Shard(dim)]], atol=1e-12, needs_grad=[not wrong])


def test_whole_ratios() -> None:
    """Where plain torch's own kernel does the work on a sharded dim."""

    def ratio(inputs: int, outputs: int, mode: str, scale: float | None = None, corners: bool = False) -> int | None:
        return Taps(inputs, outputs, mode, corners, scale, single=True).ratio

    assert ratio(5, 10, "linear") == ratio(5, 10, "nearest") == ratio(5, 10, "linear", 2.0) == ratio(5, 10, "bicubic_aa") == 2
    assert ratio(5, 15, "nearest") == ratio(5, 15, "nearest_exact", 3.0) == 3
    assert ratio(5, 15, "linear") is None  # a third is rounded, and more so far from the origin
    assert ratio(5, 10, "linear", corners=True) is None
    assert ratio(5, 10, "linear", 2.1) is ratio(5, 11, "nearest") is ratio(10, 5, "linear") is None


CALLS = {
    "nearest x2": {"mode": "nearest", "scale_factor": 2},
    "nearest /2": {"mode": "nearest", "scale_factor": 0.5},
    "nearest to 31": {"mode": "nearest-exact", "size": 31},
    "linear x2": {"mode": "bilinear", "scale_factor": 2},
    "linear to 31": {"mode": "bilinear", "size": 31},
    "linear corners": {"mode": "bilinear", "scale_factor": 2, "align_corners": True},
    "cubic x2": {"mode": "bicubic", "scale_factor": 2},
    "cubic to 17": {"mode": "bicubic", "size": 17},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mesh, size", [((2,), 24), ((3,), 23), ((2, 2), 22)])
def test_only_halos_travel(name: str, mesh: tuple[int, ...], size: int) -> None:
    """What a rank receives is what its outputs read and it does not own; in the backward, what the others read of its own."""
    kwargs = CALLS[name]
    dims = [3] if len(mesh) == 1 else [2, 3]
    with maybe_disable_local_tensor_mode():
        eye = torch.eye(size).view(size, 1, 1, size).expand(-1, -1, size if len(mesh) == 2 else 2, -1).contiguous()
        table = F.interpolate(eye, **kwargs)[:, 0, 0]
        reads = [set(column.nonzero()[:, 0].tolist()) for column in table.T]
    least = bound([reads] * len(mesh), [size] * len(mesh), mesh)
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        rows = size if len(mesh) == 2 else 2
        x = shard(torch.randn(2, 3, rows, size), devices, [Shard(dim) for dim in dims]).requires_grad_()
        with wire() as sent:
            y = F.interpolate(x, **kwargs)
        grad = torch.ones_like(y)
        with wire() as back:
            y.backward(grad)
    each = 2 * 3 * rows if len(mesh) == 1 else 2 * 3
    for collectives in (sent, back):
        assert [c.name for c in collectives] == ["all_to_all_single"] * bool(sum(least))
    if sum(least):
        assert [sent[0].received[rank] for rank in range(len(least))] == [n * each for n in least]
        assert sum(back[0].received.values()) == sum(least) * each


def test_two_times_nearest_sends_nothing() -> None:
    with simulated(4):
        x = shard(torch.randn(1, 2, 16, 8), init_device_mesh(DEVICE, (2, 2)), [Shard(2), Shard(3)]).requires_grad_()
        with wire() as sent:
            y = F.interpolate(x, scale_factor=2)
            y.backward(torch.ones_like(y))
    assert not sent


@pytest.mark.parametrize("kwargs", [{"scale_factor": 2}, {"size": (9, 13)}], ids=["by two", "to a size"])
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(mode: str, kwargs: dict, dtype: torch.dtype) -> None:
    """Against float64: results are rounded once or, as plain torch's, once per dim; gradients once more where folded."""
    x = torch.randn(2, 3, 7, 10).to(dtype)
    wide = x.double().requires_grad_()
    expected = F.interpolate(wide, mode=mode, **kwargs)
    grad = torch.randn(expected.shape).to(dtype)
    expected.backward(grad.double())
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        sharded = shard(x, mesh, [Shard(3)]).requires_grad_()
        result = F.interpolate(sharded, mode=mode, **kwargs)
        result.backward(shard(grad, mesh, [Shard(3)]))
        assert result.dtype == sharded.grad.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(whole(result).double(), expected.detach(), rtol=2 * eps, atol=4 * eps)
        torch.testing.assert_close(whole(sharded.grad).double(), wide.grad, rtol=4 * eps, atol=16 * eps)


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_bytes(mode: str) -> None:
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        with maybe_disable_local_tensor_mode():
            x = torch.randint(0, 256, (1, 3, 8, 10), dtype=torch.uint8)
        sharded = shard(x, mesh, [Shard(3)])
        if mode == "bilinear" and DEVICE != "cpu":  # CUDA has no kernel for them
            for t in (x, sharded):
                with pytest.raises(NotImplementedError):
                    F.interpolate(t, scale_factor=2, mode=mode)
            return
        with maybe_disable_local_tensor_mode():
            expected = F.interpolate(x, scale_factor=2, mode=mode)
        assert torch.equal(whole(F.interpolate(sharded, scale_factor=2, mode=mode)), expected)
        if mode == "bilinear":
            with pytest.raises(NotImplementedError, match="convert it to a floating dtype"):
                F.interpolate(sharded, size=(8, 13), mode=mode)


@pytest.mark.parametrize("size", [(0, 4), (4,), (-1, 3)])
def test_errors_come_before_anything_is_sent(size: tuple[int, ...]) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.upsample_bilinear2d(x, size, False)

    with simulated(2):
        with maybe_disable_local_tensor_mode(), pytest.raises(RuntimeError):
            call(torch.randn(1, 1, 4, 4))
        x = shard(torch.randn(1, 1, 4, 4), init_device_mesh(DEVICE, (2,)), [Shard(2)])
        with wire() as sent, pytest.raises(RuntimeError):
            call(x)
    assert not sent


def resized(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(F.interpolate(x, scale_factor=2, mode="nearest"))
    y = torch.tanh(F.interpolate(y, size=(9, 13), mode="bilinear", align_corners=True))
    return F.interpolate(y, scale_factor=2, mode="bicubic")


def train(compiled: bool) -> None:
    x = torch.randn(1, 2, 5, 7, dtype=torch.float64)
    plain = x.clone().requires_grad_()
    resized(plain).square().sum().backward()
    sharded = distribute_tensor(x, mesh_of((3,)), [Shard(3)]).requires_grad_()
    function = torch.compile(resized, backend="aot_eager", fullgraph=True) if compiled else resized
    function(sharded).square().sum().backward()
    torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("size, output", [((2, 3), (4, 2)), ((2, 1), (5, 3)), ((5, 4), (2, 5))])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiasing_of_shards_of_one_column(mode: str, size: tuple[int, int], output: tuple[int, int]) -> None:
    """Torch's kernel on a CPU repeats the first row of an image of one column; a shard of one column must not."""
    with simulated(2):
        x = torch.randn(2, 3, *size, dtype=torch.float64, device=DEVICE)
        function = partial(F.interpolate, size=output, mode=mode, antialias=True)
        assert_parity(function, [x], init_device_mesh(DEVICE, (2,)), [[Shard(3)]])


@pytest.mark.parametrize("compiled", [False, True])
def test_on_processes(pool, compiled: bool) -> None:
    pool(3).run(train, compiled)


def infer() -> None:
    """On a mesh that leaves rank 0 out, where ops arrive in their composite form."""
    mesh = DeviceMesh(DEVICE, [1, 2])
    x = torch.randn(1, 2, 5, 7, dtype=torch.float64)
    with torch.inference_mode():
        result = resized(distribute_tensor(x, mesh, [Shard(2)]))
        if mesh.get_coordinate() is not None:
            torch.testing.assert_close(result.full_tensor(), resized(x), rtol=0, atol=1e-10)


def test_inference_on_a_submesh(pool) -> None:
    pool(3).run(infer)
