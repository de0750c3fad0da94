"""Pieces of a sharded tensor that were taken before it was written to."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from harness import DEVICE, shard, simulated, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard


def test_an_outdated_piece_raises() -> None:
    """And one that lies beside what was written, or is written over as a whole, does not."""
    with simulated(3):
        y = shard(torch.arange(14.0).view(2, 7), init_device_mesh(DEVICE, (3,)), [Shard(1)])
        part, beside, row = y[:, 2:5], y[:, 5:], y[:, 3].unsqueeze(0)
        y[:, 2:4] = 1.0
        beside.mul_(2)
        outdated: list[Callable[[], object]] = [
            lambda: part + 1,
            lambda: part.mul_(2),
            lambda: row.clone(),
            lambda: part[:, 1:],
            lambda: part.sum(),
            lambda: torch.cat([part, beside], 1),
        ]
        for use in outdated:
            with pytest.raises(RuntimeError, match="take it again after the write"):
                use()
        part.zero_()
        part.add_(3)
        whole_part = part + beside[:, :1]
        y.add_(1)
        with pytest.raises(RuntimeError, match="take it again after the write"):
            beside.add_(1)
        want = [[1.0, 2.0, 4.0, 4.0, 4.0, 11.0, 13.0], [8.0, 9.0, 4.0, 4.0, 4.0, 25.0, 27.0]]
        assert whole(y).tolist() == want
        assert whole(whole_part).tolist() == [[13.0] * 3, [27.0] * 3]


def test_a_copy_forgets() -> None:
    with simulated(2):
        y = shard(torch.arange(6.0), init_device_mesh(DEVICE, (2,)), [Shard(0)])
        copy.deepcopy(y[1:4]).zero_()
        assert whole(y).tolist() == [0, 1, 2, 3, 4, 5]
