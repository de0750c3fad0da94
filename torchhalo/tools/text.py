"""Numbers as people write them."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(shape: Sequence[int]) -> str:
    """Sizes as people write them.

    >>> size_text((2, 4))
    '2x4'
    """
    return "x".join(map(str, shape))


def readable(count: int) -> str:
    """So many bytes, in words; nothing for none."""
    if not count:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    raise AssertionError
