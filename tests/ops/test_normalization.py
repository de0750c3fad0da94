"""Sharded norms against one process: output, gradients, running statistics, and what travels."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from memory import memories
from monai.networks.blocks import SpatialAttentionBlock
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor

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


class ChannelsLastNorm(nn.LayerNorm):
    """Layer norm of the channels of an image, whose output is channels-last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def network_of_norms() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 1), ChannelsLastNorm(4), nn.GroupNorm(1, 4), nn.Conv2d(4, 4, 3, padding=1, groups=4))


def spatial_attention() -> nn.Module:
    return SpatialAttentionBlock(2, 32, norm_num_groups=32)


@pytest.mark.parametrize("make, shape", [(network_of_norms, (1, 2, 24, 11)), (spatial_attention, (1, 32, 8, 8))])
@pytest.mark.parametrize("dim", [2, 3])
def test_views_between_norms(make: Callable[[], nn.Module], shape: tuple[int, ...], dim: int) -> None:
    """Permuted tokens, flattened images and expanded statistics give the norms strides that nobody would choose.

    The kernel that sums up for the norms was given them, was wrong by 0.13, or read beyond its tensors' ends.
    """
    with simulated(2):
        with maybe_disable_local_tensor_mode():
            torch.manual_seed(0)
            model = make().to(DEVICE).double()
        names = [name for name, _ in model.named_parameters()]

        def call(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), x)

        tensors = [random(*shape), *(parameter.detach() for parameter in model.parameters())]
        assert_parity(call, tensors, init_device_mesh(DEVICE, (2,)), [[Shard(dim)], *[[Replicate()]] * len(names)])


class Net(nn.Module):
    """Every norm module, on channels, groups, samples and rows."""

    def __init__(self, size: int, **kwargs: Any):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(4, **kwargs),
            nn.GroupNorm(2, 4),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            nn.SyncBatchNorm(4, **kwargs),
            nn.LayerNorm([size]),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def run_beside_one_process(mesh: DeviceMesh, placements: list[Placement], size: int, steps: int = 2, **kwargs: Any) -> None:
    """Some training steps and an evaluation on this rank: outputs, gradients and buffers are one process's."""
    torch.manual_seed(0)
    plain = Net(size, **kwargs).double()
    sharded = distribute_module(copy.deepcopy(plain), mesh)
    # SyncBatchNorm takes no plain tensor on the CPU; beside one process it is batch norm.
    plain.layers[3] = nn.BatchNorm2d(4, **kwargs).double()
    plain.layers[3].load_state_dict({k: v.full_tensor() for k, v in sharded.layers[3].state_dict().items()})
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, sharded)]
    for step in range(steps + 2):
        if step == steps:
            plain.eval(), sharded.eval()
        x = torch.randn(3, 4, 5, size, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) + 3
        a, b = x.clone().requires_grad_(), distribute_tensor(x, mesh, placements).requires_grad_()
        if step == steps + 1:
            with torch.inference_mode():
                torch.testing.assert_close(sharded(b.detach()).full_tensor(), plain(a.detach()), rtol=0, atol=1e-10)
            break
        expected, result = plain(a), sharded(b)
        assert result.placements == tuple(placements)
        expected.square().mean().backward()
        result.square().mean().backward()
        torch.testing.assert_close(result.full_tensor(), expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=0, atol=1e-9)
        for got, want in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=0, atol=1e-9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for got, want in zip(sharded.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=1e-10)


def run_modules(ranks: tuple[int, ...]) -> None:
    mesh = init_device_mesh(DEVICE, ranks)
    where: list[list[Placement]] = (
        [[Shard(3)], [Shard(2)], [Shard(0)]] if len(ranks) == 1 else [[Shard(2), Shard(3)], [Shard(0), Shard(3)]]
    )
    for placements in where:
        for kwargs in ({}, {"momentum": None}, {"track_running_stats": False}, {"affine": False}):
            run_beside_one_process(mesh, placements, 7, **kwargs)
    run_beside_one_process(mesh, where[0], 2)  # empty shards


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(2,), (3,), (2, 2)])
def test_modules_train_as_in_one_process(pool, ranks) -> None:
    """On real ranks: momentum, cumulative averages, no tracking, no parameters; evaluation and inference mode."""
    pool(math.prod(ranks)).run(run_modules, ranks)


