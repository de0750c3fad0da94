"""Checkpoints that any number of ranks can read, of which the last good one outlives a run that is killed while it saves."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate

from torchhalo.parallel.start import allocate

Result = TypeVar("Result")

_NAME = re.compile(r"(\d+)-step-(\d+)")
_REST = "rest.pt"  # what is not a tensor of the model or of the optimizer, and what the latter look like


class Checkpoints:
    """Checkpoints of a model and its optimizer in a folder, each written by all ranks together.

    A checkpoint is written under a temporary name and gets its own when all of it is on disk. So a run may be killed at any
    moment: the newest checkpoint is always a whole one. What a killed run left behind is removed by the next `save`.

    A model that is plain, parallelized, wrapped in DDP or sharded by ``fully_shard`` loads what any other of them saved, on any
    number of ranks: the format is that of ``torch.distributed.checkpoint``, with the keys of the plain model's ``state_dict``.
    All ranks must call each method, on a folder that all of them see; one process needs no process group.

    Args:
        folder: Made if it does not exist; one for each run.
        keep: How many checkpoints to keep; older ones are removed when a newer one is complete.

    Example:
        >>> checkpoints = torchhalo.Checkpoints("checkpoints")  # doctest: +SKIP
        >>> saved = checkpoints.load(model, optimizer) or {"step": 0}  # doctest: +SKIP
        >>> for step in range(saved["step"], 1000):  # doctest: +SKIP
        ...     train(step)
        ...     checkpoints.save(step + 1, model, optimizer, rng=torch.get_rng_state())
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"Checkpoints: `keep` must be 1 or more, got {keep}")
        self.folder, self.keep = Path(folder), keep

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **extra: Any) -> None:
        """Write a checkpoint, and return when it is the newest.

        Args:
            step: Its number, for `latest` and `load`.
            model: All of its ``state_dict``.
            optimizer: Its groups, and its state by name of parameter.
            extra: Anything else that `torch.save` takes, such as the state of a scheduler; the first rank's is kept.
        """
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        rest = {"step": step, "extra": extra, "model": sorted(state["model"])}
        if optimizer is not None:
            state["optimizer"], rest["optimizer"] = _taken_apart(optimizer, _names(model, optimizer))
        path = self._temporary(step)
        with _no_group_warning():
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True))
        _on_first_rank(lambda: self._complete(path, rest))

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any] | None:
        """Put the newest checkpoint into ``model`` and ``optimizer``.

        Each rank reads what it keeps. A model on the meta device gets its memory here; to load an optimizer too, call
        `materialize` before and make the optimizer then.

        Returns:
            ``step`` and the ``extra`` of `save`, tensors on the CPU; None if there is no checkpoint yet. They are
            unpickled, so load only what you trust.
        """
        found = _on_first_rank(self._newest)
        if found is None:
            return None
        path, rest = found
        _must_agree("the model", get_model_state_dict(model), rest["model"])
        _allocate(model)
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        if optimizer is not None:
            if "optimizer" not in rest:
                raise ValueError(f"Checkpoints.load: {path} was saved without an optimizer")
            names = _names(model, optimizer)
            _must_have_groups(optimizer, names, saved=rest["optimizer"]["groups"])
            parameters = {name: parameter for parameter, name in names.items()}
            state["optimizer"] = _room_for(rest["optimizer"], parameters)
        with _no_group_warning():
            dcp.load(state, storage_reader=dcp.FileSystemReader(path))
        set_model_state_dict(model, state["model"])
        if optimizer is not None:
            optimizer.load_state_dict(_put_together(rest["optimizer"], state["optimizer"], optimizer, parameters))
        return {"step": rest["step"], **rest["extra"]}

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None if there is none."""
        found = _on_first_rank(self._complete_ones)
        return found[-1].step if found else None

    def _complete_ones(self) -> list[_Entry]:
        """In the order in which they were saved."""
        found = [(path, _NAME.fullmatch(path.name)) for path in self.folder.glob("*-step-*")]
        return sorted(_Entry(int(match[1]), int(match[2]), path) for path, match in found if match)

    def _newest(self) -> tuple[Path, dict[str, Any]] | None:
        found = self._complete_ones()
        if not found:
            return None
        return found[-1].path, torch.load(found[-1].path / _REST, map_location="cpu", weights_only=False)

    def _temporary(self, step: int) -> Path:
        """A new folder with a temporary name, which all ranks see."""

        def made() -> Path:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob("*-step-*.*"):
                shutil.rmtree(path)
            number = max((entry.number for entry in self._complete_ones()), default=0) + 1
            path = self.folder / f"{number:06}-step-{step}.saving"
            path.mkdir()
            return path

        path = _on_first_rank(made)
        blind = [rank for rank, sees in enumerate(_from_all_ranks(path.is_dir())) if not sees]
        if blind:
            raise FileNotFoundError(
                f"Checkpoints.save: all ranks must see the same folder, but {self.folder} of the first rank is not that of "
                f"ranks {blind}; choose one on a file system that all hosts share"
            )
        return path

    def _complete(self, path: Path, rest: dict[str, Any]) -> None:
        with open(path / _REST, "wb") as file:
            torch.save(rest, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(path)
        path.rename(path.with_suffix(""))
        _sync_folder(self.folder)
        for entry in self._complete_ones()[: -self.keep]:
            # First its name, so that one that is removed only in part does not look like a whole one.
            shutil.rmtree(entry.path.rename(entry.path.with_suffix(".removing")))


class _Entry(NamedTuple):
    number: int
    step: int
    path: Path


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """The parameters of ``optimizer`` by the names that they have in a checkpoint: without those of wrappers such as DDP."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # torch knows these names, but tells them only with an optimizer's state; and it lets an optimizer without any make a step.
    stand_in = torch.optim.SGD(parameters, lr=0.0)
    for parameter in parameters:
        stand_in.state[parameter] = {"parameter": parameter}
    try:
        named: Any = get_optimizer_state_dict(model, stand_in)["state"]
    except KeyError:
        raise ValueError("Checkpoints: the optimizer has parameters that are not the model's") from None
    return {found["parameter"]: name for name, found in named.items()}


