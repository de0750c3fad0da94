"""A rank that dies, is late or does something else: every other one ends in time, with an error that says what differs."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, simulated
from pages import execute, snippet
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_module

import torchhalo
from torchhalo.exchange import debug
from torchhalo.tools import launch

TIMEOUT = timedelta(seconds=4)
NCCL_TIMEOUT = timedelta(seconds=20)  # the first collective waits for all to have started CUDA and compiled kernels
SLACK = 10.0  # of a busy machine


class Ended(NamedTuple):
    """How a process ended, and what it said on the way: the error, or nothing, and the seconds that it took, by case."""

    status: int
    said: dict[str, tuple[str, float]]


class Rank:
    """One process, which writes down what comes of each case, so that it is known also if the process is killed."""

    def __init__(self, folder: Path, rank: int):
        self._folder, self._rank = folder, rank

    def join(self, ranks: int, device: str = "cpu", timeout: timedelta = TIMEOUT) -> DeviceMesh:
        """Leave the world for a new one of the first ``ranks``; a mesh of it."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._worlds = getattr(self, "_worlds", 0) + 1
        world = self._folder / f"world-{self._worlds}"
        world.mkdir(exist_ok=True)
        launch.join(self._rank, ranks, world, timeout, device)
        return init_device_mesh(device, (ranks,))

    def case(self, name: str, work: Callable[[], object]) -> None:
        start, error = time.monotonic(), ""
        try:
            work()
        except RuntimeError as raised:
            error = str(raised)
        with open(self._folder / f"{self._rank}.said", "a") as file:
            file.write(json.dumps([name, error, time.monotonic() - start]) + "\n")

    def until_others_said(self, name: str, others: list[int]) -> None:
        """Return when the other ranks are through with a case."""
        while any(name not in said(self._folder, rank) for rank in others):
            time.sleep(0.05)


def said(folder: Path, rank: int) -> dict[str, tuple[str, float]]:
    file = folder / f"{rank}.said"
    lines = file.read_text().splitlines() if file.exists() else []
    return {name: (error, seconds) for name, error, seconds in map(json.loads, lines)}


def serve(rank: int, folder: Path, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    work(Rank(folder, rank), rank, *args)


def run(folder: Path, work: Callable[..., None], *args: Any) -> list[Ended]:
    """``work`` in three processes, until they end by themselves, or stay behind."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=serve, args=(rank, folder, work, args), daemon=True) for rank in range(3)]
    for process in processes:
        process.start()
    end = time.monotonic() + 200
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    left = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    assert not left, f"ranks {left} stayed behind; said: {[said(folder, rank) for rank in range(3)]}"
    return [Ended(process.exitcode or 0, said(folder, rank)) for rank, process in enumerate(processes)]


def nothing() -> None:
    pass


class Net(nn.Module):
    """Two layers in one order or the other, with something done between them, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(3, 1, 1)
        self.first, self.second = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))
        self.order = "first", "second"
        self.forward_fault: Callable[[], None] = nothing
        self.backward_fault: Callable[[], None] = nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(x)
        x = getattr(self, self.order[0])(x)
        self.forward_fault()
        x.register_hook(lambda grad: self.backward_fault())
        return getattr(self, self.order[1])(x)


def net(mesh: DeviceMesh) -> Net:
    torch.manual_seed(0)
    return distribute_module(Net(), mesh)


