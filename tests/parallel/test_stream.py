"""A streamed model gives the plain one's outputs, gradients and buffers, within its budget."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchhalo
from benchmarks import one_device_smoke
from models.streaming import result
from models.zoo import ZOO
from torchhalo.ops import randomness
from torchhalo.parallel.streaming import host, overlap, prepare, schedule, stream
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
    """Counted by what the executor really holds, with weights, their gradients and constants on top."""
    from torchhalo.parallel.streaming import execute

    peaks = []
    act = execute.Executor._act

    def counting(self: execute.Executor, action: schedule.Action) -> None:
        act(self, action)
        peaks.append(sum(storage.nbytes() for storage in self._memory.values()))

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


class Late:
    """A host whose copies are made as late as `wait` allows, and whose loads leave garbage until then."""

    def __init__(self) -> None:
        self.copies: dict[Any, torch.UntypedStorage] = {}
        self.saving: dict[Any, Callable[[], None]] = {}
        self.loading: dict[Any, Callable[[], None]] = {}

    def save(self, key: Any, storage: torch.UntypedStorage) -> None:
        copy = self.copies[key] = torch.UntypedStorage(storage.nbytes())
        self.saving[key] = lambda: copy.copy_(storage)

    def load(self, key: Any, storage: torch.UntypedStorage) -> bool:
        if key not in self.copies:
            return False
        if key in self.saving:
            self.saving.pop(key)()
        storage.fill_(255)
        copy = self.copies[key]
        self.loading[key] = lambda: storage.copy_(copy)
        return True

    def wait(self, key: Any, reading: bool = False) -> None:
        for pending in (self.loading,) if reading else (self.loading, self.saving):
            if key in pending:
                pending.pop(key)()

    def forget(self, key: Any) -> None:
        self.copies.pop(key, None)

    def close(self) -> None:
        self.copies.clear()


@pytest.mark.slow
def test_nothing_is_used_before_its_copy_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that a device makes beside computation are awaited, and what they read is not changed or let go before."""
    from torchhalo.parallel.streaming import execute

    hosts: list[Late] = []
    monkeypatch.setattr(execute, "host_for", lambda *args: hosts.append(Late()) or hosts[-1])
    searched = prepare.search
    monkeypatch.setattr(stream, "search", lambda *args: (found := searched(*args)).within(found.least))
    torch.manual_seed(0)
    x = torch.randn(1, 2, 32, 24, dtype=torch.float64, requires_grad=True)
    plain, streamed = plain_and_streamed(Net(), shards=3)
    assert_same(step(streamed, x), step(plain, x))
    assert [each for each in hosts if not each.saving and not each.loading] == hosts


class FakeStream:
    """Notes for what it waits; what is asked of it is done at once."""

    def __init__(self, device: object = None) -> None:
        self.waits: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waits.append(other)

    wait_event = wait_stream


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.stream = stream


def test_pinned_memory_is_lent_after_the_copies_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy waits for computation before it, and for the last copy of its memory; computation waits for what it needs."""
    compute = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    held = host.Pinned(torch.device("cpu"), host.Blocks(pinned=False))
    values = [torch.randn(host.Blocks.LARGE // 4 + 77), torch.randn(100), torch.randn(0)]
    for key, value in enumerate(values):
        held.save(key, value.untyped_storage())
    saved = dict(held._saving)
    held.wait(0, reading=True)
    assert not compute.waits, "a copy from it does not keep a kernel from reading it"
    held.wait(0)
    assert compute.waits == [saved[0]]
    for key, value in enumerate(values):
        loaded = torch.zeros_like(value)
        assert held.load(key, loaded.untyped_storage()) and torch.equal(loaded, value)
    assert held._inward.waits == [compute, saved[0], compute, saved[1], compute]
    loading = dict(held._loading)
    held.wait(1, reading=True)
    assert compute.waits[1:] == [loading[1]]
    held.forget(1)
    held.save("other", values[1].untyped_storage())
    assert held._outward.waits[-2:] == [compute, loading[1]], "its memory was that of 1"
    assert not held.load(1, values[1].untyped_storage())
    held.close()


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
        expected = net(torch.tensor(volume))
        streamed = torchhalo.stream(net, shards=4)
        torch.testing.assert_close(streamed(volume), expected, rtol=0, atol=1e-12)
        streamed(volume, out=out)
        torch.testing.assert_close(torch.tensor(out), expected, rtol=0, atol=1e-12)
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
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        found, expected = streamed(x), plain(x)
    assert found.dtype == expected.dtype == torch.bfloat16 and found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


class Careful(nn.Module):
    """Under autocast, with one product in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix = nn.Conv2d(2, 8, 3, padding=1), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            return torch.einsum("nchw,cd->ndhw", y.float(), self.mix)


def test_autocast_is_that_of_the_call() -> None:
    """What a model computes in full precision under autocast stays so when it is replayed, and in the backward."""
    torch.manual_seed(0)
    plain = Careful()
    streamed = torchhalo.stream(copy.deepcopy(plain), shards=3)
    x = torch.randn(1, 2, 18, 16)
    for model in (plain, streamed):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.square().mean().backward()
    expected = plain.mix.grad
    assert expected is not None and streamed.mix.grad is not None
    torch.testing.assert_close(streamed.mix.grad, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


class Deep(nn.Module):
    """Blocks of norm, activation and convolution, in place as MONAI has them, with skips and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(4))
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout2d(self.stem(x), 0.2)
        for number, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            y = layer(F.relu(norm(x), inplace=True))
            x = y.add_(x) if number % 2 else x + F.silu(y)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_computed_again_is_the_same(dtype: torch.dtype) -> None:
    """To the bit, with less on the host; and dropped numbers are not drawn anew."""
    x = torch.randn(1, 2, 40, 24, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    model = Deep().double()
    found = []
    for again in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if not again:
                patch.setattr(prepare, "recomputing", lambda program: program)
            calls: list[prepare.Prepared] = []
            searched = prepare.search

            def within(*args: Any) -> prepare.Prepared:
                free = searched(*args)  # noqa: B023
                calls.append(free.within(free.resident + free.schedule.peak // 3))  # noqa: B023
                return calls[-1]  # noqa: B023

            patch.setattr(stream, "search", within)
            for name, value in {"LAUNCH": 0.0, "RATE": 1e18, "FLOPS": 1e18}.items():  # so small an image is not worth a launch
                patch.setattr(overlap, name, value)
            streamed = torchhalo.stream(copy.deepcopy(model), shards=3)
            torch.manual_seed(5)
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float64):
                found.append((step(streamed, x), calls[0]))
    (kept, before), (computed, after) = found
    assert after.programs is not after.traced and before.programs is before.traced
    assert after.schedule.host < before.schedule.host and after.schedule.moved < before.schedule.moved
    for name, value in kept.items():
        assert torch.equal(computed[name], value), name
    if dtype == torch.float64:
        torch.manual_seed(5)
        assert_same(computed, step(torchhalo.stream(copy.deepcopy(model), shards=1), x))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in one_device_smoke.cases("cuda")])
def test_on_a_gpu(cuda: str, name: str) -> None:
    """Models of the benchmark's smoke, in two calls each: the plain model's numbers, and memory as foretold."""
    row = dict(one_device_smoke.cases(cuda))[name]()
    # Inputs and outputs on the device, and what kernels take for themselves, come on top.
    assert row["tight peak MiB"] < row["tight planned MiB"] + row["on top MiB"]