def run_sub_mesh() -> None:
    """Two of three ranks normalise; the third, outside, calls the same ops and holds nothing."""
    mesh = DeviceMesh(DEVICE, [2, 0])
    for norm in (
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.group_norm(x, 2),
        lambda x: F.layer_norm(x, [7]),
        lambda x: x.softmax(2),
        lambda x: x.var(2),
    ):
        x = random(2, 4, 7)
        size = 4 if dist.get_rank() == 2 else 3
        start = 0 if dist.get_rank() == 2 else 4
        local = x[..., start : start + size] if dist.get_rank() != 1 else x.new_empty(0)
        sharded = DTensor.from_local(local, mesh, [Shard(2)], run_check=False, shape=x.shape, stride=x.stride())
        result, expected = norm(sharded), norm(x)
        assert result.shape == expected.shape
        if dist.get_rank() == 1:
            assert result.to_local().numel() == 0
        else:
            part = expected[..., start : start + size] if result.placements == (Shard(2),) else expected
            torch.testing.assert_close(result.to_local(), part, rtol=0, atol=1e-10)


def test_sub_mesh(pool) -> None:
    pool(3).run(run_sub_mesh)


def test_sync_batch_norm_with_ranks_outside_the_mesh(pool) -> None:
    pool(3).run(run_sync_outside)


def run_sync_outside() -> None:
    # Both on all ranks: torch names a process group by how many a rank has seen.
    meshes = DeviceMesh(DEVICE, [0, 1]), DeviceMesh(DEVICE, [2])
    mesh = meshes[dist.get_rank() == 2]
    x = distribute_tensor(torch.randn(2, 3, 4), mesh, [Shard(2)])
    norm = distribute_module(nn.SyncBatchNorm(3), mesh)
    with pytest.raises(RuntimeError, match=r"SyncBatchNorm: its process group must lie in the device mesh.*process_group=mesh"):
        norm(x)
    norm.process_group = mesh.get_group()
    expected = F.batch_norm(x.full_tensor(), None, None, training=True)
    torch.testing.assert_close(norm(x).full_tensor(), expected)
    torch.testing.assert_close(norm.eval()(x).full_tensor(), x.full_tensor() / math.sqrt(1 + 1e-5), rtol=0.2, atol=1.0)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["batch", "group", "layer", "instance"])
