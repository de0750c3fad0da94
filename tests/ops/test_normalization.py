"""Sharded norms against one process: output, gradients, running statistics, and what travels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from memory import memories
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]
aten = torch.ops.aten


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    with maybe_disable_local_tensor_mode():
        return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def layouts(data: st.DataObject, shape: list[int], mesh: tuple[int, ...]) -> list[Placement]:
    spatial = [Shard(d) for d in range(2, len(shape))]
    return [data.draw(st.sampled_from([Replicate(), Partial(), Shard(0), Shard(1), *spatial, *spatial])) for _ in mesh]


def shapes(data: st.DataObject, least: int = 2) -> list[int]:
    return data.draw(st.lists(st.integers(1, 7), min_size=least, max_size=5 if least < 3 else 4))


def maybe_channels_last(data: st.DataObject, x: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    with maybe_disable_local_tensor_mode():
        return x.contiguous(memory_format=formats[x.ndim]) if x.ndim in formats and data.draw(st.booleans()) else x


def parameters(data: st.DataObject, shape: list[int], mesh: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    kinds = data.draw(st.sampled_from(["both", "both", "weight", "none"]))
    with maybe_disable_local_tensor_mode():
        tensors = [random(*shape, seed=i) + i for i in (1, 2)]
    tensors = {"both": tensors, "weight": [tensors[0], None], "none": [None, None]}[kinds]
    return tensors, [[data.draw(st.sampled_from([Replicate()] * 3 + [Shard(0)])) for _ in mesh] for _ in tensors]


# Not shrunk: that takes many minutes here.
SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


@SETTINGS
@given(data=st.data())
def test_random_batch_norms(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    shape = shapes(data)
    placements = layouts(data, shape, mesh)
    training = data.draw(st.booleans())
    tracked = not training or data.draw(st.booleans())
    if training and math.prod(shape) == shape[1]:
        return
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        x = maybe_channels_last(data, random(*shape))
        tensors, places = parameters(data, [shape[1]], mesh)
        needs_grad = [data.draw(st.booleans()), *(data.draw(st.booleans()) and t is not None for t in tensors)]
        buffers = {DTensor: [], torch.Tensor: []}

        def norm(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
            if not tracked:
                return F.batch_norm(x, None, None, w, b, training=True)
            sharded = isinstance(x, DTensor)
            with maybe_disable_local_tensor_mode():
                stats = [random(shape[1], seed=5), random(shape[1], seed=6).square() + 0.1]
            if sharded:
                where = [data.draw(st.sampled_from([Replicate(), Replicate(), Shard(0)])) for _ in mesh]
                stats = [shard(t, devices, where) for t in stats]
            buffers[DTensor if sharded else torch.Tensor] = stats
            return F.batch_norm(x, *stats, w, b, training=training, momentum=0.3, eps=1e-3)

        result = assert_parity(
            norm, [x, *tensors], devices, [placements, *places], needs_grad=needs_grad, memory=data.draw(memories(3))
        )
        for got, want in zip(buffers[DTensor], buffers[torch.Tensor], strict=True):
            torch.testing.assert_close(whole(got), want, rtol=0, atol=1e-10)
        assert list(result.placements) == [Replicate() if isinstance(p, Partial) else p for p in placements]


@SETTINGS
@given(data=st.data())
def test_random_group_norms(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    shape = shapes(data)
    groups = data.draw(st.integers(1, 4))
    shape[1] = groups * data.draw(st.integers(1, 3))
    if math.prod(shape) == shape[0] * groups:
        return
    placements = layouts(data, shape, mesh)
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        x = maybe_channels_last(data, random(*shape))
        tensors, places = parameters(data, [shape[1]], mesh)
        # plain torch crashes where a channels-last input needs no gradient
        needs_grad = [
            data.draw(st.booleans()) or not x.is_contiguous(),
            *(data.draw(st.booleans()) and t is not None for t in tensors),
        ]
        result = assert_parity(
            lambda x, w, b: F.group_norm(x, groups, w, b),
            [x, *tensors],
            devices,
            [placements, *places],
            needs_grad=needs_grad,
            memory=data.draw(memories(3)),
        )
        assert list(result.placements) == [Replicate() if isinstance(p, Partial) else p for p in placements]


@pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")  # stock DTensor, for dims of size 1 that it cuts
@SETTINGS
@given(data=st.data())
def test_random_layer_norms(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    shape = shapes(data)
    normalised = data.draw(st.integers(1, len(shape)))
    kind = data.draw(st.sampled_from(["layer", "rms", "fused rms"]))
    placements = layouts(data, shape, mesh)
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        x = random(*shape)
        row = shape[len(shape) - normalised :]
        tensors, places = parameters(data, row, mesh)
        needs_grad = [data.draw(st.booleans()), *(data.draw(st.booleans()) and t is not None for t in tensors)]

        def norm(x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
            if kind == "layer":
                return F.layer_norm(x, row, w, b, 1e-3)
            if kind == "rms" or DEVICE == "cpu":
                return F.rms_norm(x, row, w, 1e-3)
            return aten._fused_rms_norm(x, row, w, 1e-3)[0]

        if kind != "layer":
            tensors[1], needs_grad[2] = None, False
        assert_parity(norm, [x, *tensors], devices, [placements, *places], needs_grad=needs_grad, memory=data.draw(memories(3)))


BATCH_NORMS = {
    "native": lambda x, w, b, m, v: aten.native_batch_norm(x, w, b, m, v, True, 0.1, 1e-5),
    "native eval": lambda x, w, b, m, v: aten.native_batch_norm(x, w, b, m, v, False, 0.1, 1e-5),
    "legit": lambda x, w, b, m, v: aten._native_batch_norm_legit(x, w, b, m, v, True, 0.1, 1e-5),
    "legit no stats": lambda x, w, b, m, v: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5),
    "legit functional": lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(x, w, b, m, v, True, 0.1, 1e-5),
    "legit functional eval": lambda x, w, b, m, v: aten._native_batch_norm_legit_functional(x, w, b, m, v, False, 0.1, 1e-5),
    "legit no training": lambda x, w, b, m, v: aten._native_batch_norm_legit_no_training(x, w, b, m, v, 0.1, 1e-5),
    "with update": lambda x, w, b, m, v: aten._batch_norm_with_update(x, w, b, m, v, 0.1, 1e-5),
    "with update functional": lambda x, w, b, m, v: aten._batch_norm_with_update_functional(x, w, b, m, v, 0.1, 1e-5),
    "no update": lambda x, w, b, m, v: aten._batch_norm_no_update(x, w, b, m, v, 0.1, 1e-5),
}


if DEVICE != "cpu":
    del BATCH_NORMS["no update"]  # plain torch 2.11 runs the CPU's kernel


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_every_variant_of_batch_norm(name: str) -> None:
    """All results and buffers of the aten op itself, whatever module, device or compiler it comes from."""
    values = [random(2, 4, 7), random(4, seed=1), random(4, seed=2), random(4, seed=3), random(4, seed=4).square()]
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        for placements in ([Shard(2)], [Shard(1)], [Replicate()]):
            with maybe_disable_local_tensor_mode():
                plain = [v.clone() for v in values]
                expected = BATCH_NORMS[name](*plain)
            sharded = [shard(v, mesh, placements if i == 0 else [Replicate()]) for i, v in enumerate(values)]
            results = BATCH_NORMS[name](*sharded)
            for got, want in zip([*results, *sharded], [*expected, *plain], strict=True):
                assert got.shape == want.shape
                torch.testing.assert_close(whole(got), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["cudnn", "miopen", "with update"])
def test_the_gradients_of_other_devices(name: str) -> None:
    """What only CUDA calls has no kernel to compare with here, but its arguments and results are native batch norm's."""
    x, w, b, g, m, v = (
        random(2, 4, 7),
        *(random(4, seed=i) for i in (1, 2)),
        random(2, 4, 7, seed=3),
        random(4),
        random(4).square(),
    )
    forward = {
        "cudnn": lambda x, w, b, m, v: aten.cudnn_batch_norm(x, w, b, m, v, True, 0.1, 1e-5),
        "miopen": lambda x, w, b, m, v: aten.miopen_batch_norm(x, w, b, m, v, True, 0.1, 1e-5),
        "with update": lambda x, w, b, m, v: aten._batch_norm_with_update(x, w, b, m, v, 0.1, 1e-5),
    }
    backward = {
        "cudnn": lambda x, g, w, m, v, s: aten.cudnn_batch_norm_backward(x, g, w, m, v, s[0], s[1], 1e-5, s[2]),
        "miopen": lambda x, g, w, m, v, s: aten.miopen_batch_norm_backward(x, g, w, m, v, s[0], s[1], 1e-5),
        "with update": lambda x, g, w, m, v, s: aten.batch_norm_backward(
            g, x, w, m, v, s[0], s[1], True, 1e-5, [True] * 3, s[2]
        ),
    }
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        with maybe_disable_local_tensor_mode():
            expected = aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)
            gradients = aten.native_batch_norm_backward(g, x, w, None, None, *expected[1:], True, 1e-5, [True] * 3)
        tensors = [shard(t, mesh, [Shard(2) if t.ndim > 1 else Replicate()]) for t in (x, w, b, m, v)]
        out, *saved = forward[name](*tensors)
        results = backward[name](tensors[0], shard(g, mesh, [Shard(2)]), tensors[1], *tensors[3:], saved)
        for got, want in zip([out, *saved[:2], *results], [*expected, *gradients], strict=True):
            torch.testing.assert_close(whole(got), want, rtol=0, atol=1e-10)


