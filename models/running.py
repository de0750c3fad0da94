"""Run one model sharded and in one process; what came of it is plain data, to be written as JSON."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from models.compiling import difference
from models.zoo.model import Model
from torchhalo.tools.check import TOLERANCE, Report, compared, failed, reason
from torchhalo.tools.fake_run import observe_rank
from torchhalo.tools.launch import RankError, on_ranks
from torchhalo.tools.observe import Case, Seen, Uncast, observe

DTYPE = torch.float64


class Config(NamedTuple):
    """A mesh, and the dim that each of its axes cuts."""

    title: str
    mesh: tuple[int, ...]
    dims: tuple[int, ...]

    def cut(self, model: Model) -> tuple[int, ...]:
        """These dims of the model's first input."""
        return tuple(dim % len(model.inputs[0]) for dim in self.dims)


CONFIGS = {
    "last": Config("2 ranks, last dim", (2,), (-1,)),
    "first": Config("2 ranks, dim 2", (2,), (2,)),
    "three": Config("3 ranks, dim 2", (3,), (2,)),
    "mesh": Config("2x2 ranks, last two dims", (2, 2), (-2, -1)),
}


def checked(model: Model, configs: list[str]) -> dict[str, Any]:
    """Check the model in each of ``configs``; processes are forked from this one, which has done nothing else before.

    Returns:
        For each configuration the fields of a `Report`; or an error of one process.
    """
    torch.set_default_dtype(DTYPE)  # of the tables that a model makes for itself
    try:
        (alone,) = on_ranks(observe, 1, Case(model.make, model.inputs, None, True, True, DTYPE, 0), None, method="fork")
    except RankError as error:
        return {"error": f"in one process already: {reason(error)}"}
    return {name: _report(model, CONFIGS[name], alone)._asdict() for name in configs}


def _report(model: Model, config: Config, alone: Seen) -> Report:
    case = Case(model.make, model.inputs, config.cut(model), True, True, DTYPE, 0)
    try:
        seen = on_ranks(observe, math.prod(config.mesh), case, config.mesh, method="fork")
    except RankError as error:
        return failed(config.mesh, TOLERANCE[DTYPE], reason(error))
    return compared(config.mesh, TOLERANCE[DTYPE], alone, seen)


def explained(model: Model, configs: list[str]) -> dict[str, Any]:
    """What `told` says of each of ``configs``."""
    torch.set_default_dtype(DTYPE)
    return {"told": {name: told(model, CONFIGS[name]) for name in configs}}


def compiled(model: Model) -> dict[str, Any]:
    """Compile the model on two ranks: how it differs from the eager run, or its error, and that of the plain model if any."""
    torch.set_default_dtype(DTYPE)
    config = CONFIGS["last"]
    arguments = model, config.cut(model)
    try:
        (found, *_) = on_ranks(difference, math.prod(config.mesh), *arguments, config.mesh, method="fork")
        return {"compiled": {"difference": found, "error": None}}
    except RankError as error:
        sharded = reason(error)
    try:
        on_ranks(difference, 1, *arguments, None, method="fork")
        return {"compiled": {"difference": None, "error": sharded}}
    except RankError as error:
        return {"compiled": {"difference": None, "error": sharded, "plain": reason(error)}}


def told(model: Model, config: Config) -> list[int] | str:
    """How many bytes `explain` tells that each rank sends in a check, or why it cannot tell.

    A check runs in float64 all through, and with gradients of the inputs.
    """
    inputs = [
        x if isinstance(x, torch.Tensor) else torch.empty(x, dtype=DTYPE, device="meta", requires_grad=True)
        for x in model.inputs
    ]

    def made() -> nn.Module:
        with Uncast(DTYPE):
            return InDtype(model.make())

    try:
        places = product(*map(range, config.mesh))
        return [
            observe_rank(made, inputs, config.mesh, place, config.cut(model), DTYPE, train=True).total("sent")
            for place in places
        ]
    except Exception as error:  # of a model, and so any
        return f"{type(error).__name__}: {error}"


class InDtype(nn.Module):
    """The model as a check runs it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> Any:
        with Uncast(DTYPE):
            return self.model(*inputs)
