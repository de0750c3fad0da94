"""Fused optimizer steps of a parallelized model against one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from harness import DEVICE, mesh_of
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import torchhalo

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, fused=True),
    "plain SGD": partial(torch.optim.SGD, lr=0.1, fused=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1, fused=True),
    "Adam": partial(torch.optim.Adam, lr=0.1, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.1, fused=True),
}


def train(name: str) -> None:
    results = []
    for parallel in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, bias=False)).double()
        if parallel:
            torchhalo.parallelize(model, mesh_of((2,)))
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(3):
            x = torch.randn(1, 2, 8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(distribute_tensor(x, mesh_of((2,)), [Shard(3)]) if parallel else x).square().mean().backward()
            optimizer.step()
        results.append(torchhalo.plain_state_dict(model))
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(pool, name: str) -> None:
    if name == "Adagrad" and DEVICE != "cpu":
        pytest.skip("torch has no fused Adagrad on a GPU")
    pool(2).run(train, name)
