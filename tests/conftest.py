from __future__ import annotations

import os

# Before anything imports torch: the workers share the cores, and threads that wait for each other would take them from all.
os.environ["OMP_NUM_THREADS"] = "1"
# Before anything imports Triton: without a GPU its kernels are run by its interpreter.
os.environ["TRITON_INTERPRET"] = "0" if os.environ.get("TORCHHALO_TEST_DEVICE") == "cuda" else "1"

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from harness import Pool

import torchhalo


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Pool]]:
    """Gloo processes by number of ranks, started when first asked for."""
    pools: dict[int, Pool] = {}

    def get(ranks: int) -> Pool:
        if ranks not in pools or pools[ranks].broken:
            pools[ranks] = Pool(ranks)
        return pools[ranks]

    yield get
    for each in pools.values():
        each.close()


@pytest.fixture
def gpu() -> Iterator[str]:
    """A CUDA device, as the one rank of an NCCL group, with torchhalo enabled and no TF32."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device on this machine")
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torchhalo.enable():
            yield "cuda"
    finally:
        dist.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