STATISTICS = {  # forward and backward, numbers per rank for an input of [2, 4, 6, 9]
    "batch": (lambda x, p: F.batch_norm(x, None, None, p(4), p(4), training=True), 2 * 4, 2 * 4),
    "group": (lambda x, p: F.group_norm(x, 2, p(4), p(4)), 2 * 2 * 2, 2 * 2 * 2 + 2 * 4),
    "instance": (lambda x, p: F.instance_norm(x), 2 * 2 * 4, 2 * 2 * 4),
    "layer": (lambda x, p: F.layer_norm(x, [6, 9]), 2 * 2 * 4, 2 * 2 * 4),
}


@pytest.mark.parametrize("kind", STATISTICS)
@pytest.mark.parametrize("ranks, placements", [((3,), [Shard(3)]), ((2, 2), [Shard(2), Shard(3)]), ((4,), [Shard(3)])])
def test_only_statistics_travel(kind: str, ranks: tuple[int, ...], placements: list[Placement]) -> None:
    """One gather forward and one all-reduce backward, whatever the number of axes, of two numbers per statistic."""
    norm, forward, backward = STATISTICS[kind]
    size = math.prod(ranks)
    with simulated(size):
        mesh = init_device_mesh(DEVICE, ranks)
        x = shard(random(2, 4, 6, 9), mesh, placements).requires_grad_()
        factors = [shard(random(4), mesh, [Replicate()] * len(ranks)).requires_grad_() for _ in range(2)]
        left = iter(factors)
        grad = shard(random(2, 4, 6, 9, seed=1), mesh, placements)
        with wire() as sent:
            result = norm(x, lambda _: next(left))
        assert sent == [Sent("all_gather_into_tensor", dict.fromkeys(range(size), (size - 1) * forward))]
        with wire() as sent:
            result.backward(grad)
        assert sent == [Sent("all_reduce", dict.fromkeys(range(size), backward))]
        assert all(f.grad is None or f.grad.placements == (Replicate(),) * len(ranks) for f in factors)


