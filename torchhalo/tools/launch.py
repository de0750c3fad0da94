"""Local processes that run one function, each as a rank of its own, and what became of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

TIMEOUT = timedelta(seconds=60)


class RankError(RuntimeError):
    """A rank failed; the others have been ended.

    Attributes:
        rank: Which.
        reason: The type and message of its error.
        trace: Where it happened.
    """

    def __init__(self, rank: int, reason: str, trace: str):
        super().__init__(f"rank {rank}: {reason}")
        self.rank, self.reason, self.trace = rank, reason, trace


def on_ranks(
    work: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: timedelta = TIMEOUT,
    method: str = "spawn",
    device: str = "cpu",
) -> list[Any]:
    """``work(*args)`` in ``ranks`` new processes; what each returned.

    Every process is started for it alone and ended with it, also if another fails or this one is interrupted.

    Args:
        work: A function of a module; it and ``args`` are pickled, what it returns goes through a file.
        timeout: Of a collective.
        method: How processes are started, as for `multiprocessing.get_context`. Those that are forked have what is imported
            here; nothing may have run in parallel here before.
        device: "cpu" for ranks that are joined by gloo, "cuda" for ranks of NCCL, which share the GPUs of this machine.

    Raises:
        RankError: The first rank that raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        with _frugal_heap():
            processes = torch.multiprocessing.start_processes(
                _serve, (ranks, folder, timeout, device, work, args), ranks, join=False, daemon=True, start_method=method
            )
        assert processes is not None
        try:
            while not processes.join(grace_period=5):
                pass
        except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
            raise _failure(Path(folder), error) from None
        finally:
            for process in processes.processes:
                process.kill()
                process.join()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _failure(folder: Path, error: Exception) -> RankError:
    """The earliest of the errors that ranks have written down: the later ones are often of ranks that lost a peer."""
    notes = sorted(folder.glob("*.error"), key=lambda note: note.stat().st_mtime_ns)
    if not notes:
        return RankError(getattr(error, "error_index", -1), str(error), "")
    reason, _, trace = notes[0].read_text().partition("\n\0\n")
    return RankError(int(notes[0].stem), reason, trace)


def _serve(
    rank: int, ranks: int, folder: str, timeout: timedelta, device: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    # torch has the system interrupt this process when its parent is gone. But a shell makes what it runs in the background
    # ignore interrupts, and then this rank would live on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    join(rank, ranks, Path(folder), timeout, device)
    try:
        torch.save(work(*args), Path(folder) / f"{rank}.pt")
    except BaseException as error:
        note = Path(folder) / f"{rank}.error"
        note.with_suffix(".writing").write_text(f"{type(error).__name__}: {error}\n\0\n{traceback.format_exc()}")
        note.with_suffix(".writing").rename(note)
        raise
    # Not after an error: the other ranks are ended then, and saying goodbye to them would only take time.
    dist.destroy_process_group()


def join(rank: int, ranks: int, folder: Path, timeout: timedelta = TIMEOUT, device: str = "cpu") -> None:
    """Make this process a rank of a new world, whose ranks meet in ``folder``, which serves one world.

    Args:
        timeout: Of a collective.
        device: "cpu" for gloo. "cuda" for NCCL, and gloo beside it for tensors of the CPU: the ranks take turns on the GPUs of
            this machine, however few, and talk over its loopback. That is slow, and in all else as on several GPUs.
    """
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        # NCCL refuses two ranks of one host on one GPU; these it takes for ranks of different hosts.
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo"}
        backend = "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)


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


def peak_memory() -> int:
    """The most memory that this process has had so far, in bytes."""
    with contextlib.suppress(OSError):
        # Unlike ru_maxrss this does not count what the parent had when it started this process.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
