from __future__ import annotations

import os
import random

# Before anything imports torch: the workers share the cores, and threads that wait for each other would take them from all.
os.environ["OMP_NUM_THREADS"] = "1"
# Before anything imports Triton: without a GPU its kernels are run by its interpreter.
os.environ["TRITON_INTERPRET"] = "0" if os.environ.get("TORCHHALO_TEST_DEVICE") == "cuda" else "1"

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from pools import Pool

import torchhalo


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """Processes by number of ranks, started when first asked for."""
    pools: dict[int, Pool] = {}

    def get(ranks: int) -> Pool:
        if ranks not in pools or pools[ranks].broken:
            pools[ranks] = Pool(ranks)
        return pools[ranks]

    yield get
    for each in pools.values():
        each.close()


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def run(request: pytest.FixtureRequest, pool: Callable[[int], Pool]) -> Callable[..., list[Any]]:
    """Runs a function on every rank of 2, and of 4, processes."""
    return pool(request.param).run


@pytest.fixture
def cuda() -> str:
    """A CUDA device, in no process group."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device on this machine")
    return "cuda"


@pytest.fixture
def gpu(cuda: str) -> Iterator[str]:
    """A CUDA device, as the one rank of an NCCL group, with torchhalo enabled and no TF32."""
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torchhalo.enable():
            yield cuda
    finally:
        dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="no tests that are marked slow, and a tenth of each random test's examples"
    )
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="the tests in another order, to find what one leaves to the next"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The slow ones first, so that no worker is left alone with one at the end."""
    slow = [item for item in items if item.get_closest_marker("slow") is not None]
    others = [item for item in items if item.get_closest_marker("slow") is None]
    quick, seed = config.getoption("--quick"), config.getoption("--shuffle")
    items[:] = others if quick else slow + others
    if seed is not None:
        random.Random(seed).shuffle(items)
    if not quick:
        return
    config.hook.pytest_deselected(items=slow)
    for item in others:
        function = getattr(item, "obj", None)
        if getattr(function, "is_hypothesis_test", False):
            function = getattr(function, "__func__", function)
            full = function._hypothesis_internal_use_settings
            function._hypothesis_internal_use_settings = settings(full, max_examples=max(3, full.max_examples // 10))
