"""The page of the models that one device runs shard after shard."""

from __future__ import annotations

import datetime
from typing import Any

from models.page import inputs, row, versions
from models.running import DTYPE
from models.streaming import SHARDS
from models.zoo import LIBRARIES, ZOO
from torchhalo.tools.check import TOLERANCE
from torchhalo.tools.text import readable

HEAD = """\
# Models on one device

Models of the [models page](models.md), unmodified, which [one device](one_device.md) runs shard after shard, in float64 on a
CPU: a forward without gradients, and a training step with its outputs, the gradients of inputs and parameters, and buffers,
beside the plain model.

- *exact*: the larger of both differences, relative to the largest value of a tensor or to 1; up to 1e-9 counts as exact.
- *peak*: the most bytes on the device at a time in the training step over the most shards, parameters and their gradients
  included. *Budget*: what it was given, near the least that one op needs. *Without budget*: the peak where nothing waits on
  the host.

Images are small, so that parameters are most of what is held.
"""


def streaming_page(results: dict[str, dict[str, Any]], made_by: str) -> str:
    """The page, as Markdown.

    Args:
        results: By the name of the model, what `streaming.streamed` found.
        made_by: The command that made them.
    """
    good = sum(map(within, results.values()))
    checks = [check for each in results.values() if "error" not in each for check in each.values()]
    lines = [
        HEAD,
        f"**{good} of {len(results)} models are exact** over {', '.join(map(str, SHARDS[:-1]))} and {SHARDS[-1]} shards.",
        f"In {sum(check['counted'] == check['foretold'] for check in checks)} of {len(checks)} training steps the executor "
        "counted the peak that was foretold,",
        f"to the byte; in {sum(check['counted'] > check['budget'] for check in checks)} it exceeded the budget.",
        "",
    ]
    for library, models in LIBRARIES.items():
        found = {name: results[name] for name in models if name in results}
        if found:
            columns = ["model", "input", *(f"{count} shards" for count in SHARDS), "peak", "budget", "without budget"]
            lines += [f"## {library}", "", row(columns), row(["---"] * len(columns))]
            lines += [row([name.partition(" ")[2], inputs(ZOO[name]), *_cells(each)]) for name, each in found.items()]
            lines.append("")
    errors = [f"- {name}: `{' '.join(each['error'].split())[:300]}`" for name, each in results.items() if "error" in each]
    lines += ["## What raises", "", *errors, ""] if errors else []
    lines += ["## How this page was made", "", f"{made_by}, on {datetime.date.today()}, with {versions(results)}."]
    return "\n".join(lines) + "\n"


def within(result: dict[str, Any]) -> bool:
    """Whether the model is exact, and stayed within its budget."""
    return "error" not in result and all(
        max(check["forward"], check["step"]) <= TOLERANCE[DTYPE] and check["counted"] == check["foretold"] <= check["budget"]
        for check in result.values()
    )


def _cells(result: dict[str, Any]) -> list[str]:
    if "error" in result:
        return ["**raises**", *[""] * (len(SHARDS) + 2)]
    worst = [max(check["forward"], check["step"]) for check in result.values()]
    last = result[str(SHARDS[-1])]
    shown = [f"{each:.0e}" if each <= TOLERANCE[DTYPE] else f"**no: {each:.0e}**" for each in worst]
    return [*shown, readable(last["counted"]), readable(last["budget"]), readable(last["free"])]
