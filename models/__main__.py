"""Check every model in every configuration and write the page of results: ``python -m models --output docs/models.md``."""

from __future__ import annotations

import argparse
import datetime
import logging
import os
import platform
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import torchhalo
from models.zoo import ZOO, Model
from torchhalo.tools.check import Report, check
from torchhalo.tools.explain import explain
from torchhalo.tools.observe import Uncast
from torchhalo.tools.text import readable


class Config(NamedTuple):
    """A mesh, and the dim that each of its axes cuts."""

    title: str
    mesh: tuple[int, ...]
    dims: tuple[int, ...]


CONFIGS = {
    "last": Config("2 ranks, last dim", (2,), (-1,)),
    "first": Config("2 ranks, dim 2", (2,), (2,)),
    "three": Config("3 ranks, dim 2", (3,), (2,)),
    "mesh": Config("2x2 ranks, last two dims", (2, 2), (-2, -1)),
}


class Result(NamedTuple):
    """How a model did in a configuration.

    Attributes:
        report: Of the run.
        told: How many bytes each rank sends in it by `explain`, or why that could not tell.
    """

    report: Report
    told: list[int] | str

    @property
    def foretold(self) -> bool:
        """Whether every rank sent the bytes that `explain` told."""
        return self.report.error is None and self.told == self.report.sent

    @property
    def ok(self) -> bool:
        return self.report.ok and self.foretold

    def __str__(self) -> str:
        wrong = "" if self.foretold else f"\n\n  sent, by explain: {self.told}\n  sent, in the run: {self.report.sent}"
        return f"{self.report}{wrong}"


# So that nothing but progress is shown.
QUIET = {"TORCH_LOGS": "-all", "DIFFUSERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}

HEAD = """\
# Models

Each model, unmodified, with random weights at a small size, in training mode and float64: its outputs, the gradients of its
inputs and of all its parameters, and its buffers, on ranks that share a sample, beside one process. *Exact* is a largest
difference of at most 1e-9, relative to the largest value of a tensor or to 1. *Sharded* is to gather at most a tenth of the
bytes that the convolutions read. *Foretold* is that every rank sent, to the byte, what [`explain`](explain.md) tells of it from
shapes alone. A cell gives the largest difference, which share of the bytes that the convolutions read was gathered, and how
much the rank that sends the most sent in exchanges, forward and backward.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the checks; 1 if any of them failed."""
    arguments = _parser().parse_args(argv)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.WARNING)  # torch has been imported here, and looks at none of these again
    names = arguments.only or list(ZOO)
    configs = {name: CONFIGS[name] for name in arguments.configs or CONFIGS}
    results = run(names, configs)
    text = page(results, configs, _command(argv))
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text)
    return 0 if all(result.ok for found in results.values() for result in found) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models", description="Check every model, sharded, beside one process.")
    parser.add_argument("--only", nargs="+", choices=ZOO, metavar="NAME", help="these models; all, if not given")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, help="these configurations; all, if not given")
    parser.add_argument("--output", type=Path, help="where to write the page; if not given, it is printed")
    return parser


def _command(argv: list[str] | None) -> str:
    return shlex.join(["python", "-m", "models", *(sys.argv[1:] if argv is None else argv)])


def run(names: list[str], configs: dict[str, Config]) -> dict[str, list[Result]]:
    """The results of each model, one per configuration; none for a model whose library is not installed. Shows progress."""
    started = time.monotonic()
    results: dict[str, list[Result]] = {}
    for number, name in enumerate(names, start=1):
        model, results[name] = ZOO[name], []
        if model.missing:
            _show(f"[{number}/{len(names)}] {name}: {model.missing}")
            continue
        for config in configs.values():
            _show(f"[{number}/{len(names)}] {name}, {config.title}: ", end="")
            result = compare(model, config)
            results[name].append(result)
            _show(f"{cell(result)} ({time.monotonic() - started:.0f} s)" + ("" if result.ok else f"\n{result}"))
    return results


