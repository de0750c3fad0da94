"""Which op is running: for errors and for those who watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Op = torch._ops.OpOverload
Handler = Callable[[Op, tuple[Any, ...], dict[str, Any]], object]


class Call(NamedTuple):
    """An op and what it is called with."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.op.overloadpacket.__name__


_running: list[tuple[Op, tuple[Any, ...], dict[str, Any]]] = []


def track_call(handler: Handler) -> Handler:
    """``handler``, and while it runs, `running_call` tells of it."""

    def run(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        _running.append((op, args, kwargs))
        try:
            return handler(op, args, kwargs)
        finally:
            _running.pop()

    return run


def running_call() -> Call | None:
    """The op whose handler runs; the outermost one, where a handler calls other ops."""
    return Call(*_running[0]) if _running else None
