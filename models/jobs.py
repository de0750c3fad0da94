"""Processes for models: each gets one that is forked when the libraries are imported, and ended with all that it started."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple


class Job(NamedTuple):
    """Work whose result, a JSON value, is written to ``path``."""

    name: str
    path: Path
    work: Callable[[], dict[str, Any]]


def run(jobs: list[Job], parallel: int, timeout: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """The names and results of the jobs in the order in which they end; an error for one that crashes or takes too long."""
    waiting = list(reversed(jobs))
    running: dict[BaseProcess, tuple[Job, float]] = {}
    context = multiprocessing.get_context("fork")
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop()
                job.path.unlink(missing_ok=True)
                process = context.Process(target=_serve, args=(job,))
                process.start()
                running[process] = job, time.monotonic() + timeout
            multiprocessing.connection.wait([process.sentinel for process in running], timeout=1)
            for process, (job, deadline) in list(running.items()):
                if process.is_alive() and time.monotonic() < deadline:
                    continue
                late = process.is_alive()
                _end(process)
                del running[process]
                if not job.path.exists():
                    job.path.write_text(
                        json.dumps({"error": f"took more than {timeout:.0f} s" if late else "the process died"})
                    )
                yield job.name, json.loads(job.path.read_text())
    finally:
        for process in running:
            _end(process)


def _serve(job: Job) -> None:
    os.setsid()  # so that what it starts can be ended with it
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # the ranks' traces; the result has the error
    part = job.path.with_suffix(".part")
    part.write_text(json.dumps(job.work()))
    part.rename(job.path)


def _end(process: BaseProcess) -> None:
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()
