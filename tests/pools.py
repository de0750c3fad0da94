"""Processes of ranks, kept between tests, that are forked with all imports done."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import DEVICE
from torch.distributed import device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._pytree import tree_map_only

import torchhalo
from torchhalo.tools import launch

TIMEOUT = 300 if DEVICE == "cpu" else 900  # ranks of NCCL take turns on their GPU
#: The ranks are forked from a process that has imported these and done nothing else: each would take seconds for it.
PRELOAD = ["hypothesis", "pytest", "torch._inductor.compile_fx", "torch.distributed._local_tensor", "torchhalo"]


def forked(work: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    """A process that does ``work(*args)``, forked with all imports done; it ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=work, args=args, daemon=True)
    # The server, which starts with the first process, asks for a GPU without touching it: what it forks could not then.
    with mock.patch.dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1"):
        process.start()
    return process


class Pool:
    """Processes, joined by gloo or NCCL, that run functions of the test modules, the same on every rank."""

    def __init__(self, ranks: int, timeout: int = TIMEOUT):
        self._timeout = timeout
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            ours, theirs = multiprocessing.Pipe()
            self._processes.append(forked(_serve, theirs, rank, ranks, self._folder.name, timeout))
            self._pipes.append(ours)
        self.broken = False

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on every rank; what each returned, or an error with the trace of each rank that failed."""
        self.broken = True  # until every rank has answered
        for pipe in self._pipes:
            pipe.send((function, args))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._timeout if not failures else 10):
                failures.append(f"rank {rank} did not answer")
                continue
            answered, value = pipe.recv()
            (results if answered else failures).append(value if answered else f"rank {rank}:\n{value}")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        self.broken = False
        return results

    def close(self) -> None:
        self.broken = True
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _group_per_ranks(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """What makes groups for meshes, once for the same ranks: gloo wakes a thread of each a hundred times a second, for ever."""
    made: dict[Any, Any] = {}

    @functools.wraps(new_group)
    def wrapper(ranks: Sequence[int], timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        known = tuple(sorted(ranks)), timeout, backend
        if known not in made:
            made[known] = new_group(ranks, timeout, backend, **kwargs)
        return made[known]

    return wrapper


def _serve(pipe: Any, rank: int, ranks: int, folder: str, timeout: int) -> None:
    torch.set_num_threads(1)
    device_mesh.new_group = _group_per_ranks(device_mesh.new_group)
    launch.join(rank, ranks, Path(folder), timedelta(seconds=timeout), DEVICE)
    while True:
        function, args = pipe.recv()
        args = tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), args)
        try:
            torch.manual_seed(0)
            # Tests make meshes that are equal and not the same, which these caches mix up; torch.compile then fails.
            _clear_sharding_prop_cache()
            with torchhalo.enable():
                answer = True, tree_map_only(torch.Tensor, lambda t: t.cpu(), function(*args))
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
