"""The code blocks of the docs, for tests to run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"


def snippet(page: str, heading: str, language: str = "python") -> str:
    """The first code block below a heading of ``docs/page.md``."""
    text = (DOCS / f"{page}.md").read_text()
    below, found = "", ""
    # Fences first: a comment in a block looks like a heading.
    for fence, code, line in re.findall(r"^```(\w*)\n(.*?)^```$|^#+ ([^\n]*)$", text, re.MULTILINE | re.DOTALL):
        below = line or below
        if below == heading and fence == language and not found:
            found = code
    assert found, f"no {language} block under {heading!r} in {page}.md"
    return found


def execute(code: str, names: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Run ``code`` on a device, with ``names`` known to it; all names after it."""
    exec(compile(code.replace('"cuda"', f'"{device}"'), "<docs>", "exec"), names)
    return names
