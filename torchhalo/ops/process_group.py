"""Collectives of `torch.distributed` that a program calls with DTensors: each rank takes part with the whole value."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from torchhalo.torch_internals import dtensors, handlers, redistribution

c10d = torch.ops.c10d


@handlers.register(
    c10d.allgather_.default,
    c10d._allgather_base_.default,
    c10d.allreduce_.default,
    c10d.broadcast_.default,
    traffic="the whole value to all ranks, if it is not replicated, and then that of the collective",
    limits="gathers; metrics sum what all ranks of a mesh hold alike: turn off their synchronization along it",
)
def collective(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``dist.all_gather``, ``all_reduce`` and ``broadcast``, as metrics call them to synchronize."""
    results: list[tuple[DTensor, torch.Tensor]] = []

    def plain(value: Any, written: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return [plain(each, written) for each in value]
        if not isinstance(value, DTensor):
            return value
        whole = dtensors.local(redistribution.redistribute(value, [Replicate()] * value.device_mesh.ndim, op))
        whole = whole.clone(memory_format=torch.contiguous_format) if written else whole.contiguous()
        if written:
            results.append((value, whole))
        return whole

    (_, targets), *others = handlers.named(op, args, kwargs).items()
    arguments = {name: plain(value, False) for name, value in others}
    # Of one that is waited for at once NCCL returns no work, and what torch makes of that in Python ends the process.
    _, work = op(plain(targets, True), **{**arguments, "async_op": True})
    if results:
        work.wait()
    for target, whole in results:
        torch.ops.aten.copy_.default(target, dtensors.replicated(whole, target.device_mesh))
    return args[0], work
