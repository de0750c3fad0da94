"""Distances of all pairs against one process."""

from __future__ import annotations

import math

import pytest
import torch
from harness import DEVICE, Sent, assert_parity, shard, simulated, wire
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from memory import memories
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import torchhalo

aten = torch.ops.aten


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::torchhalo.exchange.gathers.GatherWarning")  # of vectors that are cut
def test_random_distances(data: st.DataObject) -> None:
    """By both kernels: that of matrix products, which a GPU also takes for few vectors, and that of differences."""
    mesh = data.draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2)]))
    batch = data.draw(st.lists(st.integers(1, 3), max_size=2))
    other = [data.draw(st.sampled_from([n, 1])) for n in batch]
    rows, columns, size = (data.draw(st.integers(1, 6)) for _ in range(3))
    order = data.draw(st.sampled_from([None, 1.0, 2.0, 3.0, math.inf]))
    placements = [
        [data.draw(st.sampled_from([Replicate(), Partial(), *map(Shard, range(len(batch) + 2))])) for _ in mesh] for _ in "xy"
    ]

    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if order is None:
            return aten._euclidean_dist(x, y.expand(*batch, columns, size))
        return torch.cdist(x, y, p=order, compute_mode="donot_use_mm_for_euclid_dist")

    with simulated(math.prod(mesh)):
        with maybe_disable_local_tensor_mode():
            x = torch.randn(*batch, rows, size, dtype=torch.float64, device=DEVICE)
            y = torch.randn(*other, columns, size, dtype=torch.float64, device=DEVICE)
        # 1e-8: of squares that are subtracted, the root is taken
        assert_parity(
            call,
            [x, y],
            init_device_mesh(DEVICE, mesh),
            placements,
            atol=1e-8 if order is None else 1e-10,
            memory=data.draw(
                st.none() | memories(2).filter(lambda each: order or not each or not any(m.repeated for m in each))
            ),
        )


@pytest.mark.parametrize("mode", ["use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"])
def test_a_quantizer_sends_no_vectors_and_no_distances(mode: str) -> None:
    """The vectors are an image's, the codebook is whole: its gradient is a partial sum.

    The gradient by matrix products is made of DTensor's own ops, which in torch 2.11 add these sums up at once.
    """
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        image = shard(torch.randn(60, 3, dtype=torch.float64), mesh, [Shard(0)]).requires_grad_()
        book = shard(torch.randn(5, 3, dtype=torch.float64), mesh, [Replicate()]).requires_grad_()
        with wire() as sent, torchhalo.strict():
            torch.cdist(image, book, compute_mode=mode).square().sum(1).mean(0).backward()
    assert image.grad.placements == (Shard(0),)
    assert sent[0] == Sent("all_reduce", {0: 1, 1: 1})  # the loss
    if mode == "donot_use_mm_for_euclid_dist":
        assert len(sent) == 1 and book.grad.placements == (Partial(),)
    assert all(each.name == "all_reduce" and max(each.received.values()) <= book.numel() for each in sent)
