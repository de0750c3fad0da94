"""How many kernels a call would launch on a GPU, counted on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common import Call

#: They make a constant, which is kept where no mode looks on, or wait.
QUIET = {"lift_fresh", "detach_", "wait_tensor"}


class _Ops(TorchDispatchMode):
    """Counts the ops below DTensor that compute or copy: not views, nor empty memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in QUIET and "empty" not in name:
            self.count += func._schema.is_mutable or not _memory(out) <= _memory((args, kwargs))
        return out


def _memory(value: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}


def count_launches(call: Call) -> int:
    """How many ops of a call compute or copy.

    Example:
        >>> count_launches(lambda: torch.ones(3).view(1, 3).relu())
        2
    """
    with _Ops() as found:
        call()
    return found.count
