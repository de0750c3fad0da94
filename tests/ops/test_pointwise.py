"""Activations of sharded tensors against one process, forward and gradient; those that stock DTensor handles too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, simulated, wire
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

ACTIVATIONS = [
    *("ReLU", "ReLU6", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Hardswish", "Hardsigmoid", "Hardtanh", "LeakyReLU"),
    *("LogSigmoid", "Softplus", "Softshrink", "Hardshrink", "Softsign", "Tanh", "Tanhshrink", "Sigmoid"),
]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    for mesh, placements in [((3,), [Shard(2)]), ((4,), [Shard(3)]), ((2, 2), [Shard(2), Shard(3)]), ((2,), [Partial()])]:
        ranks = 4 if len(mesh) > 1 else mesh[0]
        with simulated(ranks):
            devices = init_device_mesh(DEVICE, mesh)
            with maybe_disable_local_tensor_mode():
                x = 4 * torch.randn(2, 3, 5, 3, dtype=torch.float64, device=DEVICE)
            with wire() as sent:
                result = assert_parity(getattr(nn, name)(), [x], devices, [placements])
            if Partial() not in placements:
                assert list(result.placements) == placements
                assert sent == []


@pytest.mark.parametrize("weights", [1, 3])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Shard(3), Replicate(), Partial()])
def test_prelu(weights: int, placement) -> None:
    with simulated(4):
        devices = init_device_mesh(DEVICE, (4,))
        with maybe_disable_local_tensor_mode():
            x = torch.randn(2, 3, 5, 3, dtype=torch.float64, device=DEVICE)
            w = torch.rand(weights, dtype=torch.float64, device=DEVICE)
        assert_parity(F.prelu, [x, w], devices, [[placement], [Replicate()]])


def test_in_place_and_channels_last() -> None:
    with simulated(3):
        devices = init_device_mesh(DEVICE, (3,))
        with maybe_disable_local_tensor_mode():
            x = torch.randn(2, 3, 5, 4, dtype=torch.float64, device=DEVICE).contiguous(memory_format=torch.channels_last)
        for function in (F.hardswish, F.relu6, F.hardtanh, F.hardsigmoid, F.elu, F.silu, F.mish, F.leaky_relu):
            assert_parity(lambda x, function=function: function(x * 1, inplace=True), [x], devices, [[Shard(2)]])


@pytest.mark.parametrize("name", ["hardswish_", "mish_", "negative_", "tril_"])
def test_in_place_with_fewer_rows_than_ranks(name: str) -> None:
    """Of the last two DTensor works out the rule, and would cut another dim than the tensor's, which then held wrong values."""
    function = getattr(torch.ops.aten, name)
    with simulated(4):
        devices = init_device_mesh(DEVICE, (4,))
        with maybe_disable_local_tensor_mode():
            x = torch.randn(2, 8, 3, 6, dtype=torch.float64, device=DEVICE)
        result = assert_parity(lambda x: function(x * 2), [x], devices, [[Shard(2)]])
        assert result.placements == (Shard(2),)


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_glu(dim: int) -> None:
    for placements in ([Shard(2)], [Shard(3)], [Replicate()]):
        with simulated(3):
            x = torch.randn(2, 6, 8, 10, dtype=torch.float64)
            assert_parity(lambda t: torch.nn.functional.glu(t, dim), [x], init_device_mesh(DEVICE, (3,)), [placements])
