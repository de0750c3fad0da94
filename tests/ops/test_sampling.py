"""Grid sampling of a sharded tensor against one process, forward and gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, mesh_of, simulated
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]

pytestmark = pytest.mark.filterwarnings("ignore::torchhalo.GatherWarning")


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(data=st.data())
def test_random_grids(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from(MESHES))
    ndim = data.draw(st.sampled_from([2, 2, 3]))
    mode = data.draw(st.sampled_from(["bilinear", "nearest", "bicubic"] if ndim == 2 else ["bilinear", "nearest"]))
    padding = data.draw(st.sampled_from(["zeros", "border", "reflection"]))
    corners = data.draw(st.booleans())
    batch, channels = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    sizes, outputs = ([data.draw(st.integers(1, 7)) for _ in range(ndim)] for _ in range(2))
    spread = data.draw(st.sampled_from([0.2, 1.0, 3.0]))
    any_dim = [Replicate(), *map(Shard, range(ndim + 2))]
    placements = [[data.draw(st.sampled_from([*any_dim, Partial()])) for _ in mesh] for _ in range(2)]
    needs_grad = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    with simulated(math.prod(mesh)):
        devices = init_device_mesh(DEVICE, mesh)
        with maybe_disable_local_tensor_mode():
            x = torch.randn(batch, channels, *sizes, dtype=torch.float64, device=DEVICE)
            grid = (torch.rand(batch, *outputs, ndim, dtype=torch.float64, device=DEVICE) - 0.3) * spread

        def sample(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
            return F.grid_sample(x, grid, mode=mode, padding_mode=padding, align_corners=corners)

        assert_parity(sample, [x, grid], devices, placements, needs_grad=needs_grad)


def warped(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    grid = F.affine_grid(theta, [2, 3, 6, 5], align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def train(compiled: bool) -> None:
    """A sample of an affine grid, whose parameters are replicated."""
    x, theta = torch.randn(2, 3, 5, 7, dtype=torch.float64), torch.randn(2, 2, 3, dtype=torch.float64)
    plain = x.clone().requires_grad_()
    expected = warped(plain, theta)
    expected.square().sum().backward()
    mesh = mesh_of((3,))
    sharded = distribute_tensor(x, mesh, [Shard(3)]).requires_grad_()
    function = torch.compile(warped, backend="aot_eager", fullgraph=True) if compiled else warped
    result = function(sharded, distribute_tensor(theta, mesh, [Replicate()]))
    assert result.placements == (Shard(3),)
    result.square().sum().backward()
    torch.testing.assert_close(result.full_tensor(), expected.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("compiled", [False, True])
def test_on_processes(pool, compiled: bool) -> None:
    pool(3).run(train, compiled)


def infer() -> None:
    """On a mesh that leaves rank 0 out, where ops arrive in their composite form."""
    mesh = DeviceMesh(DEVICE, [1, 2])
    x, theta = torch.randn(2, 3, 5, 7), torch.randn(2, 2, 3)
    with torch.inference_mode():
        result = warped(distribute_tensor(x, mesh, [Shard(2)]), distribute_tensor(theta, mesh, [Replicate()]))
        if mesh.get_coordinate() is not None:
            torch.testing.assert_close(result.full_tensor(), warped(x, theta), rtol=0, atol=1e-6)


def test_inference_on_a_submesh(pool) -> None:
    pool(3).run(infer)
