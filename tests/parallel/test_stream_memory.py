"""What a streamed model keeps, copies and computes again: nothing is used before it is there, and the numbers do not change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE
from test_stream import Net, assert_same, plain_and_streamed, step
from torch import nn

import torchhalo
from benchmarks import one_device_smoke
from torchhalo.kernels import group_norm, norms
from torchhalo.parallel.streaming import execute, host, overlap, prepare, stream
from torchhalo.torch_internals import recording


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
    values = [torch.randn(size, device="cpu") for size in (host.Blocks.LARGE // 4 + 77, 100, 0)]
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


class Deep(nn.Module):
    """Blocks of norm, activation and convolution, in place as MONAI has them, with skips and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 16, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(4))
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout2d(self.stem(x), 0.2, self.training)
        for number, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            y = layer(F.relu(norm(x), inplace=True))
            x = y.add_(x) if number % 2 else x + F.silu(y)
        return x


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels give the same bits twice, which those of CUDA do not otherwise, or raise."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic")
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
            with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float64):
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


@pytest.mark.slow
def test_kernels_that_torch_does_not_know_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group norm by Triton, here by its interpreter: written down as one op, and computed again where that is cheap."""
    import interpreted  # noqa: F401, skips where the interpreter does not run

    monkeypatch.setattr(group_norm, "usable", lambda tensor: recording.is_recording() or recording.is_fake(tensor))
    for name, value in {"LAUNCH": 0.0, "RATE": 1e18, "FLOPS": 1e18}.items():
        monkeypatch.setattr(overlap, name, value)
    calls: list[prepare.Prepared] = []
    searched = prepare.search

    def within(*args: Any) -> prepare.Prepared:
        free = searched(*args)
        calls.append(free.within(free.resident + free.schedule.peak // 2))
        return calls[-1]

    monkeypatch.setattr(stream, "search", within)
    torch.manual_seed(0)
    plain, streamed = plain_and_streamed(Deep().eval(), shards=2)
    x = torch.randn(1, 2, 12, 8, dtype=torch.float64, requires_grad=True)
    assert_same(step(streamed, x), step(plain.eval(), x))
    (found,) = calls
    names = [str(each.op) for program in found.programs for each in program.instructions]
    assert {"torchhalo::statistics", "torchhalo::merged", "torchhalo::products", "torchhalo::input_gradient"} <= set(names)
    again = sum(name == "torchhalo::applied" for name in names)
    assert again > sum(name == "torchhalo::statistics" for name in names), "passes that are computed again"


def test_a_batch_norm_says_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU has kernels that update running statistics in secret, what is written down is made of other ops."""
    monkeypatch.setattr(norms, "FUSED", {"cpu"})
    torch.manual_seed(0)
    plain, streamed = plain_and_streamed(nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)).float(), shards=3)
    x = torch.randn(1, 2, 12, 8, dtype=torch.float64, requires_grad=True)
    assert_same(step(streamed, x), step(plain, x))