def test_nothing_travels_where_nothing_is_shared() -> None:
    """Evaluation; a batch norm with sharded channels; group and layer norm with a sharded batch."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        w = shard(random(4), mesh, [Replicate()]).requires_grad_()
        stats = [shard(random(4).abs(), mesh, [Replicate()]) for _ in range(2)]
        cases = [
            (Shard(3), lambda x: F.batch_norm(x, *stats, w, w), (Partial(),)),
            (Shard(0), lambda x: F.group_norm(x, 2, w, w), (Partial(),)),
            (Shard(0), lambda x: F.layer_norm(x, [4], w, w), (Partial(),)),
            (Shard(2), lambda x: F.layer_norm(x, [4], w, w), (Partial(),)),
            (Shard(1), lambda x: F.batch_norm(x, None, None, training=True), None),
            (Shard(0), F.instance_norm, None),
        ]
        for placement, norm, placements in cases:
            x, w.grad = shard(random(2, 4, 5, 4), mesh, [placement]).requires_grad_(), None
            with wire() as sent:
                result = norm(x)
                result.backward(shard(random(2, 4, 5, 4), mesh, [placement]))
            assert sent == [] and x.grad.placements == (placement,)
            assert placements is None or w.grad.placements == placements


def test_layer_norm_parameters_are_cut_and_joined() -> None:
    """Along a sharded row, two numbers per row and the gradients of weight and bias travel, a rank's parts to all."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        x = shard(random(3, 8), mesh, [Shard(1)]).requires_grad_()
        w, b = (shard(random(8), mesh, [Replicate()]).requires_grad_() for _ in range(2))
        with wire() as sent:
            F.layer_norm(x, [8], w, b).backward(shard(random(3, 8), mesh, [Shard(1)]))
        assert [(s.name, s.received[0]) for s in sent] == [
            ("all_gather_into_tensor", 2 * 3),
            ("all_reduce", 2 * 3),
            ("all_gather_into_tensor", 4),
            ("all_gather_into_tensor", 4),
        ]


