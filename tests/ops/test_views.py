"""Views of a sharded tensor against one process, forward and gradient, and what they send."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from itertools import chain, combinations_with_replacement, product

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, Sent, assert_parity, mesh_of, shard, simulated, whole, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import Memory
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torchhalo
from torchhalo.geometry import Span
from torchhalo.geometry.reshapes import tiles
from torchhalo.torch_internals.grid_shard import GridShard

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]


def chunk(sizes: list[int], placements: list, mesh: tuple[int, ...], place: tuple[int, ...]) -> torch.Tensor:
    """The indices that the rank at ``place`` owns of a tensor of ``sizes``, by `torch.chunk`, of a grid by that of one part."""
    grids = {p.dim: p.sizes for p in placements if isinstance(p, GridShard)}
    apart = [grids.get(dim, (size,)) for dim, size in enumerate(sizes)]
    part = torch.arange(math.prod(sizes)).reshape(list(chain(*apart)))
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, GridShard)):
            dim = sum(map(len, apart[: placement.dim])) + getattr(placement, "part", 0)
            parts = part.chunk(mesh[axis], dim)
            part = parts[place[axis]] if place[axis] < len(parts) else part.narrow(dim, 0, 0)
    return part


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of one number of elements: products of the same primes, and dims of size one."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5, 7]), min_size=1, max_size=5))
    shapes = []
    for _ in range(2):
        order = draw(st.permutations(primes)) if draw(st.booleans()) else primes
        ends = sorted(draw(st.lists(st.integers(0, len(primes)), max_size=4)))
        shapes.append([math.prod(order[a:b]) for a, b in zip([0, *ends], [*ends, len(primes)], strict=True)])
    return shapes[0], shapes[1]


@settings(max_examples=70, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_views(data: st.DataObject) -> None:
    """Any reshape under any placements: values, gradient, and each element that a rank lacks travels once at most twice."""
    mesh = data.draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3)]))
    before, after = data.draw(reshapes())
    choices = [Replicate(), Partial(), *map(Shard, range(len(before))), *map(Shard, range(len(before)))]
    placements = [data.draw(st.sampled_from(choices)) for _ in mesh]
    order = data.draw(st.permutations(range(len(before)))) if data.draw(st.booleans()) else list(range(len(before)))
    placed = [Shard(order.index(p.dim)) if isinstance(p, Shard) else p for p in placements]

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.permute([order.index(dim) for dim in range(len(before))]).reshape(after)

    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x = torch.randn([before[dim] for dim in order], dtype=torch.float64, device=DEVICE)
        result = assert_parity(function, [x], devices, [placed], atol=1e-12 if Partial() in placements else 0)
        assert all(type(p) in (Shard, GridShard, Replicate, Partial) for p in result.placements)
        source = shard(x, devices, placed)
        with wire() as sent:
            function(source)
    owned, wanted = (
        [set(chunk(sizes, p, mesh, place).flatten().tolist()) for place in product(*map(range, mesh))]
        for sizes, p in ((before, placements), (after, result.placements))
    )
    least = {rank: len(want - own) for rank, (own, want) in enumerate(zip(owned, wanted, strict=True))}
    if Partial() in placements:  # stock DTensor adds up the summands where it copies
        return
    assert all(each.name == "all_to_all_single" for each in sent) and len(sent) <= 2
    if len(sent) == 2:  # no common factors
        return
    assert (sent[0].received if sent else dict.fromkeys(least, 0)) == least


@pytest.mark.parametrize("sizes", [(7,), (3, 4), (2, 3, 4), (1, 5, 1)])
def test_tiles_hold_the_elements_in_order(sizes: tuple[int, ...]) -> None:
    count = math.prod(sizes)
    elements = torch.arange(count).view(sizes)
    for start, stop in combinations_with_replacement(range(count + 1), 2):
        found = [elements[tuple(slice(*span) for span in tile)].flatten() for tile in tiles(Span(start, stop), sizes)]
        assert torch.equal(torch.cat([torch.arange(0), *found]), torch.arange(start, stop))
        assert len(found) <= 2 * len(sizes) - 1


def repeat(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(3, dim=2)


def to_frames(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 1, 3, 4).reshape(-1, 3, *x.shape[3:])


def patches(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(2, 3, 5, 2, 6, 2).permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def tokens(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(2).transpose(1, 2).view(2, -1, 2, 4).transpose(1, 2)


def instances(x: torch.Tensor) -> torch.Tensor:
    return x.view(1, 6, *x.shape[2:])


def without(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(2) * 2


def rectified(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.view(2, 3, -1).transpose(1, 2)
    z.mul_(3)
    z.relu_()
    return y + z.transpose(1, 2).reshape(y.shape).flip(1)


def cleared(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.view(-1)[3:50].zero_()
    return y + x


PATTERNS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "repeat_interleave": (repeat, (2, 3, 5, 7)),
    "video to frames": (to_frames, (2, 3, 4, 5, 7)),
    "patches": (patches, (2, 3, 10, 12)),
    "tokens": (tokens, (2, 3, 5, 7)),
    "heads": (heads, (2, 8, 5, 7)),
    "instances": (instances, (2, 3, 5, 7)),
    "squeeze": (without, (2, 3, 1, 7)),
    "in place": (rectified, (2, 3, 5, 7)),
    "piece in place": (cleared, (2, 3, 5, 7)),
    "local response norm": (functools.partial(F.local_response_norm, size=3), (2, 3, 5, 7)),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("mesh, dims", [((2,), (-2,)), ((3,), (-1,)), ((2, 2), (-2, -1)), ((4,), (2,))])
def test_patterns_of_models(name: str, mesh: tuple[int, ...], dims: tuple[int, ...]) -> None:
    function, shape = PATTERNS[name]
    with simulated(math.prod(mesh)), torchhalo.strict():
        devices = init_device_mesh(DEVICE, mesh)
        placements = [Shard(dim % len(shape)) for dim in dims]
        assert_parity(function, [torch.randn(shape, dtype=torch.float64, device=DEVICE)], devices, [placements])


def test_flatten_sends_what_changes_owner() -> None:
    """4 x 6 over 2 ranks, 3 columns each, as pairs: 6 each, of which a rank has 3; back to rows, 2 each, nothing travels."""
    with simulated(2):
        x = shard(torch.randn(2, 4, 6), init_device_mesh(DEVICE, (2,)), [Shard(2)])
        with wire() as there:
            y = x.view(2, 12, 2)
        with wire() as back:
            z = y.view(2, 4, 6)
        rows = z.view(2, 24).to_local()
    assert there == [Sent("all_to_all_single", {0: 2 * 6, 1: 2 * 6})]
    assert not back and y.placements == z.placements == (Shard(1),) and rows.shape == (2, 12)


def test_columns_stay_where_they_are() -> None:
    """4 x 6 over 2 ranks, 3 columns each: as tokens they stay, and come back as columns; other placements are to be had."""
    with simulated(2):
        x = shard(torch.arange(48.0).view(2, 4, 6), init_device_mesh(DEVICE, (2,)), [Shard(2)])
        with wire() as sent:
            y = x.view(2, 24)
            z = y.view(2, 4, 6)
        assert not sent and y.placements == (GridShard(1, (4, 6), 1),) and z.placements == (Shard(2),)
        assert y.to_local().shape == (2, 12)
        assert torch.equal(whole(y.redistribute(placements=[Shard(1)])), torch.arange(48.0).view(2, 24))
        assert torch.equal(whole(y), torch.arange(48.0).view(2, 24))
        assert torch.equal(whole(y.redistribute(placements=[Replicate()]).redistribute(placements=y.placements)), whole(y))


def test_grids_are_equal_by_what_they_say() -> None:
    grid = GridShard(1, [4, 6], 1)
    for other in (pickle.loads(pickle.dumps(grid)), copy.deepcopy(grid), GridShard(2, (4, 6), 1).at(1)):
        assert other == grid and hash(other) == hash(grid) and repr(other) == "GridShard(dim=1, sizes=(4, 6), part=1)"
    assert grid not in (GridShard(1, (4, 6), 0), GridShard(1, (6, 4), 1), Shard(1))


def test_local_views_share_memory() -> None:
    with simulated(2):
        x = shard(torch.randn(2, 3, 4, 6), init_device_mesh(DEVICE, (2,)), [Shard(2)])
        y = x.view(2, 3, 24)
        y.zero_()
        assert not whole(x).any()


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_columns(data: st.DataObject) -> None:
    """`F.unfold` and `F.fold`, which are each other's gradients."""
    mesh = data.draw(st.sampled_from(MESHES))
    kernel, stride, dilation = (tuple(data.draw(st.integers(1, 3)) for _ in range(2)) for _ in range(3))
    padding = tuple(data.draw(st.integers(0, 2)) for _ in range(2))
    size = [
        data.draw(st.integers(max(1, d * (k - 1) + 1 - 2 * p), 9)) for k, d, p in zip(kernel, dilation, padding, strict=True)
    ]
    batch = data.draw(st.sampled_from([(), (2,)]))
    choices = [Replicate(), Partial(), *map(Shard, range(len(batch) + 3)), Shard(len(batch) + 1), Shard(len(batch) + 2)]
    placements = [data.draw(st.sampled_from(choices)) for _ in mesh]
    config = {"kernel_size": kernel, "stride": stride, "dilation": dilation, "padding": padding}
    with maybe_disable_local_tensor_mode():
        image = torch.randn(*batch, 3, *size, dtype=torch.float64, device=DEVICE)
        columns = F.unfold(image, **config)
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        assert_parity(lambda x: F.unfold(x, **config), [image], devices, [placements])
        last = [Shard(min(p.dim, columns.ndim - 1)) if isinstance(p, Shard) else p for p in placements]
        assert_parity(lambda x: F.fold(x, size, **config), [columns], devices, [last])


