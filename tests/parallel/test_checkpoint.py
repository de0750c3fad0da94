"""Checkpoints: any number of ranks reads what any other wrote, and goes on with the numbers of a run that never stopped."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import DEVICE
from pages import execute, snippet
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrun import finish, start

import torchhalo

BEFORE, AFTER = 2, 2  # steps before the checkpoint and after it
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
}


class Net(nn.Module):
    """With buffers, a weight that two modules share, a frozen parameter and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        # No bias before the norm: its gradient is zero but for rounding, which AdamW would blow up.
        self.first = nn.Conv2d(1, 5, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(5)
        self.second = nn.Conv2d(5, 5, 3, padding=1)
        self.third = nn.Conv2d(5, 5, 3, padding=1)
        self.third.weight = self.second.weight
        self.last = nn.Conv2d(5, 1, 1)
        self.last.bias.requires_grad_(False)
        self.spare = nn.Linear(2, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.norm(self.first(x)))
        return self.last(self.third(F.relu(self.second(y))))


@functools.cache
def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh(DEVICE, shape, mesh_dim_names=("data", "space")[-len(shape) :])


def made(kind: str) -> tuple[nn.Module, DeviceMesh | None]:
    """A model with its first parameters, made ready in one of several ways, and the mesh over which samples are cut."""
    torch.manual_seed(1)
    model = Net()
    if kind == "plain":
        return model, None
    ranks = dist.get_world_size()
    if kind == "parallelized":
        return torchhalo.parallelize(model, mesh_of(ranks)), mesh_of(ranks)
    space = mesh_of(2, ranks // 2)["space"]
    if kind == "ddp":
        model.spare.requires_grad_(False)
        return torchhalo.parallelize(DistributedDataParallel(model), space), space
    return torchhalo.parallelize(fully_shard(model, mesh=mesh_of(ranks)), space), space


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        image, target = torch.randn(2, 2, 1, 7, 5, dtype=torch.float64, generator=generator).to(next(model.parameters()).device)
        optimizer.zero_grad()
        F.mse_loss(model(image), target if mesh is None else torchhalo.shard(target, mesh)).backward()
        optimizer.step()


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All of the model's state as plain tensors, with the keys of the plain model."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def save_some(folder: str, kind: str, name: str) -> None:
    model, mesh = made(kind)
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, mesh, range(BEFORE))
    torchhalo.Checkpoints(folder).save(BEFORE, model, optimizer, rng=torch.arange(3), note=(kind, name))


def go_on(folder: str, kind: str, source: str, name: str) -> None:
    """Load what a model of kind ``source`` saved, and end where one process ends that never stopped."""
    expected, _ = made("plain")
    if source == "ddp":
        expected.spare.requires_grad_(False)
    optimizer = OPTIMIZERS[name](expected.parameters())
    train(expected, optimizer, None, range(BEFORE + AFTER))

    model, mesh = made(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = OPTIMIZERS[name](model.parameters())
    checkpoints = torchhalo.Checkpoints(folder)
    assert checkpoints.latest() == BEFORE
    found = checkpoints.load(model, optimizer)
    assert found is not None and found.pop("rng").tolist() == [0, 1, 2]
    assert found == {"step": BEFORE, "note": (source, name)}
    train(model, optimizer, mesh, range(BEFORE, BEFORE + AFTER))
    for (key, value), (other, got) in zip(expected.state_dict().items(), parameters_of(model).items(), strict=True):
        assert key == other
        torch.testing.assert_close(got, value, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("source", ["parallelized", "fsdp", "ddp"])
def test_four_ranks_save_and_others_go_on(pool, tmp_path: Path, source: str, name: str) -> None:
    pool(4).run(save_some, str(tmp_path), source, name)
    go_on(str(tmp_path), "plain", source, name)
    if source == "parallelized":
        pool(3).run(go_on, str(tmp_path), "parallelized", source, name)
        with one_rank():
            go_on(str(tmp_path), "parallelized", source, name)
    pool(2).run(go_on, str(tmp_path), "fsdp" if source == "parallelized" else "parallelized", source, name)


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        mesh_of.cache_clear()
        torchhalo.disable()


def test_the_newest_is_loaded_and_older_ones_go(tmp_path: Path) -> None:
    checkpoints = torchhalo.Checkpoints(tmp_path / "new" / "folder", keep=2)
    model, _ = made("plain")
    assert checkpoints.latest() is None and checkpoints.load(model) is None
    for step in (1, 7, 3, 3):  # a run that goes back to an older one saves smaller steps after greater ones
        nn.init.constant_(model.last.weight, step)
        checkpoints.save(step, model, size=len(os.listdir(checkpoints.folder)) if checkpoints.folder.exists() else 0)
    assert len(os.listdir(checkpoints.folder)) == 2 and checkpoints.latest() == 3
    other, _ = made("plain")
    assert checkpoints.load(other) == {"step": 3, "size": 2}
    assert torch.equal(other.last.weight, model.last.weight)
    with pytest.raises(ValueError, match="keep"):
        torchhalo.Checkpoints(tmp_path, keep=0)


def test_an_optimizer_that_has_not_stepped_stays_one(tmp_path: Path) -> None:
    checkpoints = torchhalo.Checkpoints(tmp_path)
    model, _ = made("plain")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    checkpoints.save(0, model, optimizer)
    assert not optimizer.state
    train(model, optimizer, None, range(1))
    optimizer.param_groups[0]["lr"] = 7.0
    checkpoints.load(model, optimizer)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.1


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    checkpoints = torchhalo.Checkpoints(tmp_path)
    model, _ = made("plain")
    checkpoints.save(1, model)
    with pytest.raises(ValueError, match="saved without an optimizer"):
        checkpoints.load(model, OPTIMIZERS["sgd"](model.parameters()))
    with pytest.raises(ValueError, match=r"lacks \['1.bias', '1.weight'\] and has \['first.weight'"):
        checkpoints.load(nn.Sequential(nn.ReLU(), nn.Conv2d(1, 1, 1)))
    with pytest.raises(ValueError, match="not the model's"):
        checkpoints.save(2, model, OPTIMIZERS["sgd"](Net().parameters()))
    checkpoints.save(2, model, OPTIMIZERS["sgd"](model.third.parameters()))
    with pytest.raises(ValueError, match=r"parameters.*lacks \['last.weight'\] and has \['second.weight', 'third.bias'\]"):
        checkpoints.load(model, OPTIMIZERS["sgd"]([model.last.weight]))
    with pytest.raises(ValueError, match=r"groups must be those that were saved, \[\['second.weight', 'third.bias'\]\]; they"):
        checkpoints.load(model, OPTIMIZERS["sgd"]([{"params": [parameter]} for parameter in model.third.parameters()]))
    assert checkpoints.latest() == 2


def check_folders(folder: str) -> None:
    """An error of one rank is raised by all, and none waits for another."""
    model, _ = made("parallelized")
    (Path(folder) / "file").touch()
    dist.barrier()
    with pytest.raises(FileExistsError, match="file"):
        torchhalo.Checkpoints(Path(folder) / "file").save(1, model)
    with (
        contextlib.chdir(folder if dist.get_rank() == 0 else "/"),
        pytest.raises(FileNotFoundError, match=r"that of ranks \[1\]"),
    ):
        torchhalo.Checkpoints("here").save(1, model)
    assert torchhalo.Checkpoints(folder).latest() is None


def test_all_ranks_must_see_the_folder(pool, tmp_path: Path) -> None:
    pool(2).run(check_folders, str(tmp_path))


def killed_in_turn(folder: str) -> list[str]:
    """Save again and again, each time killed one call later, until a save gets through; what the folder held after each.

    A kill is before a call that changes what is on disk, of `save` or of torch's own writer.
    """
    checkpoints = torchhalo.Checkpoints(folder, keep=1)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    loaded = copy.deepcopy(model)
    held = []
    for deadline in range(100):
        child = os.fork()
        if child == 0:
            if deadline:
                kill_at_call(deadline)
            save_step(checkpoints, model, deadline)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        found = checkpoints.load(loaded)
        assert found is not None and found["step"] in (deadline - 1, deadline)
        assert all(bool((value == found["step"]).all()) for value in loaded.state_dict().values())
        held.append(" ".join(sorted(os.listdir(folder))))
        if deadline and not killed:
            return held
        save_step(checkpoints, model, deadline)
        assert len(os.listdir(folder)) == 1, "what is left of a killed save goes with the next"
    raise AssertionError("never got through")


def save_step(checkpoints: torchhalo.Checkpoints, model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for value in model.state_dict().values():
            value.fill_(step)
    checkpoints.save(step, model)


def kill_at_call(deadline: int) -> None:
    """Let this process be killed right before the so-many-th call that changes what is on disk."""
    calls = itertools.count(1)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == deadline:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        held = process.submit(killed_in_turn, str(tmp_path)).result(timeout=120)
    assert len(held) > 8
    for left in (".saving", ".removing"):
        assert any(left in names for names in held), held


KILLED = """
import os, signal, torch, torchhalo
torch.backends.cudnn.deterministic = True
# For ranks that share a GPU.
os.environ |= {"LOCAL_RANK": "0", "NCCL_HOSTID": os.environ["RANK"], "NCCL_SOCKET_IFNAME": "lo"}
attempt, rank, save = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]), torchhalo.Checkpoints.save

def saved(self, step, *args, **kwargs):
    if (attempt, rank, step) == (0, 1, 3):
        os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)  # when this rank has written its part
    save(self, step, *args, **kwargs)

torchhalo.Checkpoints.save = saved
open(f"start-{attempt}-{rank}", "w").write(str(torchhalo.Checkpoints("checkpoints").latest()))
"""


def run_block(code: str, folder: str) -> None:
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    code = code.replace('"checkpoints"', repr(folder)).replace("torch.distributed.destroy_process_group()", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "deterministic", True)
        execute(code, {}, DEVICE)


@pytest.mark.slow
def test_torchrun_restarts_from_the_checkpoint(pool, tmp_path: Path) -> None:
    """A run of which a rank is killed in the middle of a save ends with the bits of one that was not."""
    code = snippet("training", "Checkpoints and restarts")
    (tmp_path / "train.py").write_text(KILLED + code.replace('"cuda"', repr(DEVICE)))
    run = start(snippet("training", "Checkpoints and restarts", "bash"), tmp_path, {"4": "2", "3": "1"})
    pool(2).run(run_block, code, str(tmp_path / "whole"))
    finish(run, seconds=200)
    starts = {path.name: path.read_text() for path in tmp_path.glob("start-*")}
    assert starts == {f"start-{attempt}-{rank}": step for attempt, step in enumerate(("None", "2")) for rank in range(2)}
    expected, found = (finished(code, tmp_path / folder) for folder in ("whole", "checkpoints"))
    assert expected.keys() == found.keys() and all(torch.equal(value, found[name]) for name, value in expected.items())


def finished(code: str, folder: Path) -> dict[str, torch.Tensor]:
    """All that the last checkpoint of the run has of its model and optimizer, by name."""
    line = next(line for line in code.splitlines() if line.startswith("model = "))
    model = execute(line, {"nn": nn})["model"]
    optimizer = torch.optim.AdamW(model.parameters())
    saved = torchhalo.Checkpoints(folder).load(model, optimizer)
    assert saved is not None and saved["step"] == 6 and optimizer.param_groups[0]["lr"] == 1e-2 / 8
    states = {f"{i}.{key}": value for i, state in optimizer.state_dict()["state"].items() for key, value in state.items()}
    return {"rng": saved["rng"], **model.state_dict(), **states}
