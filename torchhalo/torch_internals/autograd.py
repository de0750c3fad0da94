"""The autograd graph while it runs, and nested containers of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def graph_task_id() -> int:
    """A number for the backward that runs in this thread, which no other has had."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` once when the backward that runs in this thread has ended, unless by an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def current_node() -> Any:
    """The node of the autograd graph that runs in this thread, or None."""
    return torch._C._current_autograd_node()


def forward_mode() -> bool:
    """Whether tensors may have tangents."""
    return torch.autograd.forward_ad._current_level >= 0


def tree_leaves_of(value: Any) -> list[Any]:
    """What nested tuples, lists and dicts hold."""
    return tree_leaves(value)
