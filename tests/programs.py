"""Programs run by ranks that are forked with all imports done: a tenth of what a start under torchrun takes."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pools import forked

ROOT = Path(__file__).parent.parent


def run(
    program: Path, arguments: Sequence[object], folder: Path, ranks: int = 2, seconds: float = 180
) -> list[tuple[str, str]]:
    """What each rank writes to its output and to its errors, in an environment like that of torchrun; all must succeed.

    Args:
        folder: Where the texts go, in files; it is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # As torchrun does, hold the store that the ranks find each other by: no port has to be guessed.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    texts = list(map(str, arguments))
    processes = [forked(_serve, program, texts, folder, rank, ranks, store.port) for rank in range(ranks)]
    try:
        for process in processes:
            process.join(seconds)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    texts = [((folder / f"{rank}.out").read_text(), (folder / f"{rank}.err").read_text()) for rank in range(ranks)]
    assert codes == [0] * ranks, (codes, texts)
    return texts


def _serve(program: Path, arguments: list[str], folder: Path, rank: int, ranks: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % (torch.cuda.device_count() or ranks)),  # by which torch chooses the GPU
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_RUN_ID="programs",
        NCCL_HOSTID=str(rank),  # so NCCL takes ranks that share a GPU for those of several hosts
        NCCL_SOCKET_IFNAME="lo",
    )
    for descriptor, name in ((1, "out"), (2, "err")):
        with open(folder / f"{rank}.{name}", "w") as file:
            os.dup2(file.fileno(), descriptor)
    torch.set_num_threads(1)
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.parent))
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
