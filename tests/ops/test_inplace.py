"""Ops that write in place to partial sums, against one process: their result is not the sum of what each summand gives."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, mesh_of, shard, simulated, whole, wire
from pools import Pool
from torch import nn
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import torchhalo

Function = Callable[[torch.Tensor], object]
WRITES: dict[str, Function] = {
    "relu": lambda x: F.relu(x, inplace=True),
    "relu6": lambda x: F.relu6(x, inplace=True),
    "elu": lambda x: F.elu(x, inplace=True),
    "celu": lambda x: F.celu(x, inplace=True),
    "selu": lambda x: F.selu(x, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "mish": lambda x: F.mish(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "hardtanh": lambda x: F.hardtanh(x, inplace=True),
    "sigmoid": lambda x: x.sigmoid_(),
    "exp": lambda x: x.exp_(),
    "clamp": lambda x: x.clamp_(-0.1, 0.1),
    "clip": lambda x: x.clip_(min=0),
    "add a number": lambda x: x.add_(1.5),
    "chain": lambda x: x.div_(3).sub_(1).pow_(2),
    "multiply": lambda x: x.mul_(2.0),
    "addcmul": lambda x: x.addcmul_(x.detach().sin(), x.detach().cos()),
    "lerp": lambda x: x.lerp_(x.detach().sin(), 0.3),
    "masked_fill": lambda x: x.masked_fill_(x.detach() > 0, 2.0),
    "mask": lambda x: x.__setitem__(x.detach() > 0, 2.0),
    "slice": lambda x: x.__setitem__((slice(None), slice(0, 2)), x[:, 1:3].detach().sin()),
    "view": lambda x: x.view(-1).relu_(),
    "view of a slice": lambda x: x[:, 1:3].unsqueeze(0).relu_(),
    "transposed": lambda x: x.t().sub_(x.detach().t().square()),
    "fill": lambda x: x[1].fill_(3),
    "foreach": lambda x: torch._foreach_add_([x], 1.5),
}
MESHES = [((2,), [Partial()]), ((3,), [Partial()]), ((2, 2), [Partial(), Partial()]), ((2, 2), [Shard(1), Partial()])]


@pytest.mark.parametrize("name", WRITES)
def test_writing_to_partial_sums(name: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        WRITES[name](y)
        return y

    for mesh, placements in MESHES:
        with simulated(4 if len(mesh) > 1 else mesh[0]):
            devices = init_device_mesh(DEVICE, mesh)
            with maybe_disable_local_tensor_mode():
                x = torch.randn(5, 4, dtype=torch.float64, device=DEVICE)
            assert_parity(function, [x], devices, [placements])


@pytest.mark.parametrize("ranks", [2, 3])
def test_written_sums_are_exact(ranks: int) -> None:
    """Counts, whose shares would be fractions, and numbers of few digits, whose shares would be rounded."""
    with simulated(ranks):
        mesh = init_device_mesh(DEVICE, (ranks,))
        with maybe_disable_local_tensor_mode():
            image = torch.randn(4, 5, 7, device=DEVICE)
            expected = image.gt(0).sum((1, 2)).clamp_(min=18)
        counts = shard(image, mesh, [Shard(2)]).gt(0).sum((1, 2))
        assert counts.placements == (Partial(),)
        assert torch.equal(whole(counts.clamp_(min=18)), expected)
        assert torch.equal(whole(counts.fill_(7)), torch.full_like(expected, 7))
        for dtype in (torch.bfloat16, torch.float16):
            with maybe_disable_local_tensor_mode():
                value = torch.randn(50, device=DEVICE).to(dtype)
                zeros = torch.zeros(50, dtype=dtype, device=DEVICE)
            written = shard(zeros, mesh, [Partial()]).copy_(shard(value, mesh, [Replicate()]))
            assert written.placements == (Partial(),)
            assert torch.equal(whole(written), value)


def test_what_writing_to_sums_sends() -> None:
    """One reduction of the sum, and nothing where the result is a sum of what the summands give."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        with maybe_disable_local_tensor_mode():
            x = torch.randn(3, 4, device=DEVICE)
        for write, names in [(torch.relu_, ["all_reduce"]), (lambda x: x.mul_(2).add_(x), [])]:
            with wire() as sent:
                write(shard(x, mesh, [Partial()]))
            assert [each.name for each in sent] == names


def test_wrong_writes_to_sums_raise() -> None:
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        with maybe_disable_local_tensor_mode():
            x, wide = torch.ones(3, 1, device=DEVICE), torch.ones(3, 4, device=DEVICE)
            count = torch.ones(3, dtype=torch.int64, device=DEVICE)
        with pytest.raises(RuntimeError, match=r"add_: a result of shape \(3, 4\)"):
            shard(x, mesh, [Partial()]).add_(shard(wide, mesh, [Replicate()]))
        sums = shard(count, mesh, [Shard(0)]).sum()
        assert sums.placements == (Partial(),)
        with pytest.raises(RuntimeError, match=r"torch\.float32 can't be written"):
            sums.mul_(0.5)


class Head(nn.Module):
    """What ends VGG and AlexNet: features of all places, linear layers, activations in place."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 4, 3, padding=1)
        self.drops = nn.ModuleList(nn.Dropout(0.5, inplace=in_place) for _ in range(2))
        self.first, self.second, self.last = nn.Linear(4 * 6 * 8, 7), nn.Linear(7, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.flatten(self.features(x), 1)
        for layer, drop in zip((self.first, self.second), self.drops, strict=True):
            x = drop(F.relu(layer(x), inplace=drop.inplace))
        return self.last(x)


def _classifies(ranks: int, dim: int) -> None:
    mesh, image = mesh_of((ranks,)), torch.randn(2, 3, 6, 8, dtype=torch.float64)
    plain = Head().double().eval()
    model = torchhalo.parallelize(copy.deepcopy(plain), mesh, dims=dim)
    plain(image).square().sum().backward()
    model(image).square().sum().backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(got.grad), want.grad, rtol=0, atol=1e-10)
    with torch.inference_mode():
        torch.testing.assert_close(whole(model(image)), plain(image), rtol=0, atol=1e-10)
    # Dropout in place draws what dropout out of place does.
    outputs = []
    for in_place in (True, False):
        other = Head(in_place).double()
        other.load_state_dict(plain.state_dict())
        torchhalo.parallelize(other, mesh, dims=dim)
        torch.manual_seed(3)
        outputs.append(whole(other(image)))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("ranks, dim", [(2, 3), (2, 2), (4, 2)])
def test_linear_layers_over_sharded_features(pool: Callable[[int], Pool], ranks: int, dim: int) -> None:
    pool(ranks).run(_classifies, ranks, dim)
