"""`torchhalo check`: says exact of what is, and finds what differs, gathers or raises."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import torchhalo
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


class Sorts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(2)[0]


def wrong() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), Wrong()), Sorts())


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor) and dist.get_rank() == 1:
            raise ValueError("no such luck")
        return x


def raises() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(Raises(), nn.Conv2d(4, 4, 3)))


def test_a_right_model(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["check", "test_check:right", "--input", "3,3,33,28", "--mesh", "2x2", "--backward"])
    shown = capsys.readouterr()
    assert status == 0, shown
    assert "mesh 2x2: exact, sharded" in shown.out and "first module" not in shown.out
    for kind in ("outputs", "input gradients", "gradients", "buffers"):
        assert f"\n  {kind} " in shown.out
    assert "gathered: 0 bytes" in shown.out and "rank 3:" in shown.out and " bytes\n" in shown.out.partition("; sent ")[2]
    assert "one process" in shown.err and "4 ranks" in shown.err


def test_what_differs_and_what_gathers() -> None:
    report = torchhalo.check(wrong, (1, 3, 16, 16), ranks=2)
    assert not report.exact and not report.sharded and not report.ok
    assert report.first == "1.1"
    assert 1e-4 < report.differences["outputs"][0] < 1e-2
    (gather,) = report.gathered
    assert gather[:3] == ("aten.sort.default", "2", 1) and gather[3] == 4 * 7 * 14 * 8
    assert report.sent == [3 * 16 * 8] * 2, "a row to each other"
    text = str(report)
    assert "NOT EXACT, GATHERS" in text and "first module that differs: 1.1" in text and "aten.sort.default in 2" in text


def test_a_model_that_raises_on_one_rank() -> None:
    start, before = time.monotonic(), set(multiprocessing.active_children())
    report = torchhalo.check(raises, (1, 3, 16, 16), ranks=2, backward=True)
    assert not report.ok and report.error == "in 1.0: ValueError: no such luck"
    assert "the model raised\n  in 1.0: ValueError: no such luck" in str(report)
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
        (["test_check:right"], "--input"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments, "--mesh", "2x2"])
    assert ended.value.code == 2 and message in capsys.readouterr().err
