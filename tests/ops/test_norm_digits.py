"""What norms lose to rounding: large means, half types, autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, shard, simulated, whole
from test_normalization import random
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard


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