def test_local_response_norm() -> None:
    with simulated(4):
        mesh = init_device_mesh(DEVICE, (2, 2))
        assert_parity(lambda x: F.local_response_norm(x, 3), [random(2, 5, 6, 7)], mesh, [[Shard(2), Shard(3)]])


def test_wrong_calls_raise_plain_errors() -> None:
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        x = shard(random(2, 4, 6), mesh, [Shard(2)])
        for call in (
            lambda x: F.batch_norm(x[:1, :, :1], None, None, training=True),
            lambda x: F.group_norm(x, 3),
            lambda x: F.layer_norm(x, [5]),
            lambda x: x.var(3),
            lambda x: x.amax(4),
        ):
            with pytest.raises((ValueError, RuntimeError, IndexError)) as plain, maybe_disable_local_tensor_mode():
                call(random(2, 4, 6))
            with pytest.raises(plain.type) as sharded:
                call(x)
            assert str(sharded.value).splitlines()[0] == str(plain.value).splitlines()[0]
        with pytest.raises(
            RuntimeError, match=r"batch_norm: got mixed torch.Tensor and DTensor.*`running_mean`.*distribute_module"
        ):
            F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double())


def network(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = F.batch_norm(x, m, v, w, b, training=True)
    y = F.group_norm(torch.tanh(y), 2, w, b)
    y = F.instance_norm(torch.relu(y) + y)
    y = F.layer_norm(y, y.shape[2:])
    y = (y * y.softmax(3) + y.cumsum(3)) - y.mean((2, 3), keepdim=True)
    return y.std(3).sum() + y.amax((2, 3)).sum() + y.mean()


def run_compiled(size: int) -> None:
    """Buffers too are eager's."""

    mesh = mesh_of((3,))

    def leaves() -> list[DTensor]:
        values = [random(2, 4, 5, size), *(random(4, seed=i).abs() for i in range(4))]
        places = [[Shard(3)], *[[Replicate()]] * 4]
        return [
            distribute_tensor(t, mesh, p).requires_grad_(i < 3) for i, (t, p) in enumerate(zip(values, places, strict=True))
        ]

    eager, compiled = leaves(), leaves()
    torch._dynamo.reset()
    expected = network(*eager)
    expected.backward()
    result = torch.compile(network, backend="aot_eager", fullgraph=True)(*compiled)
    result.backward()
    torch.testing.assert_close(result.full_tensor(), expected.full_tensor(), rtol=0, atol=1e-9)
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got.full_tensor(), want.full_tensor(), rtol=0, atol=1e-9)
        if want.grad is not None:
            torch.testing.assert_close(got.grad.full_tensor(), want.grad.full_tensor(), rtol=0, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 2])
def test_compiled_norms_equal_eager(pool, size) -> None:
    pool(3).run(run_compiled, size)