def test_a_large_mean_costs_no_digits(kind: str, dtype: torch.dtype) -> None:
    """Of values near 1e4 with unit variance, against float64 with the offset taken away first.

    In float32 E[x^2] - E[x]^2 would be off by about 8; a mean in float32 alone is off by 5e-4, and so is one process's output.
    The gradient is computed from the saved mean, which is one number of the input's dtype.
    """
    norms = {
        "batch": lambda x: F.batch_norm(x, None, None, training=True),
        "group": lambda x: F.group_norm(x, 2),
        "layer": lambda x: F.layer_norm(x, x.shape[1:]),
        "instance": F.instance_norm,
    }
    with simulated(4):
        mesh = init_device_mesh(DEVICE, (2, 2))
        with maybe_disable_local_tensor_mode():
            x, slope = (random(2, 4, 33, 35) + 1e4).to(dtype), torch.arange(35, dtype=torch.float64, device=DEVICE)
            exact = (x.double() - 1e4).requires_grad_()
            expected = norms[kind](exact)
            expected.square().mul(slope).sum().backward()
        sharded = shard(x, mesh, [Shard(2), Shard(3)]).requires_grad_()
        result = norms[kind](sharded)
        result.square().mul(shard(slope.to(dtype), mesh, [Replicate()] * 2)).sum().backward()
        eps = torch.finfo(dtype).eps
        # in float64 there is nothing wider to keep the means in
        atol = 10 * eps if dtype == torch.float32 else 1e4 * eps
        grad_atol = exact.grad.abs().max().item() * 1e4 * eps
        if DEVICE != "cpu" and kind in ("batch", "instance"):  # torch's kernels there keep means in float32, plain ones as well
            with maybe_disable_local_tensor_mode():
                plain = x.clone().requires_grad_()
                plain_result = norms[kind](plain)
                plain_result.square().mul(slope.to(dtype)).sum().backward()
                atol = 1e4 * eps + 2 * (plain_result.detach().double() - expected.detach()).abs().max().item()
                grad_atol += 2 * (plain.grad.double() - exact.grad).abs().max().item()
        torch.testing.assert_close(whole(result).double(), expected.detach(), rtol=10 * eps, atol=atol)
        torch.testing.assert_close(whole(sharded.grad).double(), exact.grad, rtol=0, atol=grad_atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["batch", "group", "layer", "instance", "rms"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_half_types(kind: str, dtype: torch.dtype, offset: float) -> None:
    """Statistics are float32, so that the result is that of float64 for the same input, rounded once."""
    norms = {
        "batch": lambda x, w: F.batch_norm(x, None, None, w, training=True),
        "group": lambda x, w: F.group_norm(x, 2, w),
        "layer": lambda x, w: F.layer_norm(x, x.shape[3:]),
        "instance": lambda x, w: F.instance_norm(x),
        "rms": lambda x, w: F.rms_norm(x, x.shape[3:]),
    }
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        with maybe_disable_local_tensor_mode():
            x, w, g = (random(2, 4, 5, 7) + offset).to(dtype), random(4, seed=1).to(dtype), random(2, 4, 5, 7, seed=2).to(dtype)
            exact = [x.double().requires_grad_(), w.double().requires_grad_()]
            expected = norms[kind](*exact)
            expected.backward(g.double())
        leaves = [shard(x, mesh, [Shard(3)]).requires_grad_(), shard(w, mesh, [Replicate()]).requires_grad_()]
        result = norms[kind](*leaves)
        result.backward(shard(g, mesh, [Shard(3)]))
        assert result.dtype == leaves[0].grad.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(whole(result).double(), expected.detach(), rtol=eps, atol=eps * 0.1 + 1e-5 * offset)
        for got, want in zip(leaves, exact, strict=True):
            if want.grad is not None:
                # each rank's part of a Partial gradient is rounded too
                atol = 2 * eps * want.grad.abs().max().item()
                torch.testing.assert_close(whole(got.grad).double(), want.grad, rtol=2 * eps, atol=atol)


def test_autocast() -> None:
    """A float32 weight and bfloat16 activations, as in mixed precision: the result is bfloat16's, the statistics are not."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        x, w, r = random(2, 4, 5, 7, dtype=torch.bfloat16), random(4, dtype=torch.float32), torch.zeros(4)
        plain, buffer = x.double(), shard(r, mesh, [Replicate()])
        with torch.autocast(DEVICE, torch.bfloat16):
            args = (shard(t, mesh, [Replicate()]) for t in (torch.ones(4), w, w))
            result = F.batch_norm(shard(x, mesh, [Shard(3)]), buffer, *args, training=True)
        assert result.dtype == torch.bfloat16
        expected = F.batch_norm(plain, None, None, w.double(), w.double(), training=True)
        torch.testing.assert_close(whole(result).double(), expected, rtol=0.01, atol=0.01)
        torch.testing.assert_close(whole(buffer).double(), 0.1 * plain.mean((0, 2, 3)), rtol=0, atol=1e-7)


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
