"""Group norm by Triton's kernels: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, shard, simulated, whole
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from interpreted import interpret
from torch import nn
from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

import torchhalo
from torchhalo.exchange.memory import strides
from torchhalo.geometry import Span
from torchhalo.kernels import group_norm
from torchhalo.kernels.group_norm import Groups
from torchhalo.ops.statistics import shares

SETTINGS: dict[str, Any] = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}
SETTINGS["phases"] = [Phase.explicit, Phase.generate]  # shrinking would take minutes
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
KERNELS = [group_norm.statistics, group_norm.normalize, group_norm.products, group_norm.input_gradient]
CALLS: list[str] = []


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve any tensor, in blocks so small that there are several; `CALLS` tells which were called."""
    interpret(monkeypatch, group_norm)
    usable = group_norm.usable
    monkeypatch.setattr(group_norm, "usable", lambda x: isinstance(x, LocalTensor) or usable(x))
    monkeypatch.setattr(group_norm, "TILE", 16)
    monkeypatch.setattr(group_norm, "PROGRAMS", 6)
    monkeypatch.setattr(group_norm, "MERGED", 8)
    CALLS.clear()
    for each in KERNELS:

        def counted(*args: Any, kernel: Callable[..., Any] = each) -> Any:
            CALLS.append(kernel.__name__)
            return kernel(*args)

        monkeypatch.setattr(group_norm, each.__name__, counted)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    with maybe_disable_local_tensor_mode():
        return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.slow
@settings(max_examples=25, **SETTINGS)
@given(data=st.data())
def test_random_shards(data: st.DataObject) -> None:
    """Both passes each way, of ranks that own some of the channels, against one process in float64."""
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    groups, size = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    shape = draw(st.integers(1, 3)), groups * size, *draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    last = draw(st.booleans()) and len(shape) in FORMATS
    format = FORMATS[len(shape)] if last else torch.contiguous_format
    offset, spread = draw(st.sampled_from([(0.0, 1.0), (3.0, 0.5), (1000.0, 1.0), (1e4, 0.01)]))
    if dtype in (torch.bfloat16, torch.float16):
        offset = min(offset, 3.0)
    if math.prod(shape[1:]) == groups:
        return
    x = (random(*shape) * spread + offset).to(dtype)
    other = draw(st.sampled_from([dtype, torch.float32]))  # of the parameters, the output and its gradient
    w, b = (random(shape[1], seed=seed).to(other) for seed in (1, 2))
    grad, eps = random(*shape, seed=3).to(other), 1e-5
    exact = [tensor.double().requires_grad_() for tensor in (x, w, b)]
    exact[0] = (x.double() - offset).requires_grad_()
    expected = F.group_norm(exact[0], groups, exact[1], exact[2], eps)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    weight, bias = (None, None) if draw(st.booleans()) else (w, b)
    if weight is None:
        expected = F.group_norm(exact[0], groups, eps=eps)
        wanted = (*torch.autograd.grad(expected, exact[0], grad.double()), *wanted[1:])
    cuts = [0, *sorted(draw(st.lists(st.integers(0, shape[1]), max_size=2))), shape[1]]
    places = [Groups(Span(start, stop), size, groups) for start, stop in itertools.pairwise(cuts)]

    def part(tensor: torch.Tensor | None, place: Groups) -> Any:
        if tensor is None:
            return None
        if tensor.ndim == 1:
            return tensor[place.channels.start : place.channels.stop]
        found = tensor[:, place.channels.start : place.channels.stop].contiguous(memory_format=format)
        return found.as_strided(found.shape, strides(found.shape, format))

    parts = torch.stack([group_norm.statistics(part(x, place), place) for place in places])
    lengths = tuple(place.lengths() for place in places)
    share = shares(lengths) if len(places) > 1 else (1.0,)
    outs, sums = [], torch.zeros(())
    for place in places:
        factors = part(weight, place), part(bias, place)
        out, mean, rstd = group_norm.normalize(part(x, place), parts, share, *factors, eps, place, other)
        assert out.dtype == other and out.stride() == part(x, place).stride()
        outs.append(out)
        sums = sums + group_norm.products(part(grad, place), part(x, place), mean, rstd, factors[0], place)
    members = math.prod(shape[1:]) // groups
    grads = []
    for place in places:
        few = mean, rstd, part(weight, place), sums, members, place
        grads.append(group_norm.input_gradient(part(grad, place), part(x, place), *few))
        assert grads[-1].dtype == dtype and grads[-1].stride() == part(x, place).stride()
    of_bias, of_weight = sums[-2 * shape[1] :].double().view(2, -1)
    assert mean.dtype == rstd.dtype == sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    ulp = torch.finfo(mean.dtype).eps * 100 * max(1, offset / spread)
    for got, want, rounding in (
        (torch.cat(outs, 1), expected, torch.finfo(other).eps),
        (torch.cat(grads, 1), wanted[0], torch.finfo(dtype).eps),
        (of_weight, wanted[1], ulp),
        (of_bias, wanted[2], ulp),
    ):
        # a gradient that is small beside its terms, as that of a group of few elements, has their rounding
        scale = want.abs().max().item() + (rstd.max().item() if want is wanted[0] else 1)
        torch.testing.assert_close(got.double(), want.detach(), rtol=0, atol=scale * (ulp + rounding))


