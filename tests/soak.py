"""A long training on images of changing sizes, eager and then compiled: what it holds, and how far it is from one process.

Run from the root of the repository: ``python -m tests.soak --ranks 2 --steps 1000 --device cuda``.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchhalo
from torchhalo.tools.launch import on_ranks

#: Those of the compiled half, each of which is compiled once.
COMPILED_SIZES = (24, 16), (37, 16), (3, 10)


class UNet(nn.Module):
    """One level, with each kind of layer that a U-Net has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.low = nn.Sequential(nn.MaxPool2d(2, ceil_mode=True), nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.first(x)
        low = F.interpolate(self.up(self.low(high)), size=x.shape[2:], mode="bilinear")
        return self.last(torch.cat([high, low], 1))


def sizes(steps: int) -> Iterator[tuple[int, int]]:
    """Height, which is cut, and width; some images are so low that a rank has no row of them."""
    draw = random.Random(0)
    for step in range(steps):
        eager = draw.choice([draw.randint(2, 7), draw.randint(8, 60)]), draw.choice([4, 7, 10, 32])
        yield eager if step < steps // 2 else draw.choice(COMPILED_SIZES)


def held(device: str) -> dict[str, float]:
    """Memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"host": pages * 4096 / 2**20}
    if device == "cuda":
        found |= {"device": torch.cuda.memory_allocated() / 2**20, "reserved": torch.cuda.memory_reserved() / 2**20}
    return found


def train(
    steps: int, device: str, mesh: DeviceMesh | None = None, backend: str = "inductor"
) -> tuple[list[float], list[dict[str, float]]]:
    """The loss of each step, and what was held after a tenth of them, before the compiled half, and at the end."""
    torch.manual_seed(0)
    model = UNet().double().to(device)
    if mesh is not None:
        torchhalo.parallelize(model, mesh, dims=2)
    compiled = model if mesh is None else torch.compile(model, dynamic=False, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    losses, counts = [], []
    for step, size in enumerate(sizes(steps)):
        image = torch.randn(1, 2, *size, generator=draw, dtype=torch.float64, device="cpu").to(device)
        target = image.mean(1, keepdim=True).roll(1, 3)
        if mesh is not None:
            image, target = torchhalo.shard(image, mesh, 2), torchhalo.shard(target, mesh, 2)
        optimizer.zero_grad()
        loss = F.mse_loss((model if step < steps // 2 else compiled)(image), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step + 1 in (max(1, steps // 10), steps // 2, steps):
            counts.append(held(device))
    return losses, counts


def rank(steps: int, device: str, backend: str) -> tuple[list[float], list[dict[str, float]]]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return train(steps, device, init_device_mesh(device, (dist.get_world_size(),)), backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; on a CPU, aot_eager takes less time")
    options = parser.parse_args()
    call = options.ranks, options.steps, options.device, options.backend
    found: list[Any] = on_ranks(rank, *call, timeout=timedelta(minutes=10), device=options.device)
    expected, _ = train(options.steps, "cpu")
    losses, counts = found[0]
    for name, count in zip(("start", "middle", "end"), counts, strict=True):
        print(f"{name:7}", "  ".join(f"{kind} {mib:9.1f} MiB" for kind, mib in count.items()))
    half = options.steps // 2
    for name, part in (("eager", slice(half)), ("compiled", slice(half, None))):
        apart = max(abs(got - want) / abs(want) for got, want in zip(losses[part], expected[part], strict=True))
        print(f"{name}: losses differ from one process's by up to {apart:.1e} of them")


if __name__ == "__main__":
    main()
