"""`copy.deepcopy` of DTensors whose shard lies somewhere in a buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.torch_internals.dtensors import bare


def copy_at_offsets(on: bool) -> None:
    """Let DTensors be copied whose shard does not begin where its memory does, such as gradients of a bucket, or not."""
    if on:
        setattr(DTensor, "__deepcopy__", _deepcopy)  # noqa: B010
    elif "__deepcopy__" in DTensor.__dict__:
        del DTensor.__deepcopy__


def _deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
    """A DTensor takes over the offset of its shard, and torch then looks for memory that it does not have."""
    if id(self) in memo or not self.is_leaf or not self.data_ptr():
        return torch.Tensor.__deepcopy__(self, memo)
    local = bare(self._local_tensor)
    stand_in = DTensor(local.new_empty(0), self._spec, requires_grad=self.requires_grad)
    stand_in._local_tensor = local
    stand_in.__dict__.update(self.__dict__)
    stand_in.grad = self.grad
    memo.setdefault(id(memo), []).append(stand_in)  # keeps it alive, so that nothing else gets its id meanwhile
    memo[id(self)] = torch.Tensor.__deepcopy__(stand_in, memo)
    return memo[id(self)]
