"""The page of results."""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

import torchhalo
from models.running import CONFIGS
from models.zoo import LIBRARIES, REASONS, UNTRIED, ZOO, Model
from torchhalo.tools.check import SHARE
from torchhalo.tools.text import readable

HEAD = """\
# Models

Each model, unmodified, with random weights at a small size, in training mode and float64: its outputs, the gradients of its
inputs and of all its parameters, and its buffers, on ranks that share a sample, beside one process.

- *exact*: the largest difference, relative to the largest value of a tensor or to 1; up to 1e-9 counts as exact.
- *sent*: what the rank that sends the most sent in exchanges, forward and backward.
- *gathered*: how many bytes were gathered, as a share of those that the convolutions read.
- *foretold*: whether every rank sent, to the byte, what [`explain`](explain.md) tells of it from shapes alone.
- *compiled*: whether the step is one graph for `torch.compile(backend="aot_eager", fullgraph=True)`, with the numbers of the
  eager step.

The last two take the most time; where they are empty, they were not tried.

Images are large enough that batch norms see more than a few values in each channel: else rounding errors of one process are
larger than what is compared.
"""


def page(results: dict[str, dict[str, Any]], made_by: str) -> str:
    """The page, as Markdown.

    Args:
        results: By the name of the model, what `running.run` returned.
        made_by: The command that made them.
    """
    lines = [HEAD, *_summary(results), ""]
    for library, models in LIBRARIES.items():
        found = {name: results[name] for name in models if name in results}
        if found:
            lines += [f"## {library}", "", *_table(found), ""]
    meshes = {name: each for name, each in results.items() if any(config in each for config in list(CONFIGS)[1:])}
    if meshes:
        lines += [
            "## On other meshes",
            "",
            "The largest difference, what the busiest rank sent, and what was gathered if anything.",
            "",
        ]
        lines += [*_meshes(meshes), ""]
    lines += _failures(results)
    lines += ["## How this page was made", "", f"{made_by}, on {datetime.date.today()}, with {versions(results)}."]
    return "\n".join(lines) + "\n"


def _summary(results: dict[str, dict[str, Any]]) -> list[str]:
    first = [each["last"] for each in results.values() if "last" in each]
    others = [each[config] for each in results.values() for config in CONFIGS if config != "last" and config in each]
    told = [foretold(each, config) for each in results.values() for config in each.get("told", {})]
    compiled = [each["compiled"]["error"] is None for each in results.values() if "compiled" in each]
    return [
        f"**{sum(map(exact, first))} of {len(results)} models are exact** on two ranks that cut the last dim, and",
        f"{sum(map(sharded, first))} gather {SHARE:.0%} at most.",
        *([f"On other meshes {sum(map(exact, others))} of {len(others)} checks are exact."] if others else []),
        *([f"{told.count(True)} of {len(told)} checks that were explained are foretold."] if told else []),
        *([f"{sum(compiled)} of {len(compiled)} models that were tried compile."] if compiled else []),
    ]


def exact(check: dict[str, Any]) -> bool:
    return check["error"] is None and worst(check) <= check["tolerance"]


def sharded(check: dict[str, Any]) -> bool:
    return check["error"] is None and share(check) <= SHARE


def foretold(each: dict[str, Any], config: str) -> bool | None:
    """Whether `explain` told what each rank sent; None if it was not asked."""
    if config not in each or each[config]["error"] is not None or config not in each.get("told", {}):
        return None
    return each["told"][config] == each[config]["sent"]


def worst(check: dict[str, Any]) -> float:
    return max(difference for difference, _ in check["differences"].values())


def share(check: dict[str, Any]) -> float:
    """What was gathered, of what the convolutions read."""
    return sum(row[3] for row in check["gathered"]) / max(1, check["convolved"])


def _table(results: dict[str, dict[str, Any]]) -> list[str]:
    columns = ["model", "input", "exact", "sent", "gathered", "foretold", "compiled"]
    rows = [row(columns), row(["---"] * len(columns))]
    for name, each in results.items():
        cells = _cells(each, "last") if "last" in each else ["**raises**", "", "", ""]
        rows.append(row([name.partition(" ")[2], inputs(ZOO[name]), *cells, _compiled(each)]))
    return rows


