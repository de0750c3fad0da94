"""Each example, at a small size, on two ranks. (test_readme starts programs under torchrun.)"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import programs
import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
WARNING = re.compile(r"GatherWarning|torchhalo/[\w/]+\.py:\d+: \w*Warning")


def run(folder: Path, name: str, *arguments: object) -> str:
    """What the ranks of the example print, one after the other."""
    texts = programs.run(ROOT / "examples" / name, arguments, folder / "printed")
    errors = "".join(error for _, error in texts)
    assert not WARNING.search(errors), errors
    return "".join(text for text, _ in texts)


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step .*: loss (\d+\.\d+)", printed, re.MULTILINE)]


def test_trainers_take_a_page() -> None:
    for name in ("lightning", "fabric", "slide", "monai", "loop"):
        assert len((ROOT / "examples" / f"train_{name}.py").read_text().splitlines()) <= 60


def test_train_unet3d(tmp_path: Path) -> None:
    printed = run(tmp_path, "train_unet3d.py", "--size", 36, "--steps", 4, "--folder", tmp_path)
    assert "each of 2 ranks has (1, 1, 18, 36, 36) of (1, 1, 36, 36, 36)" in printed
    _, second, _, last = losses(printed)
    assert last < 0.8 * second
    state = torch.load(tmp_path / "unet3d.pt")
    assert all(type(value) is torch.Tensor for value in state.values()), "the checkpoint is that of the plain model"


def test_train_classifier(tmp_path: Path) -> None:
    printed = losses(run(tmp_path, "train_classifier.py", "--size", 64, "--batch", 8, "--steps", 8))
    assert len(printed) == 8 and printed[-1] < 0.5 * printed[0]


@pytest.mark.parametrize(
    "arguments, shapes",
    [
        (("decode_image.py", "--size", 120, "--width", 8), "(1, 3, 60, 120) of (1, 3, 120, 120)"),
        (("decode_video.py", "--frames", 5, "--size", 64, "--width", 4), "(1, 3, 5, 32, 64) of (1, 3, 5, 64, 64)"),
    ],
    ids=["image", "video"],
)
def test_decoders_have_no_seams(arguments: tuple[object, ...], shapes: str, tmp_path: Path) -> None:
    printed = run(tmp_path, *arguments, "--compare")
    assert f"each has {shapes}" in printed
    ((difference, scale),) = re.findall(r"largest difference from one process: (\S+) of (\S+)", printed)
    # float32, some thirty layers deep: one process and a shard may take kernels that sum in another order
    assert float(difference) < 1e-4 * float(scale)


def test_zarr_io(tmp_path: Path) -> None:
    import zarr

    paths = tmp_path / "image.zarr", tmp_path / "result.zarr"
    printed = run(tmp_path, "zarr_io.py", "--input", paths[0], "--output", paths[1], "--size", 70)
    assert "in chunks of (1, 1, 35, 70)" in printed
    image, result = (np.asarray(zarr.open_array(path, mode="r")[:]) for path in paths)
    network = runpy.run_path(str(ROOT / "examples" / "zarr_io.py"))["network"]()
    with torch.no_grad():
        expected = network(torch.tensor(image))
    torch.testing.assert_close(torch.tensor(result), expected, rtol=0, atol=1e-5)  # float32: sums in another order


def test_one_gpu(tmp_path: Path) -> None:
    """Without ranks: one process decodes and trains within a budget."""
    command = [sys.executable, str(ROOT / "examples" / "one_gpu.py"), "--size", "48", "--width", "8", "--volume", "16"]
    done = subprocess.run([*command, "--memory", "12MB", "--compare"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ((difference, scale),) = re.findall(r"largest difference from the plain decoder: (\S+) of (\S+)", done.stdout)
    assert float(difference) < 1e-4 * float(scale)  # float32, cut and so summed in another order
    found = {
        name: [float(x) for x in re.findall(rf"{name}, step \d: loss (\S+)", done.stdout)] for name in ("streamed", "plain")
    }
    assert len(found["plain"]) == 2 and found["streamed"] == pytest.approx(found["plain"], abs=1e-4)


def test_train_lightning(tmp_path: Path) -> None:
    printed = losses(run(tmp_path, "train_lightning.py", "--size", 32, "--steps", 6))
    assert len(printed) == 6 and printed[-1] < 0.8 * printed[0]


def test_train_fabric(tmp_path: Path) -> None:
    printed = losses(run(tmp_path, "train_fabric.py", "--size", 32, "--steps", 6))
    assert len(printed) == 6 and printed[-1] < 0.8 * printed[0]


def test_train_loop(tmp_path: Path) -> None:
    printed = losses(run(tmp_path, "train_loop.py", "--size", 64, "--steps", 4, "--folder", tmp_path))
    assert len(printed) == 4 and printed[-1] < 0.8 * printed[0]


def test_train_slide(tmp_path: Path) -> None:
    printed = run(tmp_path, "train_slide.py", "--size", 128, "--steps", 3, "--folder", tmp_path)
    assert printed.count("this rank has (64, 128, 3)") == 6
    assert losses(printed)[-1] < 0.9 * losses(printed)[0]


def test_train_monai(tmp_path: Path) -> None:
    printed = run(tmp_path, "train_monai.py", "--size", 16, "--epochs", 3, "--folder", tmp_path)
    (dice,) = re.findall(r"mean Dice (\d\.\d+) after 3 epochs", printed)
    assert float(dice) > 0.7