def compare(model: Model, config: Config) -> Result:
    """Run the model, in processes of its own, and have it explained meanwhile."""
    dims = [dim % len(model.inputs[0]) for dim in config.dims]
    with ThreadPoolExecutor() as threads:
        report = threads.submit(check, model.make, model.inputs, mesh=config.mesh, dims=dims, backward=True)
        return Result(told=told(model, config.mesh, dims), report=report.result())


def told(model: Model, mesh: tuple[int, ...], dims: list[int]) -> list[int] | str:
    """What `explain` tells of the run that a check makes: in float64 all through, with the gradients of the inputs."""
    inputs = [
        x if isinstance(x, torch.Tensor) else torch.empty(x, dtype=torch.float64, device="meta", requires_grad=True)
        for x in model.inputs
    ]

    def made() -> nn.Module:
        return _Uncast(model.make())

    try:
        found = explain(made, inputs, mesh, dims=dims, dtype=torch.float64, train=True, every_rank=True)
    except Exception as error:  # of a model, and so any
        return f"{type(error).__name__}: {error}"
    return [rank.total("sent") for rank in found.ranks]


class _Uncast(nn.Module):
    """The model as a check runs it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> Any:
        with Uncast(torch.float64):
            return self.model(*inputs)


def _show(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def cell(result: Result) -> str:
    """A result in a few words."""
    report = result.report
    if report.error is not None:
        return "**raises**"
    worst = max(difference for difference, _ in report.differences.values())
    exact = f"{worst:.0e}" if report.exact else f"**not exact: {worst:.0e}**"
    share = _share(sum(row[3] for row in report.gathered) / max(1, report.convolved))
    return ", ".join([exact, share if report.sharded else f"**gathers {share}**", _sent(result)])


def _sent(result: Result) -> str:
    sent = readable(max(result.report.sent)) or "0 B"
    if result.foretold:
        return sent
    if isinstance(result.told, str):
        return f"**{sent}, explain raises**"
    return f"**{sent}, told {readable(max(result.told)) or '0 B'}**"


def _share(gathered: float) -> str:
    if not gathered:
        return "nothing"
    return f"{gathered:.1%}" if gathered >= 0.0005 else "<0.1%"


def page(results: dict[str, list[Result]], configs: dict[str, Config], command: str) -> str:
    """The page, as Markdown."""
    tried = {name: found for name, found in results.items() if found}
    missing = [name for name in results if name not in tried]
    good = sum(result.report.ok for found in tried.values() for result in found)
    foretold = sum(result.foretold for found in tried.values() for result in found)
    number = len(tried) * len(configs)
    lines = [HEAD, f"{good} of {number} checks are exact and sharded, {foretold} of {number} foretold.", ""]
    lines += [_row(["model", "input", *(config.title for config in configs.values())]), _row(["---"] * (2 + len(configs)))]
    lines += [_row([name, _inputs(ZOO[name]), *map(cell, found)]) for name, found in tried.items()]
    failures = [(name, result) for name, found in tried.items() for result in found if not result.ok]
    if failures:
        lines += ["", "## What went wrong", *(f"\n{name}:\n\n```\n{result}\n```" for name, result in failures)]
    if missing:
        lines += ["", "## Not tried", "", *(f"- {name}: {ZOO[name].missing}" for name in missing)]
    lines += ["", "## How this page was made", "", f"`{command}` on {datetime.date.today()}, with {_versions(list(tried))}."]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _inputs(model: Model) -> str:
    return ", ".join("x".join(map(str, x)) if isinstance(x, tuple) else f"`{x}`" for x in model.inputs)


def _versions(names: list[str]) -> str:
    libraries = {model.library: model.version for model in map(ZOO.__getitem__, names) if model.version}
    versions = {"torchhalo": torchhalo.__version__, "Python": platform.python_version(), "torch": torch.__version__} | libraries
    return ", ".join(f"{name} {number}" for name, number in versions.items())


if __name__ == "__main__":
    sys.exit(main())
