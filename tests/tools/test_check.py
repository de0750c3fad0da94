"""`torchhalo check`: says exact of what is, and finds what differs, gathers or raises."""

from __future__ import annotations

import math
import multiprocessing
import time

import gathering  # noqa: F401, the rule of `median`
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pools import PRELOAD
from torch import nn
from torch.distributed.tensor import DTensor

import torchhalo
from torchhalo.tools.check import _difference
from torchhalo.tools.cli import main

pytestmark = pytest.mark.slow


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype).bernoulli_(0.8)
        return x + self.body(x.float()) * kept


def right() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.MaxPool2d(3, 2), Residual(), nn.Upsample(scale_factor=4)
    )


class Wrong(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.001 if isinstance(x, DTensor) else x


class Medians(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.median(2, keepdim=True)[0].expand_as(x)


def wrong() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), Wrong()), Medians())


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor) and dist.get_rank() == 1:
            raise ValueError("no such luck")
        return x


def raises() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(Raises(), nn.Conv2d(4, 4, 3)))


class Clip(torch.autograd.Function):
    """An op whose forward is right on shards; its backward divides by the largest gradient, on shards by that of the shard."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        if not isinstance(grad, DTensor):
            return grad / grad.abs().max()
        local = grad.to_local()
        return DTensor.from_local(local / local.abs().max(), grad.device_mesh, grad.placements, run_check=False)


class Clipped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Clip.apply(x)


def wrong_backward() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Sequential(nn.ReLU(inplace=True), Clipped()), Skips(), nn.Conv2d(4, 2, 1)
    )


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x)


class Shifted(nn.Module):
    """Rolls each shard for itself: silently wrong on ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return x.roll(1, 2)
        return DTensor.from_local(x.to_local().roll(1, 2), x.device_mesh, x.placements, run_check=False)


def wrong_forward() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Sequential(nn.GELU(), Shifted()), nn.Conv2d(4, 2, 3, padding=1))


@torch.library.custom_op("torchhalo_tests::negated", mutates_args=())
def negated(x: torch.Tensor) -> torch.Tensor:
    return -x


class Negates(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + negated(x.detach())


def unknown_op() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Sequential(nn.ReLU(), Negates()))


class Doubled(torch.autograd.Function):
    """Multiplies by a plain tensor in its backward, where no scope takes it as replicated."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.full((grad.shape[-1],), 2.0, dtype=grad.dtype)


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)


def mixed_backward() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), Doubles()), nn.Conv2d(4, 4, 1))


class Codec(nn.Module):
    """Something with a method of its own, which calls what `forward` does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def paint(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"image": self.inner(x)}


def to_labels(returned: dict[str, torch.Tensor]) -> torch.Tensor:
    image = returned["image"]
    labels = torch.arange(image.shape[2] * image.shape[3]).view(1, *image.shape[2:]) % 4
    return F.cross_entropy(image, labels)


