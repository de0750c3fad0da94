"""Run one model on one device, shard after shard, beside the plain model; what came of it is plain data, as JSON takes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from models.running import DTYPE, InDtype
from models.zoo.model import Model
from torchhalo.parallel.streaming import stream as streaming
from torchhalo.parallel.streaming.prepare import Prepared, prepare
from torchhalo.parallel.streaming.run import Run
from torchhalo.parallel.streaming.trace import Call
from torchhalo.parallel.structures import tensors_in
from torchhalo.tools.check import differences_between, reason
from torchhalo.tools.launch import RankError, on_ranks
from torchhalo.tools.observe import Case, Seen, Uncast, input_of, observe, values_of, weighted

#: Into how many shards a model is cut.
SHARDS = (2, 5, 16)


class Result(NamedTuple):
    """One model, over so many shards.

    Attributes:
        forward, step: The largest difference of a forward without gradients, and of a training step.
        budget: Bytes that the step was allowed: near the least that it can do with.
        free: The peak of a step with no budget, foretold.
        foretold: The peak of the step within its budget, foretold.
        counted: What the executor counted. Of each, what is resident is a part.
    """

    forward: float
    step: float
    budget: int
    free: int
    foretold: int
    counted: int


def streamed(model: Model, shards: Sequence[int] = SHARDS) -> dict[str, Any]:
    """Stream the model along its second last dim; the plain model runs in a process that is forked from this one.

    Returns:
        For each number of shards the fields of a `Result`; or an error.
    """
    torch.set_default_dtype(DTYPE)
    case = Case(model.make, model.inputs, None, True, True, DTYPE, 0)
    try:
        (alone,) = on_ranks(observe, 1, case, None, method="fork")
        return {"streamed": {str(count): result(case, count, alone)._asdict() for count in shards}}
    except RankError as error:
        return {"streamed": {"error": f"in one process already: {reason(error)}"}}
    except Exception as error:  # of a model, and so any
        return {"streamed": {"error": f"{type(error).__name__}: {error}"}}


def result(case: Case, shards: int, alone: Seen) -> Result:
    """Stream a forward and a training step, and compare with what one process saw of the step."""
    inference = {name: value for name, value in alone.values.items() if name.startswith(("outputs: ", "buffers: "))}
    differences = []
    with _recorded() as calls:
        for backward, expected in ((False, inference), (True, alone.values)):
            found = _values(case._replace(backward=backward), shards)
            differences.append(max(worst for worst, _ in differences_between(expected, found).values()))
    free, tight, run = calls[-1]
    resident = tight.resident
    return Result(
        *differences,
        budget=_budget(free),
        free=resident + free.schedule.peak,
        foretold=resident + tight.schedule.peak,
        counted=resident + run.peak,
    )


def _values(case: Case, shards: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(case.seed)
    with Uncast(case.dtype):
        net = case.model().to(case.dtype).train(case.train)
    generator = torch.Generator().manual_seed(case.seed)
    inputs = [input_of(sample, case.dtype, generator) for sample in case.sample]
    inputs = [x.requires_grad_(case.backward and x.is_floating_point()) for x in inputs]
    held: nn.Module = InDtype(net)
    streaming.stream(held, shards=shards, dims=max(2, inputs[0].ndim - 2), progress=False)
    torch.manual_seed(case.seed)
    with torch.set_grad_enabled(case.backward):
        outputs = tensors_in(held(*inputs))
    if case.backward:
        weighted(outputs).backward()
    return dict(values_of(net, inputs, outputs))


def _budget(free: Prepared) -> int:
    """Near the least that can do, so that most of what waits has to move."""
    return free.least + (free.resident + free.schedule.peak - free.least) // 8


@contextmanager
def _recorded() -> Iterator[list[tuple[Prepared, Prepared, Run]]]:
    """Calls in it get the `_budget`; of each, what is known without one and within it, and the run."""
    prepared: list[tuple[Prepared, Prepared]] = []
    runs: list[tuple[Prepared, Prepared, Run]] = []

    def search(call: Call, shards: Sequence[int], dims: Sequence[int], budget: float) -> Prepared:
        free = prepare(call, shards, dims, math.inf)
        prepared.append((free, free.within(_budget(free))))
        return prepared[-1][1]

    class Recorded(Run):
        def __init__(self, *args: Any):
            super().__init__(*args)
            runs.append((*prepared[-1], self))

    with mock.patch.object(streaming, "search", search), mock.patch.object(streaming, "Run", Recorded):
        yield runs
