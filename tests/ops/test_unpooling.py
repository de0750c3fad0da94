"""Max unpooling and gather along sharded dims against one process: values, gradients, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, mesh_of, shard, simulated, wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_pooling import ATOL, MESHES, layouts
from test_wire import chunk
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_unpools(data: st.DataObject) -> None:
    """Pool and unpool: values and gradient."""
    ndim, batched = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    kernel, stride = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.integers(kernel, 11 if ndim < 3 else 6), min_size=ndim, max_size=ndim))
    mesh, placements = data.draw(layouts(ndim, batched))
    shape = (*([2] if batched else []), data.draw(st.integers(1, 3)), *sizes)

    def function(x: torch.Tensor) -> torch.Tensor:
        y, indices = getattr(F, f"max_pool{ndim}d")(x, kernel, stride, return_indices=True)
        return getattr(F, f"max_unpool{ndim}d")(y, indices, kernel, stride, output_size=sizes)

    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        assert_parity(function, [x], devices, [placements], atol=ATOL)


def scattered(shape: tuple[int, ...], output: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Values whose places are anywhere in the output, each place at most once."""
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(*shape[:2], math.prod(output), generator=generator).argsort()
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    return x, order[..., : math.prod(shape[2:])].reshape(shape)


@pytest.mark.parametrize("placements", [[Shard(2), Shard(3)], [Shard(3), Shard(2)], [Shard(3), Shard(3)], [Shard(0), Shard(3)]])
def test_unpool_to_any_place(placements: list[Placement]) -> None:
    """A rank sends just what others own, each value with one index, and its gradient is fetched."""
    shape, output = (2, 3, 5, 4), (7, 9)
    x, indices = scattered(shape, output)
    with simulated(4):
        mesh = init_device_mesh(DEVICE, (2, 2))
        sharded = shard(x, mesh, placements), shard(indices, mesh, placements)
        with wire() as sent:
            torch.ops.aten.max_unpool2d(*sharded, output)
        assert_parity(
            lambda x, i: torch.ops.aten.max_unpool2d(x, i, output), [x, indices], mesh, [placements] * 2, 0.0, [True, False]
        )
    owns = [owner(mesh_place, (2, 3, *output), placements) for mesh_place in product(range(2), range(2))]
    has = [owner(mesh_place, shape, placements) for mesh_place in product(range(2), range(2))]
    comes = [0] * 4
    for n, c, h, w in product(*map(range, shape)):
        to = (n, c, *divmod(int(indices[n, c, h, w]), output[1]))
        (source,), (target,) = (
            [rank for rank in range(4) if at in side[rank]] for at, side in ((((n, c, h, w)), has), (to, owns))
        )
        comes[target] += source != target
    assert [each.name for each in sent] == ["all_gather_into_tensor", "all_to_all_single", "all_to_all_single"]
    assert sent[0].received[0] <= 4 * (4 + 2), "the counts alone are gathered"
    assert sum(comes) and all(each.received == dict(enumerate(comes)) for each in sent[1:])


def owner(place: tuple[int, ...], shape: tuple[int, ...], placements: Sequence[Placement]) -> set[tuple[int, ...]]:
    """The coordinates that the rank at ``place`` of a 2x2 mesh owns."""
    parts = [set(range(n)) for n in shape]
    for at, placement in zip(place, placements, strict=True):
        if isinstance(placement, Shard):
            members = sorted(parts[placement.dim])
            local = chunk(len(members), 2)[at]
            parts[placement.dim] = {members[i] for i in local}
    return set(product(*parts))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_gathers(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    named = [data.draw(st.integers(1, 7 if d == dim % len(shape) else n)) for d, n in enumerate(shape)]
    mesh = data.draw(st.sampled_from(MESHES))
    anywhere = [Replicate(), Partial(), *map(Shard, range(len(shape)))]
    first = [data.draw(st.sampled_from(anywhere)) for _ in mesh]
    second = [data.draw(st.sampled_from([Replicate(), *map(Shard, range(len(shape)))])) for _ in mesh]
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(shape, dtype=torch.float64, generator=generator).to(DEVICE)
            index = torch.randint(0, shape[dim], named, generator=generator).to(DEVICE)
        assert_parity(lambda x, i: x.gather(dim, i), [x, index], devices, [first, second], ATOL, [False, False])


def check_invalid_index() -> str:
    """One rank of four has an index that is out of range; all raise, also on CUDA, whose own kernel looks at none."""
    mesh = init_device_mesh(DEVICE, (2, 2))
    x, indices = scattered((2, 1, 2, 4), (4, 4))
    indices[1, 0, 1, 3] = 99
    sharded = [distribute_tensor(t, mesh, [Shard(0), Shard(3)]) for t in (x, indices)]
    with pytest.raises(RuntimeError) as raised:
        torch.ops.aten.max_unpool2d(*sharded, [4, 4])
    with pytest.raises(RuntimeError) as plain:
        torch.ops.aten.max_unpool2d(x.cpu(), indices.cpu(), [4, 4])
    assert str(raised.value) == str(plain.value)
    return str(raised.value)


def test_an_invalid_index_raises_on_every_rank(pool) -> None:
    assert len(set(pool(4).run(check_invalid_index))) == 1


def check_unpool_refuses() -> None:
    x, indices = (distribute_tensor(t, mesh_of((2,)), [Shard(3)]) for t in scattered((1, 2, 2, 4), (4, 4)))
    with pytest.raises(Exception, match=r"torch\.compiler\.disable"):
        torch.compile(lambda x, i: torch.ops.aten.max_unpool2d(x, i, [4, 4]), backend="aot_eager", fullgraph=True)(x, indices)


def test_compiled_unpool_refuses(pool) -> None:
    pool(2).run(check_unpool_refuses)
