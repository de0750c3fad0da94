"""Each example, at a small size, as a user starts it: on two ranks under torchrun."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(name: str, *arguments: object) -> str:
    """What the example prints."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [*LAUNCH, str(ROOT / "examples" / name), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"GatherWarning|torchhalo/\w+\.py:\d+: \w*Warning", done.stderr), done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step .*: loss (\d+\.\d+)", printed, re.MULTILINE)]


def test_train_unet3d(tmp_path: Path) -> None:
    printed = run("train_unet3d.py", "--size", 36, "--steps", 4, "--folder", tmp_path)
    assert "each of 2 ranks has (1, 1, 18, 36, 36) of (1, 1, 36, 36, 36)" in printed
    _, second, _, last = losses(printed)
    assert last < 0.8 * second
    state = torch.load(tmp_path / "unet3d.pt")
    assert all(type(value) is torch.Tensor for value in state.values()), "the checkpoint is that of the plain model"


def test_train_classifier() -> None:
    printed = losses(run("train_classifier.py", "--size", 64, "--batch", 8, "--steps", 8))
    assert len(printed) == 8 and printed[-1] < 0.5 * printed[0]


@pytest.mark.parametrize(
    "arguments, shapes",
    [
        (("decode_image.py", "--size", 120, "--width", 8), "(1, 3, 60, 120) of (1, 3, 120, 120)"),
        (("decode_video.py", "--frames", 5, "--size", 64, "--width", 4), "(1, 3, 5, 32, 64) of (1, 3, 5, 64, 64)"),
    ],
    ids=["image", "video"],
)
def test_decoders_have_no_seams(arguments: tuple[object, ...], shapes: str) -> None:
    printed = run(*arguments, "--compare")
    assert f"each has {shapes}" in printed
    ((difference, scale),) = re.findall(r"largest difference from one process: (\S+) of (\S+)", printed)
    # float32, some thirty layers deep: one process and a shard may take kernels that sum in another order
    assert float(difference) < 1e-4 * float(scale)


def test_zarr_io(tmp_path: Path) -> None:
    import zarr

    paths = tmp_path / "image.zarr", tmp_path / "result.zarr"
    printed = run("zarr_io.py", "--input", paths[0], "--output", paths[1], "--size", 70)
    assert "in chunks of (1, 1, 35, 70)" in printed
    image, result = (np.asarray(zarr.open_array(path, mode="r")[:]) for path in paths)
    network = runpy.run_path(str(ROOT / "examples" / "zarr_io.py"))["network"]()
    with torch.no_grad():
        expected = network(torch.tensor(image))
    torch.testing.assert_close(torch.tensor(result), expected, rtol=0, atol=1e-5)  # float32: sums in another order
