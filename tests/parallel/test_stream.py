"""A streamed model gives the plain one's outputs, gradients and buffers, within its budget."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchhalo
from models.streaming import result
from models.zoo import ZOO
from torchhalo.ops import randomness
from torchhalo.parallel.streaming import execute, prepare, schedule
from torchhalo.parallel.streaming.stream import size_of
from torchhalo.tools.observe import Case, observe


class Net(nn.Module):
    """Windows of all kinds, norms, a skip, a learned table, and two outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.group = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Conv2d(8, 3, 1)
        self.table = nn.Parameter(torch.randn(3, 1, 1))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        fine = F.relu(self.norm(self.stem(x)))
        coarse = F.silu(self.group(self.down(F.max_pool2d(fine, 3, 1, 1))))
        up = self.up(F.interpolate(coarse, scale_factor=2.0, mode="bilinear"))
        small = F.interpolate(up, size=x.shape[-2:], mode="nearest")
        out = self.head(torch.cat([fine, small], 1)) + self.table
        return {"out": out if scale is None else out * scale.view(-1, 1, 1, 1), "mean": coarse.mean((2, 3))}


def plain_and_streamed(model: nn.Module, **how: Any) -> tuple[nn.Module, nn.Module]:
    model = model.double()
    return model, torchhalo.stream(copy.deepcopy(model), **how)


