"""Programs of the docs, run as their command lines say."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def start(
    command: str, folder: Path, swaps: Mapping[str, str], inside: Sequence[str] = (), **variables: str
) -> subprocess.Popen[str]:
    """Start a command line of the docs, which may begin with variables: ``NAME=1 torchrun ...``.

    Args:
        folder: Where it runs.
        swaps: Words to put in place of others.
        inside: What to run it with, such as ``nsenter``.
        variables: More of them.
    """
    words = [swaps.get(word, word) for word in shlex.split(command)]
    while "=" in words[0]:
        name, _, variables[name] = words.pop(0).partition("=")
    assert words.pop(0) == "torchrun"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "torch.distributed.run", *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes: subprocess.Popen[str], seconds: float) -> None:
    """Wait for all, which must succeed; nothing of them stays behind."""
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=seconds)[0])
    except subprocess.TimeoutExpired:
        for process in processes:
            process.terminate()  # not killed: torchrun is to end its own processes first
        said = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(said)
