"""The U-Net step through other libraries, where they are installed; where they are not, or fail, a row says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_module

from benchmarks.common import MIB, Heap, Row, say
from benchmarks.unet_model import Shape, UNet
from torchhalo.tools import launch


def measure(shape: Shape, ranks: Sequence[int], rounds: int, steps: int, heap: Heap) -> Iterator[Row]:
    """Rows of JAX and of PhysicsNeMo."""
    ways: list[tuple[str, str, str, Callable[..., Iterator[Row]]]] = [
        ("JAX", "jax", "jax", jax),
        ("PhysicsNeMo", "physicsnemo", "nvidia-physicsnemo", physicsnemo),
    ]
    for name, module, package, way in ways:
        if find_spec(module) is None:
            yield {"way": name, "note": f"skipped: not installed (pip install {package})"}
            continue
        say(f"  {name}")
        try:
            yield from way(shape, ranks, rounds, steps, heap)
        except (launch.RankError, subprocess.SubprocessError, ImportError) as error:
            yield {"way": name, "note": f"failed: {str(error).strip().splitlines()[-1][:150]}"}


def jax(shape: Shape, ranks: Sequence[int], rounds: int, steps: int, heap: Heap) -> Iterator[Row]:
    """One process that holds all devices. The memory is what the compiled step takes for itself on each of them."""
    reports: dict[int, list[dict[str, Any]]] = {devices: [] for devices in (1, *ranks)}
    for _ in range(rounds):
        for devices, found in reports.items():
            with heap():
                found.append(_run_jax(shape, devices, steps))
    for devices, found in reports.items():
        last = found[-1]
        gathers = f", {last['gathers']} all-gathers beside" if last["gathers"] else ""
        yield {
            "way": "JAX, one device" if devices == 1 else f"JAX, {devices} devices",
            "base": "JAX, one device",
            "ranks": devices,
            "ms": median(seconds for report in found for seconds in report["times"]) * 1e3,
            "memory": last["memory"] / MIB,
            "sent": last["sent"],
            "note": f"jax {last['version']}, temporary memory{gathers}",
        }


def _run_jax(shape: Shape, devices: int, steps: int) -> dict[str, Any]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.unet_jax", json.dumps(shape), str(steps)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def physicsnemo(shape: Shape, ranks: Sequence[int], rounds: int, steps: int, heap: Heap) -> Iterator[Row]:
    """ShardTensor; its one process is that of plain torch."""
    for count in ranks:
        times: list[float] = []
        for _ in range(rounds):
            with heap():
                reports = launch.on_ranks(_train_shard_tensor, count, shape, steps)
            times += [max(each) for each in zip(*(seconds for seconds, _ in reports), strict=True)]
        memory = max(memory for _, memory in launch.on_ranks(_train_shard_tensor, count, shape, 1))
        note = f"nvidia-physicsnemo {version('nvidia-physicsnemo')}"
        yield {
            "way": f"PhysicsNeMo, {count} ranks",
            "ranks": count,
            "ms": median(times) * 1e3,
            "memory": memory / MIB,
            "note": note,
        }


def _train_shard_tensor(shape: Shape, steps: int) -> tuple[list[float], int]:
    """The time of each step, and the memory that training added."""
    from physicsnemo.domain_parallel import register_custom_ops

    if not torch.cuda.is_available():
        register_custom_ops()  # which importing it does on a GPU only
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _shard_tensor_stepper(shape._replace(size=2**shape.depth * mesh.size()), mesh)()
    before = launch.peak_memory()
    step = _shard_tensor_stepper(shape, mesh)
    times = []
    for _ in range(2 + steps if steps > 1 else 1):
        dist.barrier()
        begin = time.monotonic()
        step()
        times.append(time.monotonic() - begin)
    return times[-steps:], launch.peak_memory() - before


def _shard_tensor_stepper(shape: Shape, mesh: DeviceMesh) -> Callable[[], None]:
    from physicsnemo.domain_parallel import ShardTensor

    torch.manual_seed(0)
    model = distribute_module(UNet(shape), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    part = [*shape.input]
    part[2] //= mesh.size()
    image, target = (
        ShardTensor.from_local(torch.randn(part), mesh, [Shard(2)], sharding_shapes="chunk", global_shape=shape.input)
        for _ in range(2)
    )

    def step() -> None:
        optimizer.zero_grad()
        # Its own rules know these ops; mse_loss fails in its backward.
        (model(image) - target).square().mean().backward()
        optimizer.step()

    return step