def no_scalar(returned: dict[str, torch.Tensor]) -> torch.Tensor:
    return returned["image"]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start as copies of a process that has imported torch; a start of their own takes seconds for each."""

    start = torch.multiprocessing.start_processes

    def forked(*args: object, **options: object) -> object:
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
        return start(*args, **options | {"start_method": "forkserver"})

    monkeypatch.setattr(torch.multiprocessing, "start_processes", forked)


def test_a_right_model(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", "test_check:right", "--input", "3,3,33,28", "--mesh", "2x2", "--backward"])
    shown = capsys.readouterr()
    assert status == 0, shown
    assert "mesh 2x2: exact, sharded" in shown.out and "first " not in shown.out
    for kind in ("outputs", "input gradients", "gradients", "buffers"):
        assert f"\n  {kind} " in shown.out
    assert "gathered: 0 bytes" in shown.out and "rank 3:" in shown.out and " bytes\n" in shown.out.partition("; sent ")[2]
    assert "one process" in shown.err and "4 ranks" in shown.err


@pytest.mark.usefixtures("forked")
def test_what_differs_and_what_gathers() -> None:
    report = torchhalo.check(wrong, (1, 3, 16, 16), ranks=2)
    assert not report.exact and not report.sharded and not report.ok
    assert report.first == "1.1"
    assert 1e-4 < report.differences["outputs"][0] < 1e-2
    (gather,) = report.gathered
    assert gather[:3] == ("aten.median.dim", "2", 1) and gather[3] == 4 * 7 * 14 * 8
    assert report.sent == [3 * 16 * 8] * 2, "a row to each other"
    text = str(report)
    assert "NOT EXACT, GATHERS" in text and "first module that differs: 1.1" in text and "aten.median.dim in 2" in text


@pytest.mark.usefixtures("forked")
def test_a_wrong_forward_is_located() -> None:
    report = torchhalo.check(wrong_forward, (1, 3, 12, 10), ranks=2, backward=True)
    assert not report.exact and report.first == "1.1" and report.sharded
    assert report.first_backward == "of the output of 1.0, made by the backward of 1.1"


@pytest.mark.usefixtures("forked")
def test_a_wrong_backward_is_located() -> None:
    report = torchhalo.check(wrong_backward, (1, 3, 12, 10), ranks=2, backward=True)
    assert not report.exact and report.first is None and report.differences["outputs"][0] <= report.tolerance
    assert report.first_backward == "of the output of 1.0, made by the backward of 1.1"
    assert "\n\n  first gradient that differs: of the output of 1.0, made by the backward of 1.1\n" in str(report)


@pytest.mark.usefixtures("forked")
def test_a_method_and_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "test_check:Codec", "--input", "1,3,12,10", "--backward", "--method", "paint"]
    assert main([*command, "--loss", "test_check:to_labels"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {kind} " in shown for kind in ("outputs", "loss", "gradients", "input gradients")), shown
    alone = torchhalo.check(Codec, (1, 3, 12, 10), backward=True)
    assert "gradients" not in alone.differences, "`forward` has no parameter"
    for wrong, message in (
        ({"loss": no_scalar}, "the loss must be a tensor of one element, got a tensor of shape (1, 4, 12, 10)"),
        ({"method": "encode"}, "Codec has no method 'encode'"),
    ):
        report = torchhalo.check(Codec, (1, 3, 12, 10), **{"method": "paint", **wrong})
        assert report.error is not None and message in report.error, report


@pytest.mark.usefixtures("forked")
def test_what_to_do_about_a_model_that_raises() -> None:
    report = torchhalo.check(unknown_op, (1, 3, 12, 10), ranks=2, backward=True)
    assert report.error is not None and report.error.startswith("torchhalo_tests.negated.default in 1.1: "), report
    assert report.remedy is not None and "write it with ops of docs/ops.md" in report.remedy, report
    assert f"what to do: {report.remedy}" in str(report)


@pytest.mark.usefixtures("forked")
def test_a_plain_tensor_made_in_a_backward() -> None:
    """There the model is not running, and its permission to mix plain tensors with sharded ones still holds."""
    report = torchhalo.check(mixed_backward, (1, 3, 12, 10), ranks=2, backward=True)
    assert report.ok, report


@pytest.mark.usefixtures("forked")
def test_a_model_that_fails_in_one_process_already() -> None:
    report = torchhalo.check(right, (1, 4, 12, 10), ranks=2)
    assert report.error is not None and report.error.startswith("in one process already: ") and "in 0: " in report.error
    assert report.remedy is not None and "without torchhalo too" in report.remedy


@pytest.mark.usefixtures("forked")
def test_a_model_that_raises_on_one_rank() -> None:
    start, before = time.monotonic(), set(multiprocessing.active_children())
    report = torchhalo.check(raises, (1, 3, 16, 16), ranks=2, backward=True)
    assert not report.ok and report.error == "in 1.0: ValueError: no such luck"
    assert "the model raised\n  in 1.0: ValueError: no such luck\n  what to do: " in str(report)
    assert set(multiprocessing.active_children()) <= before
    assert time.monotonic() - start < 50, "the other rank was ended, not waited for"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["test_check:right", "--input", "1,3,8"], "mesh of 2 axes"),
        (["test_check:right", "--input", "1,3,8,8", "--dims", "2"], "--dims names 1 dims, the mesh has 2 axes"),
        (["test_check:right", "--input", "1,3,8,8", "--dims", "2,7"], "must be dims of the tensor"),
        (["test_check:right", "--input", "1,x"], "wants sizes with commas between"),
        (["test_check:nothing", "--input", "1,3,8,8"], "no function 'nothing' in a module 'test_check'"),
        (["no_such_module:f", "--input", "1,3,8,8"], "No module named 'no_such_module'"),
        (["right", "--input", "1,3,8,8"], "named as package.module:function"),
        (
            ["test_check:right", "--input", "1,3,8,8", "--loss", "test_check:none"],
            "no function 'none' in a module 'test_check'",
        ),
        (["test_check:right"], "--input"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments, "--mesh", "2x2"])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_infinities_that_are_equal_do_not_differ() -> None:
    """A buffer may hold a limit that nothing has set yet."""
    limits = torch.tensor([-math.inf, 2.0, math.inf])
    assert _difference(limits, limits.clone()) == 0.0
    assert _difference(limits, torch.tensor([-math.inf, 3.0, math.inf])) == 0.5
    assert _difference(limits, -limits) == math.inf == _difference(limits, limits / 0 * 0)
