"""Check every model and write the page of results: ``python -m models --output docs/models.md``."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import logging
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch._functorch.aot_autograd

from models import jobs
from models.page import exact, page, percent, sharded, share, worst
from models.running import CONFIGS, checked, compiled, explained
from models.streaming import streamed
from models.streaming_page import streaming_page, within
from models.zoo import COMPILED, EVERYWHERE, STREAMED, ZOO, Model
from torchhalo.tools.text import readable

# So that nothing but progress is shown.
QUIET = {"TORCH_LOGS": "-all", "DIFFUSERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}


def main(argv: list[str] | None = None) -> int:
    """Run the checks that have no result yet, and write the page; 1 if a model is not exact."""
    arguments = _parser().parse_args(argv)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.WARNING)  # torch has been imported here, and looks at none of these again
    warnings.simplefilter("ignore")
    names = [name for name in ZOO if any(fnmatch.fnmatch(name, pattern) for pattern in arguments.only or ["*"])]
    if not arguments.page:
        _check(names, arguments)
    results = _results(arguments.results)
    made_by = arguments.made_by or f"`{_command(argv)}`"
    sharded_ones = {name: each for name, each in results.items() if each.keys() - {"streamed"}}
    if arguments.output is not None:
        arguments.output.write_text(page(sharded_ones, made_by))
    on_one_device = {name: each["streamed"] for name, each in results.items() if "streamed" in each}
    if arguments.streamed is not None:
        arguments.streamed.write_text(streaming_page(on_one_device, made_by))
    good = {name: "last" in each and exact(each["last"]) for name, each in sharded_ones.items()}
    return 0 if all(good.get(name, True) and within(on_one_device.get(name, {})) for name in names) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models", description="Check every model, sharded, beside one process.")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="the models whose names match; all, if not given")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="these kinds of checks; all, if not given"
    )
    parser.add_argument("--results", type=Path, default=Path("build/models"), help="a folder of results, one file per model")
    parser.add_argument("--again", action="store_true", help="also check models that have a result there")
    parser.add_argument("--page", action="store_true", help="check nothing, write the page of the results that are there")
    parser.add_argument("--jobs", type=int, default=1, help="how many models are checked at a time, by two processes each")
    parser.add_argument("--timeout", type=float, default=600, help="in seconds, of a model")
    parser.add_argument("--output", type=Path, help="where to write the page")
    parser.add_argument("--streamed", type=Path, help="where to write the page of the models that one device runs")
    parser.add_argument("--made-by", help="the commands that made the results, for the page; this one, if not given")
    return parser


def _command(argv: list[str] | None) -> str:
    return shlex.join(["python", "-m", "models", *(sys.argv[1:] if argv is None else argv)])


class Kind(NamedTuple):
    """A kind of checks.

    Attributes:
        names: The models that get it.
        run: What it does with a model.
    """

    names: Collection[str]
    run: Callable[[Model], dict[str, Any]]


OTHERS = [config for config in CONFIGS if config != "last"]
KINDS = {
    "check": Kind(ZOO, partial(checked, configs=["last"])),
    "meshes": Kind(EVERYWHERE, partial(checked, configs=OTHERS)),
    "explain": Kind(ZOO, partial(explained, configs=["last"])),
    "explain-meshes": Kind(EVERYWHERE, partial(explained, configs=OTHERS)),
    "compile": Kind(COMPILED, compiled),
    "stream": Kind(STREAMED, streamed),
}


def _path(folder: Path, kind: str, name: str) -> Path:
    return folder / kind / f"{''.join(c if c.isalnum() or c in '-.' else '_' for c in name)}.json"


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    """By model, what all kinds of checks have found so far."""
    found: dict[str, dict[str, Any]] = {}
    for name in ZOO:
        for path in (_path(folder, kind, name) for kind in KINDS):
            if path.exists():
                each = found.setdefault(name, {})
                result = json.loads(path.read_text())
                each |= result | ({"told": each.get("told", {}) | result["told"]} if "told" in result else {})
    return found


def _check(names: list[str], arguments: argparse.Namespace) -> None:
    """Run what has no result yet, and show progress."""
    torch.set_num_threads(1)
    work = []
    for kind in arguments.kinds:
        (arguments.results / kind).mkdir(parents=True, exist_ok=True)
        for name in names:
            path = _path(arguments.results, kind, name)
            if name not in KINDS[kind].names or ZOO[name].missing or (path.exists() and not arguments.again):
                continue
            work.append(jobs.Job(f"{kind} {name}", path, partial(KINDS[kind].run, ZOO[name])))
            importlib.import_module(ZOO[name].factory.partition(":")[0])
    started = time.monotonic()
    for number, (name, result) in enumerate(jobs.run(work, arguments.jobs, arguments.timeout), start=1):
        print(f"[{number}/{len(work)}] {name}: {_line(result)} ({time.monotonic() - started:.0f} s)", flush=True)


def _line(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"RAISES {result['error'][:300]}"
    if "streamed" in result:
        return str(result["streamed"])[:600]
    if "told" in result:
        return "; ".join(str(told)[:300] for told in result["told"].values())
    if "compiled" not in result:
        return "; ".join(_checked(result[config]) for config in CONFIGS if config in result)
    compiled = result["compiled"]
    return f"{compiled['difference']:.0e}" if compiled["error"] is None else f"COMPILES NOT: {compiled['error'][:300]}"


def _checked(check: dict[str, Any]) -> str:
    if check["error"] is not None:
        return f"RAISES {check['error'][:300]}"
    where = "" if exact(check) else f" NOT EXACT, first in {check['first']} / {check['first_backward']}"
    gathers = f"{'' if sharded(check) else 'GATHERS '}{percent(share(check))}"
    return f"{worst(check):.0e}{where}, {readable(max(check['sent'])) or '0 B'}, {gathers}"


if __name__ == "__main__":
    sys.exit(main())
