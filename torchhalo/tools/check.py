"""Does a model give one process's numbers when its input is sharded, and where does it gather?

The model runs in one process of its own, then in one process per rank, with the same weights and input; what both saw of
every module, of the outputs, gradients and buffers is compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchhalo.tools.launch import RankError, on_ranks
from torchhalo.tools.observe import Case, Gradient, ModelError, Seen, observe
from torchhalo.tools.remedies import remedy
from torchhalo.tools.text import size_text

# Relative to the largest value, or to 1 if that is larger: sums over the sample are cut differently.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
#: Of the bytes that the convolutions read, how much may be gathered in a model that counts as sharded.
SHARE = 0.1


class Report(NamedTuple):
    """How a sharded model compares with one process.

    Attributes:
        mesh: The ranks.
        differences: For outputs, input gradients, gradients and buffers: the largest difference, relative to the largest value
            or to 1, and the name of what differs most.
        tolerance: What they may be.
        first: The first module whose output differs, if any.
        first_backward: The first gradient that differs in backward, in words, with the modules whose backward made it.
        gathered: The ops that gather: op, module, times, bytes to each rank.
        moved: Likewise those that move an activation from one sharding to another.
        convolved: How many bytes of inputs the convolutions read.
        memory: The peak memory of each rank.
        alone: That of one process.
        sent: How many bytes each rank sent in exchanges, of halos and of what else changed its owner.
        error: Why the model did not run, if it did not: the op, the module and what it raised.
        remedy: What to do about that.
    """

    mesh: tuple[int, ...]
    differences: dict[str, tuple[float, str]]
    tolerance: float
    first: str | None
    first_backward: str | None
    gathered: list[tuple[str, str, int, int]]
    moved: list[tuple[str, str, int, int]]
    convolved: int
    memory: list[int]
    alone: int
    sent: list[int]
    error: str | None
    remedy: str | None

    @property
    def exact(self) -> bool:
        """Whether all numbers are those of one process."""
        return self.error is None and all(worst <= self.tolerance for worst, _ in self.differences.values())

    @property
    def sharded(self) -> bool:
        """Whether next to nothing is gathered."""
        return self.error is None and sum(row[3] for row in self.gathered) <= SHARE * self.convolved

    @property
    def ok(self) -> bool:
        return self.exact and self.sharded

    def __str__(self) -> str:
        mesh = size_text(self.mesh)
        if self.error is not None:
            return f"mesh {mesh}: the model raised\n  {self.error}\n  what to do: {self.remedy}"
        lines = [f"mesh {mesh}: {'exact' if self.exact else 'NOT EXACT'}, {'sharded' if self.sharded else 'GATHERS'}", ""]
        lines.append(f"  {'':<16}  {'largest difference':>18}  where")
        for name, (worst, where) in self.differences.items():
            lines.append(f"  {name:<16}  {worst:>18.1e}  {where}")
        lines.append(f"  {'tolerance':<16}  {self.tolerance:>18.1e}")
        if self.first is not None:
            lines.append(f"\n  first module that differs: {self.first}")
        if self.first_backward is not None:
            lines.append(f"{'' if self.first else chr(10)}  first gradient that differs: {self.first_backward}")
        lines.append("")
        for what, rows in (("gathered", self.gathered), ("moved to another sharding", self.moved)):
            lines.append(f"  {what}: {sum(row[3] for row in rows):,} bytes of {self.convolved:,} that convolutions read")
            lines += [f"    {op} in {module or 'the model'}: {times} times, {size:,} bytes" for op, module, times, size in rows]
        mib = 2**20
        lines.append(f"\n  peak memory: one process {self.alone / mib:.1f} MiB")
        for rank, (memory, sent) in enumerate(zip(self.memory, self.sent, strict=True)):
            share = f"{memory / max(1, self.alone):.0%}"
            lines.append(f"    rank {rank}: {memory / mib:.1f} MiB, {share}; sent {sent:,} bytes")
        return "\n".join(lines)


def check(
    model: Any,
    sample: Any,
    ranks: int = 2,
    *,
    mesh: Sequence[int] | None = None,
    dims: int | Sequence[int] | None = None,
    backward: bool = False,
    train: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    method: str = "forward",
    loss: Any = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Run a model sharded over local processes beside one process, and compare.

    Args:
        model: A module, a function that makes one, or its name as ``package.module:function``. The first two are pickled.
        sample: A tensor, a shape (then the input is random), or a tuple of these for several inputs.
        ranks: How many processes.
        mesh: The shape of the mesh, such as ``(2, 2)``; ``(ranks,)`` if not given.
        dims: Along which dim each axis of the mesh cuts the input, as for `parallelize`.
        backward: Whether to compare gradients, of the inputs too.
        train: Whether the model is in training mode; its dropout then draws as it does on a mesh, in one process too.
        dtype: Of weights and floating-point inputs. Where a model computes in float32 inside, a check in float64 does not.
        seed: Of weights, inputs and dropout.
        method: What of the model is called, such as ``"decode"``.
        loss: A function of what the model returns to a scalar, or its name as ``package.module:function``. It makes its labels
            itself, the same on every rank. It is compared as well, and the gradients are its; without it, those of a sum of all
            outputs in which every element counts differently.
        progress: Called with a line of text before each part of the work.

    Example:
        >>> report = torchhalo.check("mymodels:unet", (1, 3, 256, 256), ranks=2)  # doctest: +SKIP
        >>> assert report.ok, report  # doctest: +SKIP
    """
    shape = tuple(mesh or (ranks,))
    chosen = None if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    samples = sample if isinstance(sample, tuple) and not all(isinstance(n, int) for n in sample) else (sample,)
    case = Case(model, samples, chosen, backward, train, dtype, seed, method, loss)
    tolerance = TOLERANCE[dtype]
    try:
        progress("one process")
        (alone,) = on_ranks(observe, 1, case, None)
    except RankError as error:
        return failed(shape, tolerance, f"in one process already: {reason(error)}")
    try:
        progress(f"{math.prod(shape)} ranks, mesh {size_text(shape)}")
        seen = on_ranks(observe, math.prod(shape), case, shape)
    except RankError as error:
        return failed(shape, tolerance, reason(error))
    return compared(shape, tolerance, alone, seen)


