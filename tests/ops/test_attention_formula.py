"""Attention for which torch has no fused kernel: what torch itself writes out, with few keys, which are gathered."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, shard, simulated, whole
from test_ring_attention import attend, without_kernels
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torchhalo


@pytest.mark.parametrize("shape", [(2, 7, 4), (2, 3, 7, 4)], ids=["3 dims", "4 dims"])
def test_where_torch_makes_a_plain_mask(shape: tuple[int, ...]) -> None:
    """Torch writes out what has no heads, or dropout on a CPU: a causal mask that it then makes is no DTensor."""
    x = [torch.randn(shape, dtype=torch.float64) for _ in range(3)]
    dim = len(shape) - 2
    with simulated(3), torchhalo.strict(), torchhalo.plain_as_replicated():
        mesh = init_device_mesh(DEVICE, (3,))
        causal = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        assert_parity(causal, x, mesh, [[Shard(dim)]] * 3, 1e-11)
        sharded = [shard(t, mesh, [Shard(dim)]).requires_grad_() for t in x]
        out = causal(*sharded, dropout_p=0.5)
        out.sum().backward()
        ours = [out, *(t.grad for t in sharded)]
        assert all(t.placements == (Shard(dim),) and not whole(t).isnan().any() for t in ours)
        first = whole(out).narrow(dim, 0, 1)  # sees itself alone: doubled, or dropped
        value = x[2].narrow(dim, 0, 1)
        assert torch.equal(first, torch.where(first == 0, 0.0, 2 * value))


@pytest.mark.parametrize("written_out", [False, True])
def test_autocast(written_out: bool) -> None:
    with simulated(2), without_kernels(written_out), torch.autocast(DEVICE, dtype=torch.bfloat16):
        mesh = init_device_mesh(DEVICE, (2,))
        x = [torch.randn(1, 2, 6, 8) for _ in range(3)]
        sharded = [shard(t, mesh, [Shard(2)]).requires_grad_() for t in x]
        out, expected = attend(*sharded), F.scaled_dot_product_attention(*x)
        assert out.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(whole(out), expected, rtol=0, atol=2**-6)
        out.float().sum().backward()
        assert all(t.grad.dtype == torch.float32 for t in sharded)