def step(model: Net, mesh: DeviceMesh, shape: tuple[int, ...] = (1, 2, 12, 12), dtype: torch.dtype = torch.float32) -> None:
    model(torchhalo.shard(torch.ones(shape, dtype=dtype), mesh, 2)).to_local().sum().backward()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def faults(rank: Rank, number: int, docs: str, folder: Path) -> None:
    """One after the other; where ranks compare, nothing is sent after a difference, and they go on in the same world."""
    torchhalo.enable()
    rank.case("ready", nothing)
    rank.until_others_said("ready", [0, 1, 2])  # a process may start later than the timeout
    mesh, wrong = rank.join(3), number == 2
    model = net(mesh)
    rank.case("right", lambda: step(model, mesh))
    rank.case("shape", lambda: step(model, mesh, (1, 2, 12, 13 if wrong else 12)))
    rank.case("dtype", lambda: step(model, mesh, dtype=torch.float64 if wrong else torch.float32))
    model.order = ("second", "first") if wrong else ("first", "second")
    rank.case("order", lambda: step(model, mesh))
    model.order = "first", "second"
    names = {"torch": torch, "nn": nn, "torchhalo": torchhalo, "init_device_mesh": init_device_mesh}
    rank.case("docs", lambda: execute(docs, names))
    model.forward_fault = (lambda: rank.until_others_said("late", [0, 1])) if wrong else nothing
    rank.case("late", lambda: step(model, mesh))
    debug.compare(False)
    rank.case("agree", lambda: debug.agree("the input", {"shape": (1, 2), "dtype": torch.float32}, mesh))
    rank.case("disagree", lambda: debug.agree("the input", {"shape": (1, 2 + wrong), "dtype": torch.float32}, mesh))
    parallel = torchhalo.parallelize(Net(), mesh)
    rank.case("inputs", lambda: parallel(torch.ones(1, 2, 12, 12 + wrong)))
    rank.case("parameters", lambda: torchhalo.parallelize(nn.Conv2d(2, 2 + wrong, 3), mesh))
    model.forward_fault = (lambda: rank.until_others_said("late, not compared", [0, 1])) if wrong else nothing
    rank.case("late, not compared", lambda: step(model, mesh))
    debug.compare(True)
    mesh = rank.join(3)
    model = net(mesh)
    model.backward_fault = die if wrong else nothing
    rank.case("killed", lambda: step(model, mesh))
    debug.compare(False)
    mesh = rank.join(2)
    model = net(mesh)
    # What holds without a comparison: gloo ends the process that is sent more than it expects, here the first, which then
    # prints where it was, and says nothing to one that is sent less, which learns of it at the next op.
    os.dup2(os.open(folder / f"{number}.stderr", os.O_WRONLY | os.O_CREAT), 2)
    rank.case("shape, not compared", lambda: step(model, mesh, (1, 2, 12, 12 + number)))


@pytest.mark.slow
def test_other_ranks_end_in_time_and_say_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHHALO_DEBUG", "1")
    # What gloo does with a fault: where there is a GPU, a mesh of its world makes a group with torch's own timeout.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TORCHHALO_TEST_DEVICE", "cpu")
    ended = run(tmp_path, faults, snippet("training", "Faults"), tmp_path)
    assert [each.status for each in ended] == [-signal.SIGABRT, 0, -signal.SIGKILL]
    trace = (tmp_path / "0.stderr").read_text()
    assert all(text in trace for text in ("Fatal Python error: Aborted", "/torchhalo/ops/", " in forward", " in step")), trace

    image, wider, double = (
        f"{shape} {dtype} Shard(dim=2)"
        for shape, dtype in (((1, 2, 12, 12), "float32"), ((1, 2, 12, 13), "float32"), ((1, 2, 12, 12), "float64"))
    )
    pool, apart = "at max_pool2d_with_indices in `pool`, self", "the ranks are not in step: rank 2 is {}; ranks 0, 1 are {}"
    backward = "convolution_backward in `{}`, backward, grad_output " + image
    late = "killed, late, or stopped by an error. rank 2"
    expected = {
        "ready": "",
        "right": "",
        "shape": apart.format(f"{pool} {wider}", f"{pool} {image}"),
        "dtype": apart.format(f"{pool} {double}, packet float64", f"{pool} {image}, packet float32"),
        "order": apart.format(f"at convolution in `second`, input {image}", f"at convolution in `first`, input {image}"),
        "docs": snippet("training", "Faults", "text").removeprefix("RuntimeError: ").strip(),
        "late": f"rank 2 did not come to convolution in `second`, input {image} within 4 s: {late} was last seen at "
        f"convolution in `first`, input {image}",
        "agree": "",
        "disagree": apart.format("at the input, shape (1, 3)", "at the input, shape (1, 2)"),
        "inputs": apart.format(
            "at the inputs of Net, input 0 (1, 2, 12, 13) float32", "at the inputs of Net, input 0 (1, 2, 12, 12) float32"
        ),
        "parameters": apart.format(
            "at the parameters of Conv2d, weight (3, 2, 3, 3) float32, bias (3,) float32",
            "at the parameters of Conv2d, weight (2, 2, 3, 3) float32, bias (2,) float32",
        ),
        "late, not compared": "convolution: no data from another rank",
        "killed": f"rank 2 did not come to {backward.format('first')} within 4 s: {late} was last seen at "
        f"{backward.format('second')}",
        "shape, not compared": ": no data from another rank",
    }
    for each, ending in zip(ended, (["killed"], ["killed", "shape, not compared"], []), strict=True):
        assert list(each.said) == list(expected)[:-2] + ending
        for name, (error, seconds) in each.said.items():
            if "not compared" in name:
                assert expected[name] in error and "TORCHHALO_DEBUG=1" in error
            else:
                assert error == expected[name]
            assert seconds < TIMEOUT.total_seconds() + SLACK