def compared(shape: tuple[int, ...], tolerance: float, alone: Seen, seen: list[Seen]) -> Report:
    """What one process and the ranks of a mesh saw, side by side."""
    differences = differences_between(alone.values, seen[0].values)
    return Report(
        shape,
        differences,
        tolerance,
        _first_difference(alone.modules, _added([rank.modules for rank in seen]), tolerance),
        _first_gradient(alone.gradients, [rank.gradients for rank in seen], differences, tolerance),
        seen[0].gathered,
        seen[0].moved,
        alone.convolved,
        [rank.memory for rank in seen],
        alone.memory,
        [rank.sent for rank in seen],
        None,
        None,
    )


def failed(shape: tuple[int, ...], tolerance: float, error: str) -> Report:
    """Of a model that raised."""
    return Report(shape, {}, tolerance, None, None, [], [], 0, [], 0, [], error, remedy(error))


def reason(error: RankError) -> str:
    """What the rank has to say of the model; of its other errors, all."""
    return error.reason.removeprefix(f"{ModelError.__name__}: ")


def differences_between(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, tuple[float, str]]:
    """For each kind of value the largest difference and where it is; what one of them lacks differs without limit."""
    worst: dict[str, tuple[float, str]] = {}
    for name in dict.fromkeys([*expected, *found]):
        kind, _, rest = name.partition(": ")
        difference = _difference(expected.get(name), found.get(name))
        if kind not in worst or difference > worst[kind][0]:
            worst[kind] = difference, rest
    return worst


def _added(ranks: list[list[tuple[str, list[float]]]]) -> list[tuple[str, list[float]]]:
    """What all ranks together have seen of each module."""
    return [
        (parts[0][0], [math.fsum(shares) for shares in zip(*(sums for _, sums in parts), strict=True)])
        for parts in zip(*ranks, strict=True)
    ]


def _first_difference(
    expected: list[tuple[str, list[float]]], found: list[tuple[str, list[float]]], tolerance: float
) -> str | None:
    for (path, values), (other, others) in zip(expected, found, strict=False):
        if path != other or not _close(values, others, tolerance):
            return path or "the model"
    return None if len(expected) == len(found) else "the number of modules that ran"


def _first_gradient(
    expected: list[Gradient], ranks: list[list[Gradient]], differences: dict[str, tuple[float, str]], tolerance: float
) -> str | None:
    """The first gradient in backward that differs, and the modules whose backward made it; else a parameter's, if one does."""
    found = [_by_name(gradients) for gradients in ranks]
    for name, each in _by_name(expected).items():
        shares = [rank[name].sums for rank in found if name in rank]
        sums = [math.fsum(parts) for parts in zip(*shares, strict=True)]
        if not _close(each.sums, sums, tolerance):
            readers = " and ".join(path or "the model" for path in each.readers)
            return f"of {each.of}" + (f", made by the backward of {readers}" if readers else "")
    worst, parameter = differences.get("gradients", (0.0, ""))
    return f"of the parameter {parameter}" if worst > tolerance else None


def _by_name(gradients: list[Gradient]) -> dict[tuple[str, int], Gradient]:
    """By what they are gradients of, and how often that was seen before: a module may run several times."""
    times: Counter[str] = Counter()
    named = {}
    for each in gradients:
        named[each.of, times[each.of]] = each
        times[each.of] += 1
    return named


def _difference(expected: torch.Tensor | None, found: torch.Tensor | None) -> float:
    """The largest difference, relative to the largest value or to 1; infinite for another shape, or what is not a number."""
    if expected is None or found is None or found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    expected, found = expected.double(), found.double()
    # Infinities may be equal: of a buffer that holds a limit, for example.
    worst = float(torch.where(expected == found, 0.0, (expected - found).abs()).max())
    worst /= max(1.0, float(expected.abs().nan_to_num(nan=0.0, posinf=0.0).max()))
    return worst if math.isfinite(worst) else math.inf


def _close(expected: list[float], found: list[float], tolerance: float) -> bool:
    scale = max([1.0, *map(abs, expected)])
    return len(expected) == len(found) and all(abs(a - b) <= tolerance * scale for a, b in zip(expected, found, strict=True))
