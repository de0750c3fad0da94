"""Train a small convolution network on one image, sharded over local processes and whole in one process, and compare.

Every process that trains is started for it alone, so that its peak memory is the training's own, and no rank ever holds more
of the image than its box.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module

import torchhalo
from torchhalo import dispatch
from torchhalo.geometry import Box
from torchhalo.layout import Layout, layout

TIMEOUT = timedelta(seconds=60)
WARM_UP = (16, 16)
# Sums over the image are cut differently, so the last bits of the gradients differ; nothing else may.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


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
        weights: The final parameters, all of them in one flat tensor.
        memory: By how many bytes training raised the peak memory of the process above that of a tiny warm-up.
        sent: How many bytes of halos the rank sent per step.
    """

    losses: list[float]
    weights: torch.Tensor
    memory: int
    sent: int


class Model(nn.Module):
    """Convolution, strided convolution and transposed convolution back up to the size of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 16, 5, padding=2)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 3, 3, stride=2, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = self.down(self.wide(image).relu()).relu()
        restored: torch.Tensor = self.up(hidden, output_size=list(image.shape[2:]))
        return restored


def sample(box: Box, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``box`` holds of the noisy image and of the clean one, from nothing but its global coordinates.

    Args:
        box: Spans along batch, channel, height and width.
    """
    _, channel, y, x = (
        torch.arange(*span).view([-1 if dim == at else 1 for at in range(4)]) for dim, span in enumerate(box.spans)
    )
    # Integers first, so that a value is the same, to the last bit, wherever in a shard its coordinate lies.
    clean = (_triangle(y + 20 * channel) * _triangle(x - 10 * channel)).to(torch.float32) / 2**10
    hashed = (y * 73856093 + x * 19349663 + channel * 83492791 + seed * 40503) % 2**31
    hashed = ((hashed ^ hashed >> 15) * 1103515245 + 12345) % 2**31
    noise = hashed.to(torch.float32) / 2**31 - 0.5
    return (clean + noise).to(dtype).expand(box.shape), clean.to(dtype).expand(box.shape)


def _triangle(position: torch.Tensor) -> torch.Tensor:
    """A wave from -32 to 32 with a period of 128."""
    return (position % 128 - 64).abs() - 32


def train(settings: Settings, mesh: DeviceMesh | None, show: bool) -> tuple[list[float], torch.Tensor]:
    """Train on one rank of ``mesh``, or in this process alone if it is None; the losses and the final weights."""
    torch.manual_seed(settings.seed)
    model: nn.Module = Model().to(settings.dtype)
    shape = (1, 3, *settings.size)
    if mesh is None:
        whole = Layout(shape, mesh_shape=(), cuts=((),) * len(shape))
        noisy, clean = sample(whole.owned(()), settings.seed, settings.dtype)
    else:
        model = distribute_module(model, mesh)
        noisy, clean = _sharded_sample(settings, shape, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(settings.steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(noisy), clean)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(_plain(loss)))
        if show:
            print(f"  step {step + 1}/{settings.steps}: loss {losses[-1]:.6f}", file=sys.stderr, flush=True)
    return losses, torch.cat([_plain(parameter).flatten() for parameter in model.parameters()])


