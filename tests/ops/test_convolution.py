"""Sharded convolution against one process: forward and every gradient, in float64, simulated ranks and real ones."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import DEVICE, assert_parity, simulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.utils.checkpoint import checkpoint

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 1)]


class Case(NamedTuple):
    """One random convolution."""

    mesh: tuple[int, ...]
    input: list[Placement]
    weight: list[Placement]
    bias: list[Placement] | None
    batch: int | None
    channels: tuple[int, int]
    groups: int
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...] | None
    channels_last: bool
    needs_grad: tuple[bool, bool, bool]

    def check(self, device: str = "cpu") -> None:
        mesh = init_device_mesh(device, self.mesh)
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device)

        transposed = self.output_padding is not None
        first, second = self.channels
        with maybe_disable_local_tensor_mode():
            x = random(*([] if self.batch is None else [self.batch]), first * self.groups, *self.sizes)
            if transposed:
                w = random(first * self.groups, second, *self.kernel)
            else:
                w = random(second * self.groups, first, *self.kernel)
            b = None if self.bias is None else random(second * self.groups)
            if self.channels_last and x.ndim in (4, 5):
                x = x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
        name = f"conv{'_transpose' if transposed else ''}{len(self.sizes)}d"
        kwargs = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups}
        if transposed:
            kwargs["output_padding"] = self.output_padding
        needs_grad = [*self.needs_grad[:2], self.needs_grad[2] and b is not None]

        def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            return getattr(F, name)(x, w, b, **kwargs)

        result = assert_parity(function, [x, w, b], mesh, [self.input, self.weight, self.bias], needs_grad=needs_grad)
        if all(isinstance(p, Replicate) for p in self.weight):
            for got, given in zip(result.placements, self.input, strict=True):
                stays = isinstance(given, Shard) and given != Shard(self.channel_dim)
                assert not stays or got == given, "a batch or spatial axis must stay as it is"

    @property
    def channel_dim(self) -> int:
        return 0 if self.batch is None else 1


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh = draw(st.sampled_from(MESHES))
    ndim = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    batch = draw(st.sampled_from([None, 1, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    channels = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    each = st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim).map(tuple)
    kernel = draw(st.lists(st.integers(1, 4 if ndim < 3 else 3), min_size=ndim, max_size=ndim).map(tuple))
    stride, dilation = draw(each), draw(each)
    top = 12 if ndim < 3 else 7
    if transposed:
        sizes = tuple(draw(st.integers(1, top)) for _ in range(ndim))
        output_padding = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        room = [
            (n - 1) * s + d * (k - 1) + o for n, s, d, k, o in zip(sizes, stride, dilation, kernel, output_padding, strict=True)
        ]
        padding = tuple(draw(st.integers(0, min(4, r // 2))) for r in room)
    else:
        output_padding = None
        padding = draw(
            st.sampled_from(["same", "valid"]) | st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim).map(tuple)
        )
        if padding == "same":
            stride = (1,) * ndim
        ends = (0,) * ndim if isinstance(padding, str) else padding
        least = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(dilation, kernel, ends, strict=True)]
        sizes = tuple(draw(st.integers(max(1, low), max(1, low) + top)) for low in least)
    offset = 0 if batch is None else 1
    spatial = [Shard(offset + 1 + d) for d in range(ndim)]
    anywhere = [Replicate(), Partial(), Shard(offset), *spatial, *spatial, *([Shard(0)] if batch else [])]
    return Case(
        mesh=mesh,
        input=[draw(st.sampled_from(anywhere)) for _ in mesh],
        weight=[draw(st.sampled_from([Replicate()] * 4 + [Shard(0), Shard(1), Shard(2), Partial()])) for _ in mesh],
        bias=draw(st.none() | st.just([draw(st.sampled_from([Replicate(), Replicate(), Shard(0)])) for _ in mesh])),
        batch=batch,
        channels=channels,
        groups=groups,
        sizes=sizes,
        kernel=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        output_padding=output_padding,
        channels_last=draw(st.booleans()),
        needs_grad=draw(st.sampled_from([(True, True, True), (False, True, True), (True, False, False), (False, False, True)])),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
# A grouped convolution may gather channels, never space.
@pytest.mark.filterwarnings("ignore:aten.convolution.default gathers a tensor of shape .* along dim 1:torchhalo.GatherWarning")
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_random_convolutions_on_simulated_ranks(case: Case) -> None:
    with simulated(math.prod(case.mesh)):
        case.check(DEVICE)


def check_all(cases: list[Case]) -> None:
    warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths")
    for case in cases:
        try:
            case.check()
        except BaseException as error:
            error.add_note(str(case)) if hasattr(error, "add_note") else None
            raise


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_convolutions_on_gloo(pool, ranks: int) -> None:
    found: list[Case] = []

    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases().filter(lambda case: math.prod(case.mesh) == ranks))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    assert len(found) >= 40
    pool(ranks).run(check_all, found)


def check_sub_mesh() -> None:
    """A mesh over ranks 1 and 3 of 4, and each row of a two-axis mesh: the other ranks do not take part."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 9, 11, dtype=torch.float64, generator=generator)
    w = torch.randn(4, 3, 3, 3, dtype=torch.float64, generator=generator)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, padding=1, stride=2)

    some = DeviceMesh(DEVICE, [1, 3])
    if dist.get_rank() in (1, 3):
        assert_parity(function, [x, w], some, [[Shard(3)], [Replicate()]])
    else:
        outside = distribute_tensor(x, some, [Shard(3)]), distribute_tensor(w, some, [Replicate()])
        assert function(*outside).shape == function(x, w).shape
    both = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "space"))
    assert_parity(function, [x, w], both["space"], [[Shard(2)], [Replicate()]])
    assert_parity(function, [x, w], both, [[Shard(0), Shard(2)], [Replicate(), Replicate()]])
    assert_parity(function, [x, w], both, [[Shard(3), Shard(3)], [Replicate(), Replicate()]])


