"""Training as the page "Training at scale" shows it: the numbers of one process, and each gradient on the wire once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, simulated, whole, wire
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import torchhalo
from torchhalo.parallel import gradients

pytestmark = pytest.mark.slow

STEPS = 20


class Block(nn.Module):
    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.convolution = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm = nn.GroupNorm(2, outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.convolution(x)))


class Net(nn.Module):
    """A small U-Net that makes a plain tensor of its own, in float64 and always with the same parameters."""

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.first = Block(2, 4)
            self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
            self.middle = Block(8, 8)
            self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
            self.last = Block(8, 4)
            self.head = nn.Conv2d(4, 1, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self._run(self.first, x)
        deep = self._run(self.middle, self.down(wide))
        joined = torch.cat([wide, self.up(deep)], dim=1)
        rows = torch.linspace(-1, 1, joined.shape[2], dtype=joined.dtype, device=joined.device).view(1, 1, -1, 1)
        return self.head(self._run(self.last, joined) + rows)

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)


def batches(count: int, device: str = DEVICE) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)

    def random(channels: int) -> torch.Tensor:
        return torch.randn(4, channels, 14, 10, dtype=torch.float64, generator=generator).to(device)

    return [(random(2), random(1)) for _ in range(count)]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [plain(parameter) for parameter in model.parameters()]


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-9) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


# Gradients.


def simulated_net(state: dict[str, torch.Tensor]) -> Net:
    """With the parameters of one process on every simulated rank, which draw numbers of their own."""
    net = Net().to(DEVICE)
    net.load_state_dict(state)
    return net


def first(tensor: torch.Tensor) -> torch.Tensor:
    """Of simulated ranks, which must agree, the value."""
    return whole(tensor).clone()


def paused(model: nn.Module) -> Any:
    return torchhalo.no_sync(model)


def trained(
    model: nn.Module,
    taken: list[tuple[torch.Tensor, torch.Tensor]],
    given: Callable[[torch.Tensor], torch.Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
    pause: Callable[[nn.Module], Any] | None = None,
) -> list[torch.Tensor]:
    """Three steps, each of two backwards, with clipping; the norms of the gradients and the parameters after that."""
    chosen = optimizer(model.parameters())
    norms = []
    for first, second in zip(taken[::2], taken[1::2], strict=True):
        if pause is None:
            F.mse_loss(model(given(first[0])), given(first[1])).backward()
        else:
            with pause(model):
                F.mse_loss(model(given(first[0])), given(first[1])).backward()
        F.mse_loss(model(given(second[0])), given(second[1])).backward()
        norms.append(plain(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        chosen.step()
        chosen.zero_grad()
    return [*norms, *parameters(model)]


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw foreach": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
}


@pytest.mark.parametrize(
    "optimizer, ranks, shape, dims",
    [("sgd", 3, (3,), (2,)), ("adamw foreach", 4, (2, 2), (0, 3)), ("adamw fused", 4, (2, 2), (2, 3))],
)
def test_accumulated_and_clipped(optimizer: str, ranks: int, shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    taken = batches(6)
    expected = trained(Net().to(DEVICE), taken, lambda x: x, OPTIMIZERS[optimizer])
    state = Net().to(DEVICE).state_dict()
    with simulated(ranks):
        mesh = init_device_mesh(DEVICE, shape)
        for pause in (None, paused):
            model = torchhalo.parallelize(simulated_net(state), mesh, dims=dims)
            got = trained(model, taken, lambda x, mesh=mesh: torchhalo.shard(x, mesh, dims), OPTIMIZERS[optimizer], pause)
            assert_equal([first(tensor) for tensor in got], expected)
            for parameter in model.parameters():
                assert all(isinstance(p, Replicate) for p in parameter.placements)


def backward(model: nn.Module, mesh: DeviceMesh, index: int = 0) -> None:
    image, target = (torchhalo.shard(x, mesh) for x in batches(index + 1)[index])
    F.mse_loss(model(image), target).backward()


def sums(sent: list[Any]) -> list[int]:
    """How many elements each all-reduce takes part with."""
    return [max(one.received.values()) for one in sent if one.name == "all_reduce"]


def test_each_gradient_is_summed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        model = torchhalo.parallelize(Net().to(DEVICE), mesh)
        with wire() as sent:
            backward(model, mesh)
        # Those of the norms are summed by the norms themselves.
        gradient = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
        within = [count for count in sums(sent) if count != gradient]
        assert sums(sent).count(gradient) == 1 and sums(sent)[-1] == gradient
        assert all(p.grad is not None and p.grad.placements == (Replicate(),) for p in model.parameters())
        with wire() as sent:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.optim.AdamW(model.parameters()).step()
        assert sent == []
        with torchhalo.no_sync(model), wire() as sent:
            model.zero_grad()
            backward(model, mesh)
        assert sums(sent) == within
        assert any(p.grad is not None and p.grad.placements[0].is_partial() for p in model.parameters())

        monkeypatch.setattr(gradients, "BUCKET", 300 * 8)
        model.zero_grad()
        with wire() as sent:
            backward(model, mesh)
        names = [one.name for one in sent]
        buckets = sorted(sums(sent))[-4:]
        assert sum(sums(sent)) == sum(within) + gradient
        assert max(buckets) < gradient
        last = len(names) - 1 - names[::-1].index("all_to_all_single")
        assert any(max(sent[at].received.values()) >= 300 for at in range(last) if names[at] == "all_reduce"), (
            "a full bucket leaves before the last halo of backward"
        )


def test_a_backward_that_fails_leaves_what_was_there_before() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such luck")

    state, taken = Net().to(DEVICE).state_dict(), batches(1)[0]
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        model = torchhalo.parallelize(simulated_net(state), mesh)
        image, target = (torchhalo.shard(x, mesh) for x in taken)
        F.mse_loss(model(image), target).backward()
        found = [[first(plain(p.grad)) for p in model.parameters()]]
        handle = model.middle.register_forward_hook(lambda module, args, output: Failing.apply(output))
        with pytest.raises(ValueError, match="no such luck"):
            F.mse_loss(model(image), target).backward()
        found.append([first(plain(p.grad)) for p in model.parameters()])
        handle.remove()
        model.zero_grad()
        F.mse_loss(model(image), target).backward()
        found.append([first(plain(p.grad)) for p in model.parameters()])
    one = Net().to(DEVICE)
    F.mse_loss(one(batches(1)[0][0]), batches(1)[0][1]).backward()
    for each in found:
        assert_equal(each, [plain(p.grad) for p in one.parameters()])


def test_copies_assigned_and_frozen_parameters() -> None:
    one = Net().to(DEVICE)
    image, target = batches(1)[0]
    F.mse_loss(one(image), target).backward()
    state = one.state_dict()
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        model = copy.deepcopy(torchhalo.parallelize(simulated_net(state), mesh))
        model.load_state_dict({key: value.detach().clone() for key, value in model.state_dict().items()}, assign=True)
        model.float().double().load_state_dict(state)
        model.down.requires_grad_(False)
        F.mse_loss(model(torchhalo.shard(image, mesh)), torchhalo.shard(target, mesh)).backward()
        assert model.down.weight.grad is None
        model.down.requires_grad_(True)
        model.zero_grad()
        F.mse_loss(model(torchhalo.shard(image, mesh)), torchhalo.shard(target, mesh)).backward()
        assert all(p.grad.placements == (Replicate(),) for p in model.parameters())
        got = [first(plain(p.grad)) for p in model.parameters()]
    assert_equal(got, [plain(p.grad) for p in one.parameters()])


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_that_are_differentiated_again() -> None:
    one, image = nn.Conv2d(2, 3, 3, padding=1).double().to(DEVICE), batches(1)[0][0]
    state = one.state_dict()

    def twice(model: nn.Module, image: torch.Tensor) -> list[torch.Tensor]:
        model(image).pow(3).sum().backward(create_graph=True)
        model(image).pow(3).sum().backward(create_graph=True)
        return list(torch.autograd.grad(model.weight.grad.square().sum(), [model.weight]))

    expected = twice(one, image)
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        model = nn.Conv2d(2, 3, 3, padding=1).double().to(DEVICE)
        model.load_state_dict(state)
        got = twice(torchhalo.parallelize(model, mesh), torchhalo.shard(image, mesh))
        assert model.weight.grad.placements == (Replicate(),)
        got = [first(plain(grad)) for grad in got]
    scale = float(expected[0].detach().abs().max())
    assert_equal([grad / scale for grad in got], [grad.detach() / scale for grad in expected])


def test_no_sync_wants_a_parallelized_model() -> None:
    with pytest.raises(ValueError, match=r"call torchhalo\.parallelize first"), torchhalo.no_sync(Net()):
        pass


# The page.