def _sharded_sample(settings: Settings, shape: Sequence[int], mesh: DeviceMesh) -> list[DTensor]:
    placements = [Shard(2), Shard(3)][: mesh.ndim]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    box = layout(shape, mesh, placements).owned(coordinate)
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return [
        DTensor.from_local(shard.contiguous(), mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))
        for shard in sample(box, settings.seed, settings.dtype)
    ]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def run(settings: Settings) -> list[Report]:
    """Train in processes of their own, one per rank; what each of them reports.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank failed; the others have been ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        with _frugal_heap():
            processes = torch.multiprocessing.spawn(
                _work, args=(settings, folder), nprocs=settings.ranks, join=False, daemon=True
            )
        assert processes is not None
        try:
            while not processes.join(grace_period=5):
                pass
        finally:
            for process in processes.processes:
                process.kill()
                process.join()
        return [Report(**torch.load(Path(folder) / f"{rank}.pt")) for rank in range(settings.ranks)]


@contextlib.contextmanager
def _frugal_heap() -> Iterator[None]:
    """Processes started inside give freed tensors back to the system at once, so that peak memory is that of live tensors."""
    name = "MALLOC_MMAP_THRESHOLD_"  # glibc's; others do not read it
    before = os.environ.get(name)
    os.environ[name] = str(2**20)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _work(rank: int, settings: Settings, folder: str) -> None:
    """One rank: start up, warm up, train, and leave the report in ``folder``."""
    # torch has the system interrupt this process when its parent is gone. But a shell makes what it runs in the background
    # ignore interrupts, and then this rank would live on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(max(1, torch.get_num_threads() // settings.ranks))
    with _world(rank, settings, folder) as mesh, torchhalo.enable(), _counted() as counts:
        train(settings._replace(size=WARM_UP, steps=1), mesh, show=False)
        counts.clear()
        before = _peak_memory()
        losses, weights = train(settings, mesh, show=rank == 0)
        memory = _peak_memory() - before
    report = Report(losses, weights, memory, sum(counts) // settings.steps)
    torch.save(report._asdict(), Path(folder) / f"{rank}.pt")


@contextlib.contextmanager
def _world(rank: int, settings: Settings, folder: str) -> Iterator[DeviceMesh | None]:
    if not settings.mesh:
        yield None
        return
    store = dist.FileStore(str(Path(folder) / "store"), settings.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.ranks, timeout=TIMEOUT)
    yield init_device_mesh("cpu", settings.mesh)
    # Not in a `finally`: after an error the other ranks are ended, and saying goodbye to them would only take time.
    dist.destroy_process_group()


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """How many bytes this rank sends in each exchange, in a list that grows."""
    counts: list[int] = []
    exchange = dispatch.all_to_all

    def counted(tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
        counts.append(sum(sent) * tensor.element_size())
        return exchange(tensor, received, sent, group)

    dispatch.all_to_all = counted
    try:
        yield counts
    finally:
        dispatch.all_to_all = exchange


def _peak_memory() -> int:
    """The most memory that this process has had so far, in bytes."""
    with contextlib.suppress(OSError):
        # Unlike ru_maxrss this does not count what the parent had when it started this process.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Comparison(NamedTuple):
    """One process against the ranks."""

    settings: Settings
    whole: Report
    ranks: list[Report]

    @property
    def loss_difference(self) -> float:
        """The largest difference of losses, over steps and ranks."""
        losses = torch.tensor([report.losses for report in self.ranks], dtype=torch.float64)
        return float((losses - torch.tensor(self.whole.losses, dtype=torch.float64)).abs().max())

    @property
    def weight_difference(self) -> float:
        """The largest difference of final weights, over ranks."""
        weights = torch.stack([report.weights for report in self.ranks])
        return float((weights - self.whole.weights).abs().max())

    @property
    def equal(self) -> bool:
        """Whether both differences fit the dtype; one that is not a number does not."""
        tolerance = TOLERANCE[self.settings.dtype]
        return self.loss_difference <= tolerance and self.weight_difference <= tolerance

    def table(self) -> str:
        """Losses, differences, memory and what was sent, to read."""
        over = f"{len(self.ranks)} ranks"
        lines = [f"{'step':>4}  {'loss, one process':>20}  {'loss, ' + over:>20}  {'difference':>12}"]
        for step, (a, b) in enumerate(zip(self.whole.losses, self.ranks[0].losses, strict=True), start=1):
            lines.append(f"{step:>4}  {a:>20.10f}  {b:>20.10f}  {abs(a - b):>12.1e}")
        mib = 2**20
        lines += [
            "",
            f"largest difference of losses   {self.loss_difference:.1e}",
            f"largest difference of weights  {self.weight_difference:.1e}",
            f"tolerance                      {TOLERANCE[self.settings.dtype]:.1e}",
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


def compare(settings: Settings) -> Comparison:
    """Train sharded over ``settings.mesh``, then in one process."""
    height, width = settings.size
    kind = str(settings.dtype).removeprefix("torch.")
    mesh = "x".join(map(str, settings.mesh))
    print(f"image 1x3x{height}x{width}, {kind}, {settings.steps} steps", file=sys.stderr, flush=True)
    print(f"{settings.ranks} ranks, mesh {mesh}:", file=sys.stderr, flush=True)
    ranks = run(settings)
    print("one process:", file=sys.stderr, flush=True)
    (whole,) = run(settings._replace(mesh=()))
    return Comparison(settings, whole, ranks)
