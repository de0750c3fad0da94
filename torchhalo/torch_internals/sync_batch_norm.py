"""`torch.nn.SyncBatchNorm` on a DTensor, which needs no collectives of its own."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

_stock_sync_batch_norm = torch.nn.SyncBatchNorm.forward


def swap_sync_batch_norm(on: bool) -> None:
    """Let `torch.nn.SyncBatchNorm`, which has collectives of its own, treat a DTensor as batch norm does: as one tensor."""
    setattr(torch.nn.SyncBatchNorm, "forward", _sync_batch_norm if on else _stock_sync_batch_norm)  # noqa: B010


def _sync_batch_norm(module: torch.nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
    if not isinstance(input, DTensor):
        return _stock_sync_batch_norm(module, input)
    if module.training and not torch.compiler.is_compiling():
        _check_sync_group(module, input.device_mesh)
    return torch.nn.modules.batchnorm._BatchNorm.forward(module, input)


def _check_sync_group(module: torch.nn.SyncBatchNorm, mesh: DeviceMesh) -> None:
    with _disable_current_modes():
        inside = mesh.mesh.flatten().tolist()
    group = dist.get_process_group_ranks(module.process_group or dist.group.WORLD)
    others = sorted(set(group) - set(inside))
    if others:
        raise RuntimeError(
            f"SyncBatchNorm: its process group must lie in the device mesh of its input, a DTensor; ranks {others} of the "
            f"group are not in {mesh}. Make the module with process_group=mesh.get_group() for statistics over the mesh, or "
            "shard the batch over a mesh that holds all ranks for statistics over all of them"
        )
