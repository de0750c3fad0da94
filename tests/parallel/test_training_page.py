"""The snippets of the page on training at scale, on ranks, against one process."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import DEVICE
from pages import execute, snippet
from test_training import STEPS, Net, assert_equal, batches, parameters, plain
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import torchhalo


@functools.cache
def cached_mesh(device: str, shape: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
    """DTensor's caches mix up two meshes that are equal, and a process of the tests runs several snippets."""
    alone = dist.get_world_size() == 1
    return init_device_mesh(device, (1,) * len(shape) if alone else shape, mesh_dim_names=mesh_dim_names)


def names(device: str, dtype: torch.dtype = torch.float64, **more: Any) -> dict[str, Any]:
    known = {"DistributedDataParallel": DistributedDataParallel, "F": F, "Net": lambda: Net().to(device, dtype)}
    known |= {"fully_shard": fully_shard}
    return {**known, "init_device_mesh": cached_mesh, "torch": torch, "torchhalo": torchhalo, **more}


def stepped(
    model: nn.Module,
    taken: list[Any],
    optimizer: torch.optim.Optimizer | None = None,
    clip: float = 1.0,
    scope: Any = nullcontext,
) -> list[float]:
    """Train on whole batches in one process; the losses."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for image, target in taken:
        optimizer.zero_grad()
        with scope():
            loss = F.mse_loss(model(image), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_loop_and_accumulation(device: str = "cpu") -> None:
    taken, one = batches(STEPS, device), Net().to(device)
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
    stepped(one, taken, optimizer)
    got = execute(snippet("training", "One mesh, one line"), names(device, batches=taken), device)
    assert_equal(parameters(got["model"]), parameters(one))
    got["optimizer"].zero_grad()
    optimizer.zero_grad()
    execute(snippet("training", "Gradient accumulation"), {**got, "batches": taken[:4]}, device)
    for image, target in taken[:4]:
        F.mse_loss(one(image), target).backward()
    optimizer.step()
    assert_equal(parameters(got["model"]), parameters(one))


def check_precision(device: str = "cpu") -> None:
    taken = [(image.float(), target.float()) for image, target in batches(STEPS, device)]
    autocast = functools.partial(torch.autocast, device, dtype=torch.bfloat16)
    one = Net().float().to(device)
    average = torch.optim.swa_utils.AveragedModel(one, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(one.parameters(), lr=0.05)
    for batch in taken:
        stepped(one, [batch], optimizer, scope=autocast)
        average.update_parameters(one)
    mesh = cached_mesh(device, (4,))
    model = torchhalo.parallelize(Net().float().to(device), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    known = names(device, batches=taken, mesh=mesh, model=model, optimizer=optimizer)
    got = execute(snippet("training", "Mixed precision, scaled losses, averages of weights"), known, device)
    moved = max(
        float((after - before).abs().max()) for after, before in zip(parameters(one), parameters(Net().to(device)), strict=True)
    )
    # bfloat16 has eight bits: of what the parameters moved by, that much is rounding.
    assert_equal(parameters(got["model"]), parameters(one), tolerance=0.02 * moved)
    assert_equal(parameters(got["average"]), parameters(average), tolerance=0.02 * moved)


def test_the_loop_and_accumulation(pool) -> None:
    pool(4).run(check_loop_and_accumulation)


def test_mixed_precision_scaler_and_average(pool) -> None:
    pool(4).run(check_precision)


def check_composition(heading: str, variant: str, device: str = "cpu") -> None:
    bf16 = variant == "bfloat16"
    dtype = torch.float32 if bf16 else torch.float64
    taken = [(image.to(dtype), target.to(dtype)) for image, target in batches(STEPS, device)]
    scope = functools.partial(torch.autocast, device, dtype=torch.bfloat16) if bf16 else nullcontext
    expected = stepped(one := Net().to(device, dtype), taken, clip=float("inf"), scope=scope)

    Net.checkpointed = variant == "checkpointed"
    try:
        code = snippet("training", heading)
        got = execute(three_axes(code) if variant == "three axes" else code, names(device, dtype), device)
        model, mesh = got["model"], got["mesh"]
        run = torch.compile(model, backend="aot_eager") if variant == "compiled" else model
        alone = heading == "Data and space"
        space = mesh if alone else mesh["space_h", "space_w"] if mesh.ndim == 3 else mesh["space"]
        dims = (0, 2, 3)[: space.ndim] if alone else (2, 3)[: space.ndim]
        data = mesh["data"]
        losses, optimizer = [], torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batch in taken:
            image, target = batch if alone else (x.chunk(data.size())[data.get_local_rank()] for x in batch)
            optimizer.zero_grad()
            with scope():
                loss = F.mse_loss(run(image), torchhalo.shard(target, space, dims))
            loss.backward()
            optimizer.step()
            total = plain(loss).clone()
            if not alone:
                dist.all_reduce(total, group=data.get_group())
                total /= data.size()
            losses.append(total.item())
    finally:
        Net.checkpointed = False
    assert losses == pytest.approx(expected, abs=2e-2 if bf16 else 1e-9)
    if not bf16:
        assert_equal(parameters(model), parameters(one))


def three_axes(code: str) -> str:
    """The same on a mesh whose space has two axes, one of them, as there are but four ranks, of one rank."""
    for two, three in {
        '(2, 2), mesh_dim_names=("data", "space")': '(2, 1, 2), mesh_dim_names=("data", "space_h", "space_w")',
        'mesh["space"]': 'mesh["space_h", "space_w"], dims=(2, 3)',
        "mesh=mesh)": 'mesh=mesh["data", "space_w"])',
        "dims=(0, 2)": "dims=(0, 2, 3)",
    }.items():
        code = code.replace(two, three)
    return code


WRAPPERS = ["Data and space", "DDP", "FSDP over data and space", "HSDP", "FSDP over data", "Three axes"]
COMPOSITIONS = [
    *((heading, "plain") for heading in WRAPPERS),
    *((heading, "checkpointed") for heading in ("Data and space", "DDP", "HSDP")),
    *((heading, "three axes") for heading in WRAPPERS[:5]),
    *((heading, "compiled") for heading in ("Data and space", "DDP")),
    *((heading, "bfloat16") for heading in ("DDP", "FSDP over data and space")),
]


@pytest.mark.parametrize("heading, variant", COMPOSITIONS)
def test_composition(pool, heading: str, variant: str) -> None:
    pool(4).run(check_composition, heading, variant)


def check_wrapped_gradients() -> None:
    """DDP takes part with each gradient once: none is reduced over space before."""
    got = execute(snippet("training", "DDP"), names("cpu"))
    model, space = got["model"], got["mesh"]["space"]
    image, target = batches(1, "cpu")[0]
    loss = F.mse_loss(model(image), torchhalo.shard(target, space))
    with _Collectives() as seen:
        loss.backward()
    # The norms' sums, two of each, and nothing else on the way of torchhalo or DTensor.
    assert [name for name in seen.names if "all_reduce" in name] == ["all_reduce"] * 3, seen.names
    with pytest.raises(ValueError, match="DDP or FSDP keeps its parameters"), torchhalo.no_sync(model):
        pass


class _Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            self.names.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


def test_wrapped_gradients_are_left_to_the_wrapper(pool) -> None:
    pool(4).run(check_wrapped_gradients)


def check_buffers() -> None:
    """DDP sends the buffers of its first rank to the others before each step."""
    torch.manual_seed(dist.get_rank())  # a model that is not the same on all ranks
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 1, 3)).double()
    mesh = cached_mesh(DEVICE, (2, 2), ("data", "space"))
    model = torchhalo.parallelize(DistributedDataParallel(model, process_group=mesh["data"].get_group()), mesh["space"])
    model = torchhalo.unparallelize(model).module
    one = copy.deepcopy(model)
    everyone = cached_mesh(DEVICE, (4,))
    model = torchhalo.parallelize(DistributedDataParallel(model), everyone)
    taken = [(image, target[:, :, 2:-2, 2:-2]) for image, target in batches(3, DEVICE)]
    expected = stepped(one, taken, clip=float("inf"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for (image, target), loss in zip(taken, expected, strict=True):
        optimizer.zero_grad()
        got = F.mse_loss(model(image), torchhalo.shard(target, everyone))
        got.backward()
        optimizer.step()
        assert plain(got).item() == pytest.approx(loss, abs=1e-9)
    assert_equal([*parameters(model), *map(plain, model.buffers())], [*parameters(one), *one.buffers()])


def test_buffers_under_ddp(pool) -> None:
    pool(4).run(check_buffers)


def check_mean_over_some() -> None:
    mesh = cached_mesh("cpu", (2, 2), ("data", "space"))
    everyone = cached_mesh("cpu", (4,))
    with pytest.raises(ValueError, match=r"over all ranks of the mesh of `parallelize` or over none"):
        torchhalo.parallelize(fully_shard(Net(), mesh=mesh["data"]), everyone)


def test_a_mean_over_some_of_the_ranks_raises(pool) -> None:
    pool(4).run(check_mean_over_some)


@pytest.mark.filterwarnings("default")  # torch 2.11 warns of its own code when it compiles
def test_the_page_on_one_gpu(gpu: str) -> None:
    """With NCCL, on meshes of one rank."""
    check_loop_and_accumulation(gpu)
    check_precision(gpu)
    for heading, variant in COMPOSITIONS:
        check_composition(heading, variant, gpu)