def faults_on_nccl(rank: Rank, number: int, compared: bool) -> None:
    """The last rank is killed in the backward pass; without a comparison the others hear nothing, and wait on the GPU."""
    torchhalo.enable()
    rank.case("ready", nothing)
    rank.until_others_said("ready", [0, 1, 2])
    mesh, wrong = rank.join(3, "cuda", NCCL_TIMEOUT), number == 2
    model = net(mesh)

    def synchronised() -> None:
        step(model, mesh)
        torch.cuda.synchronize()

    debug.compare(compared)
    rank.case("right", synchronised)
    rank.case("compared", lambda: step(model, mesh, (1, 2, 12, 13 if wrong and compared else 12)))
    model.backward_fault = die if wrong else nothing
    rank.case("killed", synchronised)


@pytest.mark.slow
@pytest.mark.parametrize("compared", [True, False])
@pytest.mark.skipif(DEVICE != "cuda", reason="NCCL needs a GPU")
def test_other_ranks_of_nccl_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compared: bool) -> None:
    """With an error that names the rank where they compare; else NCCL's watchdog ends them, or they hear of a lost socket."""
    if not compared:  # else the process would be ended before the ranks have given the killed one up
        monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    ended = run(tmp_path, faults_on_nccl, compared)
    assert ended[2].status == -signal.SIGKILL and "killed" not in ended[2].said
    for each in ended[:2]:
        assert each.said["right"][0] == ""
        assert ("the ranks are not in step: rank 2 is at max_pool2d_with_indices" in each.said["compared"][0]) == compared
        if compared:
            error, seconds = each.said["killed"]
            assert error.startswith("rank 2 did not come to convolution_backward in `first`, backward")
            assert seconds < NCCL_TIMEOUT.total_seconds() + SLACK
        else:
            assert each.status or each.said["killed"][0]


def place(at: str, sends: dict[int, int] | None = None, expects: dict[int, int] | None = None, **facts: str) -> debug.Record:
    return {"place": at, "facts": facts, "sends": sends or {}, "expects": expects or {}}


def meet(visits: dict[int, debug.Record], limit: float = 10.0, late: int | None = None) -> list[str]:
    """The error that each rank gets at a new desk; one may come after the others have gone."""
    store, errors, gone = dist.HashStore(), {}, threading.Barrier(len(visits))

    def visit(rank: int) -> None:
        if rank == late:
            gone.wait()
        try:
            debug.Rendezvous(store, rank).meet(tuple(visits), visits[rank], timedelta(seconds=limit))
            errors[rank] = ""
        except RuntimeError as error:
            errors[rank] = str(error)
        if late not in (None, rank):
            gone.wait()

    threads = [threading.Thread(target=visit, args=(rank,)) for rank in visits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [errors[rank] for rank in visits]


@pytest.mark.parametrize("late", [1, 6])
def test_one_who_comes_late_gets_the_error_of_the_others(late: int) -> None:
    errors = meet({rank: place("conv") for rank in (1, 4, 6)}, 1.0, late)
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"rank {late} did not come to conv within 1 s") and errors[0].endswith(
        "before it met any other"
    )


def test_what_one_sends_is_what_the_other_expects() -> None:
    fitting = {0: place("conv", {0: 0, 1: 4}, {0: 0, 1: 6}), 1: place("conv", {0: 6, 1: 0}, {0: 4, 1: 0})}
    assert meet(fitting) == ["", ""]
    fitting[1]["expects"][0] = 5
    assert meet(fitting) == ["at conv rank 0 sends 4 elements to rank 1, which expects 5"] * 2


def test_settings_are_told_where_they_differ() -> None:
    records = {rank: place("conv", input="(8,)", stride="[1]", pad="[2]" if rank == 1 else "[0]") for rank in range(4)}
    assert debug.difference(records) == (
        "the ranks are not in step: rank 1 is at conv, input (8,), pad [2]; ranks 0, 2, 3 are at conv, input (8,), pad [0]"
    )
    records = {0: place("conv", input="(8,)"), 1: place("conv", input="(8,)", bias="(2,)")}
    assert debug.difference(records).endswith("rank 0 is at conv, input (8,); rank 1 is at conv, input (8,), bias (2,)")


def test_the_store_does_not_grow() -> None:
    store, sizes = dist.HashStore(), []
    desks = [debug.Rendezvous(store, rank) for rank in range(2)]

    def visit(desk: debug.Rendezvous) -> None:
        for _ in range(20):
            desk.meet((0, 1), place("conv"), TIMEOUT)
            sizes.append(store.num_keys())

    threads = [threading.Thread(target=visit, args=(desk,)) for desk in desks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sizes) == 40 and max(sizes) <= 2 + 3 * 3


def test_simulated_ranks_are_not_compared() -> None:
    """They are one process, which would wait for itself."""
    debug.compare(True)
    try:
        with simulated(2):
            mesh = init_device_mesh(DEVICE, (2,))
            debug.agree("the input", {"shape": (1, 2)}, mesh)
            step(net(mesh), mesh)
    finally:
        debug.compare(False)
