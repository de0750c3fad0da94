"""Write the page of ops, ``docs/ops.md``, from torchhalo's registry: ``python docs/ops.py``."""

from __future__ import annotations

import importlib
from itertools import groupby
from pathlib import Path

from torchhalo.torch_internals import handlers

PAGE = Path(__file__).with_suffix(".md")

HEAD = """\
# Ops

Every op that torchhalo handles on a sharded `DTensor`, by family, with what travels between the ranks and what it refuses or
does worse than it could. Ops are named as they reach DTensor's dispatcher, below autograd: `F.max_pool2d` arrives as
`max_pool2d_with_indices`, its gradient as `max_pool2d_with_indices_backward`. Ops that are not listed are stock DTensor's:
pointwise ops stay sharded; one that gathers a sharded activation warns, or raises inside `torchhalo.strict()`.

Where an op has an `out=` variant, that is handled too. Made by `python docs/ops.py`; do not edit.
"""


def page() -> str:
    """The text of the page."""
    parts = [HEAD]
    entries = sorted(handlers.registry(), key=lambda entry: entry.family)
    for family, members in groupby(entries, key=lambda entry: entry.family):
        summary = (importlib.import_module(f"torchhalo.ops.{family}").__doc__ or "").splitlines()[0]
        parts.append(
            f"## {family.replace('_', ' ').capitalize()}\n\n{summary}\n\n| ops | what travels | limits |\n|---|---|---|"
        )
        rows: dict[tuple[str, str], list[str]] = {}
        for entry in members:
            names = rows.setdefault((entry.traffic, entry.limits), [])
            name = f"`{entry.op.overloadpacket.__name__}`"
            if name not in names:
                names.append(name)
        parts += [f"| {', '.join(names)} | {traffic} | {limits} |" for (traffic, limits), names in rows.items()]
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.name}")