def test_sub_meshes(pool) -> None:
    pool(4).run(check_sub_mesh)


def tensors(dtype: torch.dtype, channels_last: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in [(2, 4, 7, 10), (6, 4, 3, 3), (6,)])
    return [x.contiguous(memory_format=torch.channels_last) if channels_last else x, w, b]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_memory_formats(dtype: torch.dtype, channels_last: bool) -> None:
    """Half types sum the weight gradient over fewer terms per rank, so it may differ by their rounding."""
    atol = {torch.float64: 1e-12, torch.float32: 1e-4}.get(dtype, 0.5)
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        with maybe_disable_local_tensor_mode():
            plain = [t.to(DEVICE) for t in tensors(dtype, channels_last)]
        for op in (partial(F.conv2d, padding=1), partial(F.conv2d, padding=1, stride=2)):
            result = assert_parity(op, plain, mesh, [[Shard(3)], [Replicate()], [Replicate()]], atol=atol)
            assert result.dtype == dtype
            last = result.stride(1) == 1
            assert last == channels_last or DEVICE != "cpu", "cuDNN has no channels-last kernel for float64"
            layout = torch.channels_last if last else torch.contiguous_format
            assert all(t.is_contiguous(memory_format=layout) for t in result.to_local()._local_tensors.values())


def check_modes() -> None:
    """No-grad, inference mode, autocast, checkpointing, an input used twice, in-place ops on the output."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    placements = [[Shard(3)], [Replicate()], [Replicate()]]
    plain = [t.double() for t in tensors(torch.float32)]
    sharded = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(plain, placements, strict=True)]
    expected = F.conv2d(*plain, padding=1)
    for guard in (torch.no_grad(), torch.inference_mode()):
        with guard:
            result = F.conv2d(*sharded, padding=1)
            assert not result.requires_grad and result.placements == (Shard(3),)
            torch.testing.assert_close(result.full_tensor(), expected)
            same = F.conv2d(*sharded, padding="same", dilation=2)
            torch.testing.assert_close(same.full_tensor(), F.conv2d(*plain, padding="same", dilation=2))

    def twice(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b, padding=1) * F.conv2d(x, w, b, padding=1).tanh()

    def in_place(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b, padding=1).mul_(2).add_(1).relu_()

    def checkpointed(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return checkpoint(twice, x, w, b, use_reentrant=False)

    def unbatched(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, b, padding=1)

    for function in (twice, in_place, checkpointed):
        assert_parity(function, plain, mesh, placements)
    assert_parity(unbatched, [plain[0][0], *plain[1:]], mesh, [[Shard(2)], *placements[1:]])

    def autocast(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return F.conv2d(x, w, b, padding=1)

    assert assert_parity(autocast, tensors(torch.float32), mesh, placements, atol=0.5).dtype == torch.bfloat16


@pytest.mark.parametrize("ranks", [2, 3])
def test_modes(pool, ranks: int) -> None:
    pool(ranks).run(check_modes)


def check_module() -> None:
    """An unmodified module: `nn.Conv2d` with padding modes that need only constant padding, trained by SGD."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same"),
        nn.ReLU(),
        nn.Conv2d(8, 8, 4, padding="same", groups=2),
        nn.ConvTranspose2d(8, 2, 2, 2),
    ).double()
    sharded = copy.deepcopy(plain)
    distribute_module(sharded, mesh)
    x = torch.randn(1, 3, 9, 13, dtype=torch.float64)
    for model, image in ((plain, x), (sharded, distribute_tensor(x, mesh, [Shard(3)]))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (model(image) ** 2).mean().backward()
            optimizer.step()
    for got, want in zip(sharded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_module(pool) -> None:
    pool(3).run(check_module)
