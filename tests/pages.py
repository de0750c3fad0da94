"""The code blocks of the docs, for tests to run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"


def snippet(page: str, heading: str, language: str = "python") -> str:
    """The first code block below a heading of ``docs/page.md``."""
    text = (DOCS / f"{page}.md").read_text()
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no heading {heading!r} in {page}.md"
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL)
    assert blocks, f"no {language} block under {heading!r} in {page}.md"
    return blocks[0]


def execute(code: str, names: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Run ``code`` on a device, with ``names`` known to it; all names after it."""
    exec(compile(code.replace('"cuda"', f'"{device}"'), "<docs>", "exec"), names)
    return names
