"""Check every model in every configuration and write the page of results: ``python -m models --output docs/models.md``."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

import torchhalo
from models.zoo import ZOO, Model
from torchhalo.check import Report, check


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

# So that nothing but progress is shown.
QUIET = {"TORCH_LOGS": "-all", "DIFFUSERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}

HEAD = """\
# Models

Each model, unmodified, with random weights at a small size, in training mode and float64: its outputs, the gradients of its
inputs and of all its parameters, and its buffers, on ranks that share a sample, beside one process. *Exact* is a largest
difference of at most 1e-9, relative to the largest value of a tensor or to 1. *Sharded* is to gather at most a tenth of the
bytes that the convolutions read. A cell gives the largest difference, and which share of those bytes was gathered.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the checks; 1 if any of them failed."""
    arguments = _parser().parse_args(argv)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    names = arguments.only or list(ZOO)
    configs = {name: CONFIGS[name] for name in arguments.configs or CONFIGS}
    results = run(names, configs)
    text = page(results, configs, _command(argv))
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text)
    return 0 if all(report.ok for reports in results.values() for report in reports) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models", description="Check every model, sharded, beside one process.")
    parser.add_argument("--only", nargs="+", choices=ZOO, metavar="NAME", help="these models; all, if not given")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, help="these configurations; all, if not given")
    parser.add_argument("--output", type=Path, help="where to write the page; if not given, it is printed")
    return parser


def _command(argv: list[str] | None) -> str:
    return shlex.join(["python", "-m", "models", *(sys.argv[1:] if argv is None else argv)])


def run(names: list[str], configs: dict[str, Config]) -> dict[str, list[Report]]:
    """The reports of each model, one per configuration; none for a model whose library is not installed. Shows progress."""
    started = time.monotonic()
    results: dict[str, list[Report]] = {}
    for number, name in enumerate(names, start=1):
        model, results[name] = ZOO[name], []
        if model.missing:
            _show(f"[{number}/{len(names)}] {name}: {model.missing}")
            continue
        for config in configs.values():
            _show(f"[{number}/{len(names)}] {name}, {config.title}: ", end="")
            dims = [dim % len(model.inputs[0]) for dim in config.dims]
            report = check(model.make, model.inputs, mesh=config.mesh, dims=dims, backward=True)
            results[name].append(report)
            _show(f"{cell(report)} ({time.monotonic() - started:.0f} s)" + ("" if report.ok else f"\n{report}"))
    return results


def _show(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def cell(report: Report) -> str:
    """A report in a few words."""
    if report.error is not None:
        return "**raises**"
    worst = max(difference for difference, _ in report.differences.values())
    exact = f"{worst:.0e}" if report.exact else f"**not exact: {worst:.0e}**"
    share = _share(sum(row[3] for row in report.gathered) / max(1, report.convolved))
    return f"{exact}, {share}" if report.sharded else f"{exact}, **gathers {share}**"


def _share(gathered: float) -> str:
    if not gathered:
        return "nothing"
    return f"{gathered:.1%}" if gathered >= 0.0005 else "<0.1%"


def page(results: dict[str, list[Report]], configs: dict[str, Config], command: str) -> str:
    """The page, as Markdown."""
    tried = {name: reports for name, reports in results.items() if reports}
    missing = [name for name in results if name not in tried]
    good = sum(report.ok for reports in tried.values() for report in reports)
    lines = [HEAD, f"{good} of {len(tried) * len(configs)} checks are exact and sharded.", ""]
    lines += [_row(["model", "input", *(config.title for config in configs.values())]), _row(["---"] * (2 + len(configs)))]
    lines += [_row([name, _inputs(ZOO[name]), *map(cell, reports)]) for name, reports in tried.items()]
    failures = [(name, report) for name, reports in tried.items() for report in reports if not report.ok]
    if failures:
        lines += ["", "## What went wrong", *(f"\n{name}:\n\n```\n{report}\n```" for name, report in failures)]
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