def _taken_apart(
    optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """The tensors of the state of ``optimizer``, by name of parameter; and all else of it, with their shapes."""
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    shapes: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        found = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        tensors[names[parameter]] = found
        shapes[names[parameter]] = {**state, **{key: _shape_of(value) for key, value in found.items()}}
    groups = [{**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups]
    return tensors, {"groups": groups, "state": shapes}


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _room_for(saved: dict[str, Any], parameters: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors for `dcp.load` to fill, in place of those that `_taken_apart` found."""
    return {
        name: {key: _room(key, value, parameters[name]) for key, value in state.items() if isinstance(value, torch.Tensor)}
        for name, state in saved["state"].items()
    }


def _room(key: str, shape: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if key != "step" and shape.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=shape.dtype, requires_grad=False)
    whole = torch.empty_like(shape, device="cpu" if shape.ndim == 0 else parameter.device)
    if shape.ndim == 0 or not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _put_together(
    saved: dict[str, Any],
    tensors: dict[str, dict[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """What `_taken_apart` took apart, as the ``state_dict`` of ``optimizer``, which numbers its parameters."""
    numbers = {parameter: number for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    groups = []
    for group, stored in zip(optimizer.param_groups, saved["groups"], strict=True):
        groups.append({**stored, "params": [numbers[parameter] for parameter in group["params"]]})
    state = {numbers[parameters[name]]: {**values, **tensors.get(name, {})} for name, values in saved["state"].items()}
    return {"state": state, "param_groups": groups}


def _must_agree(what: str, current: Iterable[str], saved: Iterable[str]) -> None:
    wanted, given = set(current), set(saved)
    missing, unexpected = sorted(wanted - given), sorted(given - wanted)
    if missing or unexpected:
        raise ValueError(
            f"Checkpoints.load: the names of {what} must be those that were saved; the checkpoint lacks {missing} and has "
            f"{unexpected} beside"
        )


def _must_have_groups(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str], saved: list[dict[str, Any]]) -> None:
    current = [sorted(names[parameter] for parameter in group["params"]) for group in optimizer.param_groups]
    stored = [sorted(group["params"]) for group in saved]
    _must_agree("the optimizer's parameters", chain(*current), chain(*stored))
    if current != stored:
        raise ValueError(
            f"Checkpoints.load: the optimizer's groups must be those that were saved, {stored}; they are {current}"
        )


def _allocate(model: nn.Module) -> None:
    """Memory for a model on the meta device, if all that is there comes from its ``state_dict``."""
    kept = model.state_dict()
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in kept]
    if lost:
        raise ValueError(
            f"Checkpoints.load: the buffers {lost} are on the meta device and in no checkpoint; call "
            "torchhalo.materialize(model) before"
        )
    allocate(model)


def _on_first_rank(work: Callable[[], Result]) -> Result:
    """What ``work()`` gives on the first rank, or its error, on every rank."""
    if not dist.is_initialized():
        return work()
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = work()
        except Exception as error:
            found[1] = error
    dist.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]


def _from_all_ranks(value: Result) -> list[Result]:
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _sync_folder(path: Path) -> None:
    """Put the names in a folder on disk, as `os.fsync` does the contents of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _no_group_warning() -> Iterator[None]:
    """Without the warning that there is no process group, where there is to be none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