@pytest.mark.parametrize("ranks, dim, kernel", [(1, 2, 1), (4, 1, 3), (4, 2, 1)])
def test_taps_are_never_cut(ranks: int, dim: int, kernel: int) -> None:
    """Neither a single tap, nor the taps of fewer channels than ranks."""
    with simulated(ranks):
        columns = torch.randn(2, 3 * kernel**2, (9 - kernel) ** 2, dtype=torch.float64)
        mesh = init_device_mesh(DEVICE, (ranks,))
        assert_parity(lambda x: F.fold(x, (8, 8), kernel), [columns], mesh, [[Shard(dim)]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64])
def test_any_dtype_travels(dtype: torch.dtype) -> None:
    with simulated(3):
        x = torch.arange(70).view(2, 5, 7).to(dtype)
        y = shard(x, init_device_mesh(DEVICE, (3,)), [Shard(2)]).view(2, 35)
        assert torch.equal(whole(y), x.view(2, 35)) and y.dtype == dtype


def test_channels_last_stays() -> None:
    with simulated(3):
        mesh = init_device_mesh(DEVICE, (3,))
        x = torch.randn(2, 4, 5, 7, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
        for dim in (2, 3):
            y = assert_parity(lambda x: x.view(2, 4, 35), [x], mesh, [[Shard(dim)]])
            z = shard(x, mesh, [Shard(dim)], Memory("channels last")).view(2, 4, 35)
            for each in (y, z) if y.placements == (Shard(2),) else (z,):
                assert all(part.stride()[1:] == (1, 4) for part in each.to_local()._local_tensors.values())


def test_errors_are_torchs() -> None:
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        for x, size in ((torch.randn(4, 6), (25,)), (torch.randn(4, 6).t(), (24,)), (torch.randn(4, 6), (-1, 5))):
            with maybe_disable_local_tensor_mode(), pytest.raises(RuntimeError) as expected:
                x.view(size)
            with pytest.raises(RuntimeError) as raised:
                y = shard(x.t(), mesh, [Shard(0)]).t() if not x.is_contiguous() else shard(x, mesh, [Shard(1)])
                y.view(size)
            assert str(raised.value) == str(expected.value)


def check_processes(inference: bool) -> None:
    mesh = mesh_of((3,))
    for function, shape in PATTERNS.values():
        for dim in (len(shape) - 2, len(shape) - 1):
            x = torch.randn(shape, dtype=torch.float64)
            with torch.inference_mode(inference):
                y = function(distribute_tensor(x, mesh, [Shard(dim)]))
                torch.testing.assert_close(y.full_tensor(), function(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("inference", [False, True])
def test_processes(pool, inference: bool) -> None:
    pool(3).run(check_processes, inference)


def check_part_of_the_world() -> None:
    """On a mesh whose ranks are in descending order, which `distribute_tensor` does not know to fill."""
    mesh = DeviceMesh(DEVICE, [2, 0])
    x = torch.arange(48.0).view(2, 4, 6)
    coordinate = mesh.get_coordinate()
    part = torch.empty(0) if coordinate is None else x.chunk(2, 2)[coordinate[0]]
    y = DTensor.from_local(part, mesh, [Shard(2)], run_check=False, shape=x.shape, stride=x.stride()).view(2, 24)
    assert y.shape == (2, 24) and y.placements == (GridShard(1, (4, 6), 1),)
    moved = y.redistribute(placements=[Shard(1)])
    if coordinate is not None:
        assert torch.equal(y.to_local(), part.reshape(2, 12))
        assert torch.equal(moved.to_local(), x.view(2, 24).chunk(2, 1)[coordinate[0]])


def test_a_mesh_that_is_not_the_world(pool) -> None:
    pool(3).run(check_part_of_the_world)


def network(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x).flatten(2).transpose(1, 2)
    y = torch.sin(y.reshape(2, 4, -1, 3)).permute(0, 3, 1, 2)
    return (y * y.detach()).sum()


def check_compiled(size: int, dim: int) -> None:
    mesh = mesh_of((3,))
    x = torch.randn(2, 3, 4, size, dtype=torch.float64)
    eager, compiled = (distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_() for _ in range(2))
    torch._dynamo.reset()
    expected = network(eager)
    expected.backward()
    result = torch.compile(network, backend="aot_eager", fullgraph=True)(compiled)
    result.backward()
    torch.testing.assert_close(result.full_tensor(), expected.full_tensor(), rtol=0, atol=1e-12)
    torch.testing.assert_close(compiled.grad.full_tensor(), eager.grad.full_tensor(), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("size, dim", [(7, 3), (2, 3)])
def test_compiled(pool, size: int, dim: int) -> None:
    pool(3).run(check_compiled, size, dim)
