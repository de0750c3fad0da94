"""What a collective brings to one member of its group, as copies from the memory of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from torchhalo.torch_internals.recording import Instruction


class Received(NamedTuple):
    """What one member of a group gets.

    Attributes:
        target: Where it goes.
        given: What each member sends, where anything of it is needed.
        own, sends: The calls of this member and of all.
        place: Of this member in the group.
    """

    target: torch.Tensor
    given: Sequence[torch.Tensor | None]
    own: Instruction
    sends: Sequence[Instruction]
    place: int

    @property
    def all(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.given if tensor is not None]


def receive(what: Received) -> None:
    """Fill the target of one member."""
    COLLECTIVES[what.own.op._schema.name.split("::")[1]](what)


def _all_to_all(what: Received) -> None:
    start = 0
    for tensor, size, sender in zip(what.given, what.own.args[1], what.sends, strict=True):
        if size:
            assert tensor is not None
            before = list(accumulate(sender.args[2], initial=0))[what.place]
            what.target.narrow(0, start, size).copy_(tensor.narrow(0, before, size))
        start += size


def _all_gather(what: Received) -> None:
    torch.cat(what.all, out=what.target)


def _all_reduce(what: Received) -> None:
    what.target.copy_(_reduced(what.all, what.own.args[1]))


def _reduce_scatter(what: Received) -> None:
    rows = what.target.shape[0]
    what.target.copy_(_reduced([tensor.narrow(0, what.place * rows, rows) for tensor in what.all], what.own.args[1]))


def _broadcast(what: Received) -> None:
    what.target.copy_(what.all[what.own.args[1]])


def _shard_dim_all_to_all(what: Received) -> None:
    """From a shard along one dim to one along another."""
    gathered, cut = what.own.args[1:3]
    parts = [tensor.chunk(len(what.given), cut) for tensor in what.all]
    what.target.copy_(torch.cat([part[what.place] for part in parts], gathered))


def _reduced(tensors: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    if reduction not in _REDUCTIONS:
        raise NotImplementedError(f"stream: no rule for the reduction {reduction!r}")
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = _REDUCTIONS[reduction](total, tensor)
    return total / len(tensors) if reduction == "avg" else total


_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}

#: By the name of torch's functional collective.
COLLECTIVES: dict[str, Callable[[Received], None]] = {
    "all_gather_into_tensor": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "reduce_scatter_tensor": _reduce_scatter,
    "shard_dim_alltoall": _shard_dim_all_to_all,
}