@pytest.mark.parametrize(
    ("mesh", "shape", "placements", "kind"),
    [
        ((3,), (2, 6, 7, 3), [Shard(2)], "affine"),
        ((4,), (2, 6, 5, 2), [Shard(2)], "channels-last"),  # an empty shard
        ((2, 2), (3, 6, 2, 3, 2), [Shard(1), Shard(4)], "channels-last"),
        ((2, 2), (2, 6, 3, 3), [Shard(0), Shard(3)], "bare"),
        ((4,), (1, 6, 8), [Shard(1)], "affine"),
    ],
)
def test_sharded(mesh: tuple[int, ...], shape: tuple[int, ...], placements: list[Placement], kind: str) -> None:
    """The op by the kernels, against plain torch."""
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        x = random(*shape)
        if kind == "channels-last" and x.ndim in FORMATS:
            with maybe_disable_local_tensor_mode():
                x = x.contiguous(memory_format=FORMATS[x.ndim])
        parameters = [None, None] if kind == "bare" else [random(shape[1], seed=1), random(shape[1], seed=2)]
        assert_parity(
            lambda x, w, b: F.group_norm(x, 3, w, b),
            [x, *parameters],
            devices,
            [placements, *[[Replicate()] * len(mesh)] * 2],
            needs_grad=[True, *[kind != "bare"] * 2],
        )
    assert set(CALLS) == {kernel.__name__ for kernel in KERNELS}


class Norms(nn.Module):
    """A group norm, and an instance norm, that a model calls."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.instance = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.instance(self.group(x).sin())


def models(devices: DeviceMesh, make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A plain model in float64, and the same parallelized."""
    with maybe_disable_local_tensor_mode():
        torch.manual_seed(4)
        plain = make().to(DEVICE, torch.float64)
        for parameter in plain.parameters():
            nn.init.normal_(parameter)
        other = copy.deepcopy(plain)
    return plain, torchhalo.parallelize(other, devices)


@pytest.mark.parametrize("last", [True, False])
def test_functions_of_a_parallel_model(last: bool) -> None:
    """Of both norms the result and the gradients are those of plain torch; nothing is copied."""
    with simulated(2):
        devices = init_device_mesh(DEVICE, (2,))
        plain, model = models(devices, Norms)
        x = random(2, 4, 3, 5)
        with maybe_disable_local_tensor_mode():
            x = x.contiguous(memory_format=torch.channels_last) if last else x
            exact = x.clone().requires_grad_()
            expected = plain(exact)
            wanted = torch.autograd.grad(expected.square().sum(), [exact, *plain.parameters()])
        sharded = shard(x, devices, [Shard(3)]).requires_grad_()
        out = model(sharded)
        nodes = {"_GroupNormBackward", "SinBackward0", "torch::autograd::AccumulateGrad"}
        assert _names(out.grad_fn) == (nodes if last else {*nodes, "NativeGroupNormBackward0"})
        assert out.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        found = torch.autograd.grad(out.square().sum(), [sharded, *model.parameters()])
        for got, want in zip((out, *found), (expected, *wanted), strict=True):
            torch.testing.assert_close(whole(got), want.detach(), rtol=0, atol=1e-10)


def test_second_gradients_of_instance_norm() -> None:
    with simulated(2):
        devices = init_device_mesh(DEVICE, (2,))
        plain, model = models(devices, lambda: nn.InstanceNorm2d(4, affine=True))
        x = random(2, 4, 3, 5)
        found = []
        for input, norm in ((x.requires_grad_(), plain), (shard(x.detach(), devices, [Shard(3)]).requires_grad_(), model)):
            (grad,) = torch.autograd.grad(norm(input).pow(3).sum(), input, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), [input, norm.weight]))
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(whole(got), want, rtol=1e-9, atol=1e-9)
        assert CALLS


def _names(node: Any) -> set[str]:
    """The names of the nodes of an autograd graph."""
    if node is None:
        return set()
    return {node.name()}.union(*(_names(before) for before, _ in node.next_functions))


def test_group_norm_under_autocast() -> None:
    """As torch's on a GPU the result is float32; its input stays as it was."""
    with simulated(2):
        devices = init_device_mesh(DEVICE, (2,))
        plain, model = models(devices, lambda: nn.GroupNorm(2, 4))
        with maybe_disable_local_tensor_mode():
            x = random(2, 4, 5, 3).bfloat16().contiguous(memory_format=torch.channels_last)
            exact = x.double().requires_grad_()
            expected = plain(exact)
            wanted = torch.autograd.grad(expected, exact, expected.detach())
        sharded = shard(x, devices, [Shard(2)]).requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(sharded)
        assert out.dtype == torch.float32
        (found,) = torch.autograd.grad(out, sharded, out.detach())
        torch.testing.assert_close(whole(out).double(), expected.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(whole(found).double(), wanted[0], rtol=8e-3, atol=1e-5)
        assert set(CALLS) == {kernel.__name__ for kernel in KERNELS}


def test_errors_are_those_of_torch() -> None:
    with simulated(2):
        devices = init_device_mesh(DEVICE, (2,))
        _, model = models(devices, lambda: nn.InstanceNorm2d(3))
        with pytest.raises(ValueError, match="Expected more than 1 spatial element"):
            model(shard(random(2, 3, 1, 1), devices, [Shard(0)]))
