"""Train a small U-Net on one large image, sharded over local processes and whole in one process, and compare.

Every process that trains is started for it alone, so that its peak memory is the training's own, and no rank ever holds more
of the image than its box.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torchhalo.exchange.transfer import counted
from torchhalo.parallel.arrays import shard, store
from torchhalo.parallel.parallelize import parallelize, plain_state_dict, unparallelize
from torchhalo.tools import picture
from torchhalo.tools.launch import on_ranks, peak_memory
from torchhalo.tools.text import size_text

WARM_UP = (16, 16)
PANEL = 512
WHOLE = (slice(None),) * 4
# Sums over the image are cut differently, so the last bits of the gradients differ, and each step of training amplifies that:
# in one process, the default steps in float32 end 3e-5 from those in float64, and 3e-2 in bfloat16. More steps need some room.
# Naive tiling is off by 0.4, and what is not rounding shows in float64.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 1e-1}


class Settings(NamedTuple):
    """What to train.

    Attributes:
        size: Height and width of the image.
        mesh: Ranks along the height, and along the width if there are two; empty for one process without DTensor.
        steps: How many steps of gradient descent.
        seed: Of the weights and of the image.
        dtype: Of the weights and of the image.
    """

    size: tuple[int, int]
    mesh: tuple[int, ...]
    steps: int
    seed: int
    dtype: torch.dtype

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)


class Report(NamedTuple):
    """What one rank has to say after training.

    Attributes:
        losses: One per step.
        weights: The final parameters and buffers, all of them in one flat tensor.
        memory: By how many bytes training raised the peak memory of the process above that of a tiny warm-up.
        sent: How many bytes of halos the rank sent per step.
    """

    losses: list[float]
    weights: torch.Tensor
    memory: int
    sent: int


@dataclass(frozen=True)
class Scene:
    """An image of discs in noise, or where the discs are: an array that is made, where it is read, from global coordinates.

    Attributes:
        shape: Batch, channels, height and width.
        seed: Another one gives other discs and other noise.
        dtype: Of the values.
        labels: Whether it holds 1 inside discs and 0 outside, instead of the image.
    """

    shape: tuple[int, int, int, int]
    seed: int
    dtype: torch.dtype
    labels: bool = False

    def __getitem__(self, cuts: tuple[slice, ...]) -> torch.Tensor:
        places = [torch.arange(size)[cut] for size, cut in zip(self.shape, cuts, strict=True)]
        _, channel, y, x = torch.meshgrid(*places, indexing="ij")
        # Integers first, so that a value is the same, to the last bit, in whatever box its coordinate lies.
        disc = self._disc(y, x)
        if self.labels:
            return disc.to(self.dtype)
        shade = (y + 2 * x) % 512 - 256
        noise = _hashed(y, x, channel + 3 * self.seed) % 1024 - 512
        return ((disc * 512 + shade.abs() // 2 + noise).to(torch.float32) / 512 - 0.5).to(self.dtype)

    def _disc(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Whether a point lies in a disc; each cell of a coarse grid has one, somewhere and of some size."""
        cell = 90
        chance = _hashed(y // cell, x // cell, torch.tensor(self.seed))
        radius = 12 + chance % 21
        slack = cell // 2 - radius
        down, right = (cell // 2 + (chance >> bits) % (2 * slack) - slack for bits in (8, 16))
        return ((y % cell - down) ** 2 + (x % cell - right) ** 2 < radius**2).to(torch.int64)


def _hashed(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Numbers below 2**31 that look random."""
    mixed = (a * 73856093 ^ b * 19349663 ^ (c + 1) * 83492791) % 2**31
    for _ in range(2):
        mixed = ((mixed ^ mixed >> 15) * 1103515245 + 12345) % 2**31
    return mixed ^ mixed >> 15


class UNet(nn.Module):
    """Pooling down, transposed convolution up, a skip connection on each level, for images of any size."""

    def __init__(self, channels: Sequence[int] = (8, 16, 32)) -> None:
        super().__init__()
        pairs = list(pairwise(channels))
        self.first = _block(3, channels[0])
        self.down = nn.ModuleList(_block(high, low) for high, low in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(low, high, 3, stride=2, padding=1) for high, low in reversed(pairs))
        self.merge = nn.ModuleList(_block(2 * high, high) for high, _ in reversed(pairs))
        self.last = nn.Conv2d(channels[0], 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        levels = [self.first(image)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2, ceil_mode=True)))
        x = levels.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            skip = levels.pop()
            x = merge(torch.cat([skip, up(x, output_size=list(skip.shape[2:]))], dim=1))
        result: torch.Tensor = self.last(x)
        return result


def _block(inputs: int, outputs: int) -> nn.Sequential:
    # The running statistics must keep up with a handful of steps.
    norm = nn.BatchNorm2d(outputs, momentum=0.5)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), norm, nn.ReLU())


def work(settings: Settings, folder: str) -> Report:
    """One rank: warm up, train, and leave predictions in ``folder``."""
    mesh = init_device_mesh("cpu", settings.mesh) if settings.mesh else None
    with counted() as counts:
        train(settings._replace(size=WARM_UP, steps=1), mesh, show=False)
        counts.clear()
        before = peak_memory()
        model, image, losses = train(settings, mesh, show=dist.get_rank() == 0)
        memory = peak_memory() - before
    sent = sum(counts) // settings.steps
    values = [value.flatten() for value in plain_state_dict(model).values() if value.is_floating_point()]
    predict(settings, model, image, Path(folder))
    return Report(losses, torch.cat(values), memory, sent)


def train(settings: Settings, mesh: DeviceMesh | None, show: bool) -> tuple[nn.Module, torch.Tensor, list[float]]:
    """Train on one rank of ``mesh``, or in this process alone if it is None; the model, the image and the losses."""
    torch.manual_seed(settings.seed)
    model: nn.Module = UNet().to(settings.dtype)
    image, labels = (scene[WHOLE] if mesh is None else shard(scene, mesh, (2, 3)[: mesh.ndim]) for scene in scenes(settings))
    if mesh is not None:
        parallelize(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    losses = []
    for step in range(settings.steps):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(image), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        if show:
            _progress(step + 1, settings.steps, losses[-1])
    return model, image, losses


def scenes(settings: Settings) -> tuple[Scene, Scene]:
    """The image, and what is to be seen in it."""
    image = Scene((1, 3, *settings.size), settings.seed, settings.dtype)
    return image, replace(image, shape=(1, 1, *settings.size), labels=True)


def _progress(step: int, steps: int, loss: float) -> None:
    """A bar on a terminal, a line elsewhere."""
    text = f"step {step}/{steps}: loss {loss:.6f}"
    if sys.stderr.isatty():
        done = 30 * step // steps
        text = f"\r  [{'#' * done}{'.' * (30 - done)}] {text}" + "\n" * (step == steps)
    else:
        text = f"  {text}\n"
    print(text, end="", file=sys.stderr, flush=True)


@torch.no_grad()
def predict(settings: Settings, model: nn.Module, image: torch.Tensor, folder: Path) -> None:
    """Write what the trained model makes of the image; of a sharded one also what it makes of each shard by itself."""
    model.eval()
    if not isinstance(image, DTensor):
        canvas(settings, folder, "whole").copy_(model(image).sigmoid())
        return
    store(model(image).sigmoid(), canvas(settings, folder, "sharded"))
    unparallelize(model)
    tile, target = image.to_local(), canvas(settings, folder, "tiled")
    alone = model(tile).sigmoid() if tile.numel() else tile[:, :1]
    placed = image.device_mesh, image.placements
    store(DTensor.from_local(alone, *placed, run_check=False, shape=target.shape, stride=target.stride()), target)


def canvas(settings: Settings, folder: Path, name: str) -> torch.Tensor:
    """A prediction in a file that all processes share."""
    shape = (1, 1, *settings.size)
    return torch.from_file(str(folder / name), shared=True, size=math.prod(shape), dtype=settings.dtype).view(shape)


class Comparison(NamedTuple):
    """One process against the ranks.

    Attributes:
        errors: By how much predictions differ from those of one process, at most: sharded ones, and those of naive tiling.
    """

    settings: Settings
    whole: Report
    ranks: list[Report]
    errors: tuple[float, float]

    @property
    def loss_difference(self) -> float:
        """The largest difference of losses, over steps and ranks."""
        losses = torch.tensor([report.losses for report in self.ranks], dtype=torch.float64)
        return float((losses - torch.tensor(self.whole.losses, dtype=torch.float64)).abs().max())

    @property
    def weight_difference(self) -> float:
        """The largest difference of final weights and running statistics, over ranks."""
        weights = torch.stack([report.weights for report in self.ranks])
        return float((weights - self.whole.weights).abs().max())

    @property
    def equal(self) -> bool:
        """Whether all differences fit the dtype; one that is not a number does not."""
        tolerance = TOLERANCE[self.settings.dtype]
        return all(found <= tolerance for found in (self.loss_difference, self.weight_difference, self.errors[0]))

    def table(self) -> str:
        """Losses, differences, memory and what was sent, to read."""
        over = f"{len(self.ranks)} ranks"
        lines = [f"{'step':>4}  {'loss, one process':>20}  {'loss, ' + over:>20}  {'difference':>12}"]
        for step, (a, b) in enumerate(zip(self.whole.losses, self.ranks[0].losses, strict=True), start=1):
            lines.append(f"{step:>4}  {a:>20.10f}  {b:>20.10f}  {abs(a - b):>12.1e}")
        mib = 2**20
        lines += [
            "",
            f"largest difference of losses       {self.loss_difference:.1e}",
            f"largest difference of weights      {self.weight_difference:.1e}",
            f"largest difference of predictions  {self.errors[0]:.1e}",
            f"tolerance                          {TOLERANCE[self.settings.dtype]:.1e}",
            f"naive tiling, for comparison: predictions differ by {self.errors[1]:.1e}",
            "",
            f"{'':<12}  {'peak memory':>12}  {'of one process':>14}  {'halos sent per step':>19}",
            f"{'one process':<12}  {self.whole.memory / mib:>8.1f} MiB",
        ]
        for rank, report in enumerate(self.ranks):
            share = report.memory / max(1, self.whole.memory)
            lines.append(
                f"{f'rank {rank}':<12}  {report.memory / mib:>8.1f} MiB  {share:>13.0%}  {report.sent / 1024:>15.1f} KiB"
            )
        return "\n".join(lines)


def compare(settings: Settings, path: Path | None = None) -> Comparison:
    """Train sharded over ``settings.mesh``, then in one process; draw a picture at ``path``.

    Raises:
        RankError: A rank failed; the others have been ended.
    """
    height, width = settings.size
    kind = str(settings.dtype).removeprefix("torch.")
    mesh = size_text(settings.mesh)
    print(f"image 1x3x{height}x{width}, {kind}, {settings.steps} steps", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("whole", "sharded", "tiled"):
            canvas(settings, Path(folder), name)
        print(f"{settings.ranks} ranks, mesh {mesh}:", file=sys.stderr, flush=True)
        ranks = on_ranks(work, settings.ranks, settings, folder)
        print("one process:", file=sys.stderr, flush=True)
        (whole,) = on_ranks(work, 1, settings._replace(mesh=()), folder)
        expected, *found = (canvas(settings, Path(folder), name) for name in ("whole", "sharded", "tiled"))
        errors = [(prediction - expected).abs().float() for prediction in found]
        comparison = Comparison(settings, whole, ranks, (float(errors[0].max()), float(errors[1].max())))
        if path is not None:
            draw(path, scenes(settings)[0][WHOLE], expected, *errors)
    return comparison


def draw(path: Path, image: torch.Tensor, prediction: torch.Tensor, sharded: torch.Tensor, tiled: torch.Tensor) -> None:
    """Four panels: image, prediction, and the errors of both ways to cut the image, in the same colours."""
    image, prediction = (_fitted(values, F.avg_pool2d) for values in (image, prediction))
    most = [float(values.max()) for values in (sharded, tiled)]
    # The largest of each patch: the mean would hide a thin seam.
    maps = [_fitted(values, F.max_pool2d)[0] / max(*most, torch.finfo().tiny) for values in (sharded, tiled)]
    panels = [
        ("image", (image - image.min()) / (image.max() - image.min()).clamp(min=torch.finfo().tiny)),
        ("prediction", picture.blend(prediction[0], (0.05, 0.1, 0.25), (1.0, 0.85, 0.3))),
        (f"error, sharded: at most {most[0]:.0e}", picture.heat(maps[0])),
        (f"error, naive tiles: at most {most[1]:.0e}", picture.heat(maps[1])),
    ]
    picture.save(path, panels)


def _fitted(values: torch.Tensor, pool: Callable[..., torch.Tensor]) -> torch.Tensor:
    """The first of a batch, made smaller or larger by a whole number, to fill a panel."""
    longest = max(values.shape[2:])
    small = pool(values.float(), math.ceil(longest / PANEL), ceil_mode=True)
    return F.interpolate(small, scale_factor=max(1, PANEL // longest))[0]
