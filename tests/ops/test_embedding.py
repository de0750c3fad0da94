"""Embeddings and bags of them, whatever dim of the table or of the indices is cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, assert_parity, shard, simulated, whole, wire
from hypothesis import given
from hypothesis import strategies as st
from memory import memories
from test_scattering import MESHES, gathering, layouts, random
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode


@random
@given(data=st.data())
@gathering
def test_random_embeddings(data: st.DataObject) -> None:
    """How often a row is read counts on all ranks together."""
    mesh = data.draw(st.sampled_from(MESHES))
    options = {
        "padding_idx": data.draw(st.sampled_from([None, 0, -1])),
        "scale_grad_by_freq": data.draw(st.booleans()),
    }
    points = data.draw(st.lists(st.integers(1, 6), max_size=3))
    with simulated(math.prod(mesh)):
        with maybe_disable_local_tensor_mode():
            table = torch.randn(5, 3, dtype=torch.float64, device=DEVICE)
            indices = torch.randint(0, 5, points, device=DEVICE)
        assert_parity(
            lambda table, indices: F.embedding(indices, table, **options).sin(),
            [table, indices],
            init_device_mesh(DEVICE, mesh),
            [[data.draw(st.sampled_from([Replicate(), Shard(1)])) for _ in mesh], layouts(data, len(points), mesh, False)],
            needs_grad=[True, False],
            memory=data.draw(memories(2)),
        )


class Widths(TorchDispatchMode):
    """How many columns the gradients have of which a kernel makes those of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, (DTensor, LocalTensor)) for t in types):
            return NotImplemented
        if func is torch.ops.aten.embedding_dense_backward.default and not isinstance(args[0], FakeTensor):
            self.found.append(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def test_a_rank_without_columns() -> None:
    """Torch's kernel of CUDA reads and writes where there are none."""
    with Widths() as widths, simulated(4):
        with maybe_disable_local_tensor_mode():
            table, indices = torch.randn(5, 3, dtype=torch.float64), torch.tensor([4, 0, 0, 2])
        mesh, placements = init_device_mesh(DEVICE, (4,)), [[Shard(1)], [Replicate()]]
        assert_parity(lambda table, i: F.embedding(i, table), [table, indices], mesh, placements, needs_grad=[True, False])
    assert widths.found == [3, 1, 1, 1], "of one process, and of the ranks with a column"


def test_rows_are_shortened_on_all_ranks() -> None:
    """`max_norm` changes the rows that are read; each rank reads others."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        with maybe_disable_local_tensor_mode():
            table, indices = torch.randn(5, 3, dtype=torch.float64) * 4, torch.tensor([[0, 0, 1], [3, 1, 3]])
            expected = table.clone()
            F.embedding(indices, expected, max_norm=1.0)
        sharded = shard(table, mesh, [Replicate()])
        F.embedding(shard(indices, mesh, [Shard(0)]), sharded, max_norm=1.0)
        torch.testing.assert_close(whole(sharded), expected, rtol=0, atol=1e-12)
        cut = shard(table, mesh, [Shard(0)])
        with wire() as sent, pytest.raises(NotImplementedError, match="max_norm"):
            F.embedding(shard(indices, mesh, [Shard(0)]), cut, max_norm=1.0)
    assert sent == []


# Models.
