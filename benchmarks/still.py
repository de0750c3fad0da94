"""A process group of which this process is the only living member: what it would receive is there at once.

The others are thought to hold the same shard: a sum is this rank's part times their number, a gather is copies of it. Halos
are zeros, as are the pads of a convolution, so that most models give the numbers of the plain model on the same shard. Each
collective is one launch, as one of NCCL's is. torch's ``fake`` group leaves memory as it was in some releases; what is
computed from that is soon not a number, and a GPU that adds up such draws less power and runs at a higher clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchhalo
from torchhalo.parallel import edges

NAME = "still"


class _Done(dist._Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Still(dist.ProcessGroup):
    """The group; its methods are what torch's functional collectives and `torch.distributed` call."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self._size, self._name, self._done = size, "", _Done()

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, *rest: Any) -> _Done:
        output.zero_()
        return self._done

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> _Done:
        for tensor in tensors:
            if options is None or options.reduceOp == dist.ReduceOp.SUM:
                tensor.mul_(self._size)
        return self._done

    allreduce_coalesced = allreduce

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, options: Any = None) -> _Done:
        output.view(self._size, -1).copy_(input.reshape(1, -1))
        return self._done

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any = None
    ) -> _Done:
        for output, input in zip(outputs, inputs, strict=True):
            self._allgather_base(output, input)
        return self._done

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, options: Any = None) -> _Done:
        torch.mul(input.view(self._size, *output.shape)[self.rank()], self._size, out=output)
        return self._done

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], options: Any = None
    ) -> _Done:
        for output, input in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, input)
        return self._done

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any = None) -> _Done:
        return self._done

    def barrier(self, options: Any = None) -> _Done:
        return self._done


def _make(store: dist.Store, rank: int, size: int, timeout: Any) -> Still:
    return Still(rank, size)


@contextmanager
def still_line(device: str, ranks: int = 4) -> Iterator[DeviceMesh]:
    """This process as rank 1 of a line of ``ranks``; torchhalo is disabled again when the block ends.

    Example:
        >>> with still_line("cpu") as mesh:
        ...     mesh.get_coordinate()
        [1]
    """
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, rank=1, world_size=ranks, store=dist.HashStore())
    try:
        with mock.patch.object(edges, "agree"):  # nobody else comes
            yield init_device_mesh(device, (ranks,))
    finally:
        torchhalo.disable()
        dist.destroy_process_group()