def _cells(each: dict[str, Any], config: str) -> list[str]:
    check = each[config]
    if check["error"] is not None:
        return ["**raises**", "", "", ""]
    difference = f"{worst(check):.0e}"
    sent = readable(max(check["sent"])) or "0 B"
    told = {None: "", True: "yes", False: "**no**"}[foretold(each, config)]
    gathered = percent(share(check))
    return [
        difference if exact(check) else f"**no: {difference}**",
        sent,
        gathered if sharded(check) else f"**{gathered}**",
        told,
    ]


def _compiled(each: dict[str, Any]) -> str:
    found = each.get("compiled")
    if found is None:
        return ""
    if found["error"] is None:
        return "yes" if found["difference"] <= 1e-9 else f"**no: {found['difference']:.0e}**"
    return "nor does it plain" if "plain" in found else "**raises**"


def _meshes(results: dict[str, dict[str, Any]]) -> list[str]:
    configs = {name: config for name, config in CONFIGS.items() if name != "last"}
    rows = [row(["model", *(config.title for config in configs.values())]), row(["---"] * (1 + len(configs)))]
    for name, each in results.items():
        rows.append(row([name, *(_mesh_cell(each, config) if config in each else "" for config in configs)]))
    return rows


def _mesh_cell(each: dict[str, Any], config: str) -> str:
    difference, sent, gathered, told = _cells(each, config)
    parts = [difference, sent, *([] if gathered in ("", "nothing") else [f"gathers {gathered}"])]
    return ", ".join(filter(None, [*parts, "" if told != "**no**" else "**not foretold**"]))


def _failures(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for name, each in results.items():
        checks = (
            [("", each)] if "error" in each else [(CONFIGS[config].title, each[config]) for config in CONFIGS if config in each]
        )
        for title, check in checks:
            what = _fault(check)
            if what is not None:
                lines.append(f"- {name}{', ' + title if title else ''}: {REASONS.get(name, _short(what))}")
        for config, told in each.get("told", {}).items():
            if foretold(each, config) is False:
                what = told if isinstance(told, str) else f"told {told}, sent {each[config]['sent']}"
                lines.append(f"- {name}, {CONFIGS[config].title}, by `explain`: {_short(what)}")
        if "compiled" in each and each["compiled"]["error"] is not None:
            lines.append(f"- {name}, compiled: {_short(each['compiled']['error'])}")
    untried = [f"- {name}: {reason}" for name, reason in UNTRIED.items()]
    missing = Counter(model.missing for name, model in ZOO.items() if name not in results and model.missing)
    untried += [f"- {reason}: {count} models" for reason, count in missing.items()]
    headed = ["## What is not exact, gathers, is not foretold or does not compile", "", *lines, ""] if lines else []
    return headed + (["## Not tried, and why", "", *untried, ""] if untried else [])


def _fault(check: dict[str, Any]) -> str | None:
    """What is wrong with a check, if anything."""
    if check["error"] is not None:
        return check["error"]
    if not exact(check):
        return f"differs by {worst(check):.0e}, first in {check['first'] or check['first_backward']}"
    if not sharded(check):
        return "gathers in " + ", ".join(sorted({op for op, *_ in check["gathered"]}))
    return None


def _short(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return f"`{line if len(line) <= limit else line[:limit] + ' ...'}`"


def percent(part: float) -> str:
    if not part:
        return "nothing"
    return f"{part:.1%}" if part >= 0.0005 else "<0.1%"


def row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def inputs(model: Model) -> str:
    return ", ".join(_input(x) for x in model.inputs)


def _input(given: Any) -> str:
    if isinstance(given, tuple):
        return "x".join(map(str, given))
    return f"`{given.item()}`" if given.numel() == 1 else "x".join(map(str, given.shape))


def versions(results: Iterable[str]) -> str:
    libraries = {model.library: model.version for model in map(ZOO.__getitem__, results) if model.version}
    versions = {"torchhalo": torchhalo.__version__, "Python": platform.python_version(), "torch": torch.__version__} | libraries
    return ", ".join(f"{name} {number}" for name, number in versions.items())
