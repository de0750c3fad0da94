"""The examples of the README run as they stand, and are short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def printed(code: str, folder: Path) -> list[str]:
    """What two processes print that run ``code``."""
    return [text for text, _ in programs.run(saved(code, folder), (), folder / "printed")]


def saved(code: str, folder: Path) -> Path:
    folder.mkdir()
    script = folder / "example.py"
    script.write_text(code)
    return script


def printed_under_torchrun(code: str, folder: Path) -> list[str]:
    """The same, started as the README says."""
    script = saved(code, folder)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # Each rank writes to a file of its own: on one pipe their lines would mix.
    command = [*LAUNCH, "--redirects", "3", "--log-dir", str(folder / "logs"), str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    logs = {path.relative_to(folder): path.read_text() for path in sorted(folder.rglob("*.log"))}
    assert done.returncode == 0, (done.stderr, logs)
    return [text for path, text in logs.items() if path.name == "stdout.log"]


def test_examples_run_on_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, stream, tensors = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(model.splitlines()) <= 18 and len(stream.splitlines()) <= 12 and len(tensors.splitlines()) <= 15
    shown = printed(tensors, tmp_path / "tensors")
    assert len(shown) == 2
    for text in shown:
        shapes, difference = text.rsplit(maxsplit=1)
        assert shapes == "(1, 4, 249, 125) of (1, 4, 249, 250)"
        # float32, where one process and a shard may take kernels that sum in another order
        assert float(difference) <= 1e-5
    names: dict[str, Any] = {}
    exec(stream, names)
    assert float(capsys.readouterr().out) <= 1e-5
    one, other = printed_under_torchrun(model, tmp_path / "model")
    losses = [float(line.split()[-1]) for line in one.splitlines()]
    assert one == other and len(losses) == 3 and losses[0] > losses[1] > losses[2]