def step(model: nn.Module, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs, gradients and buffers after a training step."""
    for x in inputs:
        x.grad = None
    outputs = model(*inputs)
    found = dict(outputs) if isinstance(outputs, dict) else {"out": outputs}
    torch.stack([value.sin().square().sum() for value in found.values()]).sum().backward()
    values = {name: value.detach() for name, value in found.items()}
    values |= {f"gradient of input {n}": x.grad for n, x in enumerate(inputs) if x.grad is not None}
    values |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return values | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Sums over the image are cut differently.
        atol = 1e-11 * max(1.0, float(value.abs().max()))
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
        assert found[name].stride() == value.stride() or value.numel() == 0


@pytest.mark.parametrize(
    "how, shape",
    [
        ({"shards": 1}, (1, 2, 16, 12)),
        ({"shards": 3}, (2, 2, 26, 12)),
        ({"shards": 5}, (1, 2, 8, 12)),  # some shards of the coarse level are empty
        ({"shards": 2, "dims": 3}, (1, 2, 12, 14)),
        ({"shards": (2, 3), "dims": (3, 2)}, (1, 2, 22, 16)),
    ],
)
@pytest.mark.slow
def test_a_training_step_is_that_of_the_plain_model(how: dict[str, Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain, streamed = plain_and_streamed(Net(), **how)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(shape[0], dtype=torch.float64, requires_grad=True)
    for _ in range(2):  # the second with what is known from the first
        assert_same(step(streamed, x, scale), step(plain, x, scale))
    assert streamed.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("name, shards", [("MONAI UNet (3-d)", 5), ("diffusers UNet2DModel", 2)])
@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="models are observed on the CPU")
def test_networks_of_the_field(pool, name: str, shards: int) -> None:
    """As `python -m models --kinds stream` checks more of them: in training mode, with little more memory than they need."""
    case = Case(ZOO[name].make, ZOO[name].inputs, None, True, True, torch.float64, 0)
    (alone,) = pool(1).run(observe, case, None)
    found = result(case, shards, alone)
    assert max(found.forward, found.step) <= 1e-9
    assert found.counted == found.foretold <= found.budget < found.free


class Attending(nn.Module):
    """Tokens that meet in a fused kernel, which torch counts among those that draw random numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2).unflatten(-1, (2, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


def test_attention_is_no_draw() -> None:
    """Each shard computes its own: what one shard drew is drawn for all."""
    x = torch.randn(1, 32, 8, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(torchhalo.stream(Attending(), shards=4)(x), Attending()(x))


def test_a_kernel_may_return_nothing_for_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN's attention does, where nobody asks for its logsumexp; here a layer norm, where nobody asks for statistics."""
    compute, norm = execute.Executor._compute, torch.ops.aten.native_layer_norm.default
    met = []

    def without_statistics(self: execute.Executor, shard: int, instruction: Any) -> None:
        if instruction.op is norm and len(instruction.results) == 3:
            met.append(shard)
            instruction = instruction._replace(op=lambda *args, **kwargs: (norm(*args, **kwargs)[0], None, None))
        compute(self, shard, instruction)

    monkeypatch.setattr(execute.Executor, "_compute", without_statistics)
    model, x = nn.LayerNorm(6), torch.randn(1, 2, 8, 6)
    with torch.no_grad():
        torch.testing.assert_close(torchhalo.stream(model, shards=2, dims=2)(x), model(x))
    assert set(met) == {0, 1}


def test_an_op_whose_rule_stock_dtensor_derives() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Hardswish(inplace=True))
    x = torch.randn(1, 1, 8, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(torchhalo.stream(copy.deepcopy(model), shards=2)(x), model(x))


def test_shards_that_draw_differently_are_refused() -> None:
    with torchhalo.torch_random(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DTensor's, of random numbers on a CPU
        with pytest.raises(
            NotImplementedError, match=r"aten\.bernoulli_\.float in the model draws other numbers on each shard"
        ):
            torchhalo.stream(nn.Dropout(), shards=2)(torch.ones(1, 1, 7, 5))


@pytest.mark.slow
def test_the_budget_is_never_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by what the executor really holds, and what a kernel of CUDA takes for itself while it runs; with weights, their
    gradients and constants on top.
    """

    peaks = []
    act = execute.Executor._act

    def counting(self: execute.Executor, action: schedule.Action) -> None:
        act(self, action)
        workspace = self._steps[action.shard][action.number].workspace if action.kind == "run" else 0
        peaks.append(sum(storage.nbytes() for storage in self._memory.values()) + workspace)

    monkeypatch.setattr(execute.Executor, "_act", counting)
    prepared = []
    made = prepare.prepare
    monkeypatch.setattr(prepare, "prepare", lambda *args: prepared.append(made(*args)) or prepared[-1])
    torch.manual_seed(0)
    x = torch.randn(1, 2, 48, 40, dtype=torch.float64, requires_grad=True)
    plain, free = plain_and_streamed(Net(), shards=4)
    expected = step(free, x)
    unlimited = prepared[-1].schedule.peak
    assert max(peaks) == unlimited
    peaks.clear()
    budget = prepared[-1].resident + unlimited // 3
    tight = torchhalo.stream(copy.deepcopy(plain), shards=4, memory=budget)
    assert_same(step(tight, x), expected)
    assert unlimited // 4 < max(peaks) <= budget - prepared[-1].resident
    assert prepared[-1].schedule.moved > prepared[0].schedule.moved


@pytest.mark.slow
def test_as_few_shards_as_the_budget_allows() -> None:
    torch.manual_seed(0)
    plain = Net().double().eval()
    x = torch.randn(1, 2, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        expected = plain(x)["out"]
        for memory, most in ((10**9, 1), (230_000, 8)):
            streamed = torchhalo.stream(copy.deepcopy(plain), memory=memory)
            torch.testing.assert_close(streamed(x)["out"], expected, rtol=0, atol=1e-12)
            (known,) = streamed.forward._prepared.values()
            assert 1 <= len(known.programs) <= most and (len(known.programs) > 1) == (most > 1)
            assert known.schedule.peak + known.resident <= memory
        with pytest.raises(schedule.BudgetError, match="bytes are needed at a time"):
            torchhalo.stream(copy.deepcopy(plain), memory=1000)(x)


def test_arrays_in_and_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.Conv3d(4, 2, 3, padding=1)).double()
    volume = np.lib.format.open_memmap(tmp_path / "in.npy", "w+", np.float64, (1, 1, 12, 10, 8))
    volume[:] = np.random.default_rng(0).standard_normal(volume.shape)
    out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", np.float64, (1, 2, 12, 10, 8))
    with torch.no_grad():
        expected = net(torch.tensor(volume)).cpu()  # arrays are on the host, and so is what is made of them
        streamed = torchhalo.stream(net, shards=4)
        torch.testing.assert_close(streamed(volume), expected, rtol=0, atol=1e-12)
        streamed(volume, out=out)
        torch.testing.assert_close(torch.from_numpy(out), expected, rtol=0, atol=1e-12)
        with pytest.raises(ValueError, match=r"`out` must have the shape \(1, 2, 12, 10, 8\)"):
            streamed(volume, out=np.zeros((1, 2, 3)))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.second(z)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def test_encode_and_decode() -> None:
    plain, streamed = plain_and_streamed(Autoencoder(), shards=3)
    x = torch.randn(1, 1, 9, 7, dtype=torch.float64)
    for method in ("forward", "encode", "decode"):
        given = x if method != "decode" else x.expand(1, 2, 9, 7)
        torch.testing.assert_close(getattr(streamed, method)(given), getattr(plain, method)(given), rtol=0, atol=1e-14)
    again = torchhalo.unstream(streamed)
    assert not {"forward", "encode", "decode"} & again.__dict__.keys()


class Dropping(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)
        self.checkpointed = checkpointed

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.dropout(F.dropout2d(self.first(x), 0.3), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_draws_do_not_depend_on_the_shards(checkpointed: bool) -> None:
    """Nor on checkpointing, which draws again, nor on what is tried once in a process; and the next step draws anew."""
    randomness._try.cache_clear()
    torch.manual_seed(0)
    model = Dropping(checkpointed).double()
    x = torch.randn(1, 1, 10, 9, dtype=torch.float64, requires_grad=True)
    results = []
    for case in ({"shards": 4}, {"shards": 1}, {"shards": 2, "dims": 3}):
        streamed = torchhalo.stream(copy.deepcopy(Dropping(False).double() if case == {"shards": 1} else model), **case)
        streamed.load_state_dict(model.state_dict())
        torch.manual_seed(5)
        results.append([step(streamed, x), step(streamed, x)])
        assert (results[-1][0]["out"] - results[-1][1]["out"]).abs().max() > 1e-3
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            assert_same(found, expected)


def test_a_loss_inside_and_labels() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Conv2d(1, 3, 3, padding=1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.net(x), labels)

    torch.manual_seed(0)
    plain, streamed = plain_and_streamed(WithLoss(), shards=3)
    x = torch.randn(1, 1, 10, 9, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(3, (1, 10, 9))
    assert_same(step(streamed, x, labels), step(plain, x, labels))


def test_an_optimizer_trains_it() -> None:
    torch.manual_seed(0)
    losses: list[list[float]] = []
    x = torch.randn(1, 2, 16, 12, dtype=torch.float64)
    for model in plain_and_streamed(Net(), shards=3):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x)["out"].square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-10) and losses[0][2] < losses[0][0]


def test_backward_runs_once() -> None:
    streamed = torchhalo.stream(nn.Conv2d(1, 1, 3, padding=1), shards=2)
    out = streamed(torch.randn(1, 1, 6, 6)).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"stream: backward ran already; what it needs is freed\. Call the model again"):
        out.backward()


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.inner(x).max().item() > 0 else x


def test_a_model_that_looks_at_values_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"stream: the model cannot be traced on shapes alone; aten\._local_scalar_dense"):
        torchhalo.stream(Looks(), shards=2)(torch.ones(1, 1, 6, 6))


@pytest.mark.parametrize(
    "how, message",
    [
        ({"shards": 0}, "`shards` must be positive, got 0"),
        ({"shards": (2, 2), "dims": 2}, r"`shards` \(=\(2, 2\)\) and `dims` \(=2\) must be as many"),
        ({"memory": "8 apples"}, "a number of bytes is written as 8GB or 500MiB, got '8 apples'"),
    ],
)
def test_wrong_settings(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        torchhalo.stream(nn.Identity(), **how)


def test_bytes_as_people_write_them() -> None:
    assert [size_of(text) for text in (7, "7", "2KB", "1.5 MiB", "8GB")] == [7, 7, 2000, 3 * 2**19, 8 * 10**9]


def test_autocast_and_channels_last() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1))
    plain, streamed = net, torchhalo.stream(copy.deepcopy(net), shards=3)
    x = torch.randn(1, 3, 18, 16).to(memory_format=torch.channels_last)
    with torch.autocast(DEVICE, torch.bfloat16), torch.no_grad():
        found, expected = streamed(x), plain(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert found.is_contiguous(memory_format=torch.channels_last)  # plain's group norm of CUDA returns a contiguous tensor
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


class Careful(nn.Module):
    """Under autocast, with one product in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix = nn.Conv2d(2, 8, 3, padding=1), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.autocast(x.device.type, enabled=False):
            return torch.einsum("nchw,cd->ndhw", y.float(), self.mix)


def test_autocast_is_that_of_the_call() -> None:
    """What a model computes in full precision under autocast stays so when it is replayed, and in the backward."""
    torch.manual_seed(0)
    plain = Careful()
    streamed = torchhalo.stream(copy.deepcopy(plain), shards=3)
    x = torch.randn(1, 2, 18, 16)
    for model in (plain, streamed):
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(x)
        out.square().mean().backward()
    expected = plain.mix.grad
    assert expected is not None and streamed.mix.grad is not None
    torch.testing.assert_close(streamed.mix.grad, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
