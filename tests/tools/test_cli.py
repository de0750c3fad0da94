"""The command line, as a user runs it: the demo agrees with one process, wrong arguments are told, and no process stays."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import torchhalo
from torchhalo.tools.cli import main
from torchhalo.tools.demo import WHOLE, Comparison, Report, Settings, draw, scenes

COMMAND = [sys.executable, "-m", "torchhalo"]
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_demo_agrees_with_one_process(tmp_path: Path) -> None:
    path = tmp_path / "demo.png"
    arguments = ["demo", "--mesh", "2x1", "--size", "37x50", "--steps", "2", "--dtype", "float64", "--picture", str(path)]
    done = subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    differences = re.findall(r"^largest difference of (\w+) +(\S+)$", done.stdout, re.MULTILINE)
    assert [name for name, _ in differences] == ["losses", "weights", "predictions"]
    assert all(float(value) <= 1e-12 for _, value in differences)
    (tiled,) = re.findall(r"^naive tiling.* by (\S+)$", done.stdout, re.MULTILINE)
    assert float(tiled) > 1e-3, "a demo in which cutting the image does no harm shows nothing"
    assert re.search(r"^rank 1 +\d+\.\d MiB", done.stdout, re.MULTILINE)
    assert "step 2/2" in done.stderr, "progress is shown"
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_demo_ends_all_ranks_when_one_is_killed(tmp_path: Path) -> None:
    with _training(tmp_path / "log") as (demo, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        assert demo.wait(timeout=120) == 1
    assert re.search(r"torchhalo demo: rank \d failed", (tmp_path / "log").read_text())
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_demo_leaves_no_rank_when_it_is_killed_itself(tmp_path: Path) -> None:
    # As a shell does for what it runs in the background.
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _training(tmp_path / "log") as (_, ranks):
            pass
    finally:
        signal.signal(signal.SIGINT, kept)
    gone = _eventually(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    assert gone, "a rank outlives the demo"


@contextlib.contextmanager
def _training(log: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A demo that has taken its first step, with its ranks; it is killed at the end.

    Its progress goes to a file: a pipe would break with this process's end of it, and end the ranks for that reason.
    """
    arguments = ["demo", "--ranks", "2", "--size", "16", "--steps", "100000", "--no-picture"]
    with log.open("w") as file, subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, stderr=file) as demo:
        try:
            assert _eventually(lambda: "step 1/" in log.read_text() or demo.poll() is not None)
            ranks = _ranks(demo.pid)
            assert len(ranks) == 2, log.read_text()
            yield demo, ranks
        finally:
            demo.kill()


def _eventually(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Whether ``condition`` comes true before ``seconds`` have passed."""
    deadline = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return met


def _ranks(pid: int) -> list[int]:
    """The processes that ``pid`` started to train, the first rank first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--ranks", "0"], "argument --ranks: wants a whole number from 1 to 1048576, got '0'"),
        (["demo", "--steps", "many"], "argument --steps: wants a whole number from 1 to 1048576, got 'many'"),
        (["demo", "--seed", "-1"], "argument --seed: "),
        (["demo", "--size", "12x"], "argument --size: wants N or HxW, such as 512 or 512x768, got '12x'"),
        (["demo", "--mesh", "4"], "argument --mesh: wants HxW, such as 2x2, got '4'"),
        (["demo", "--mesh", "2x2x2"], "argument --mesh: wants HxW, such as 2x2, got '2x2x2'"),
        (["demo", "--mesh", "2x2", "--ranks", "3"], "--mesh 2x2 has 4 ranks, but --ranks is 3"),
        (["demo", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert words in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in [
        (["--help"], "demo"),
        (["demo", "--help"], "(default: float32)"),
        (["--version"], f"torchhalo {torchhalo.__version__} (torch {torch.__version__})"),
    ]:
        with pytest.raises(SystemExit) as done:
            main(arguments)
        assert done.value.code == 0
        assert words in capsys.readouterr().out


SETTINGS = Settings(size=(40, 50), mesh=(2,), steps=2, seed=3, dtype=torch.float32)


@pytest.mark.parametrize(("error", "equal"), [(0.0, True), (1e-5, True), (1e-2, False), (float("nan"), False)])
def test_demo_judges_losses_weights_and_predictions(error: float, equal: bool) -> None:
    good = Report(losses=[1.0, 0.5], weights=torch.ones(3), memory=100, sent=0)
    for bad in good._replace(losses=[1.0, 0.5 + error]), good._replace(weights=torch.tensor([1.0, 1.0 + error, 1.0])):
        assert Comparison(SETTINGS, good, [good, bad], (0.0, 1.0)).equal is equal
    assert Comparison(SETTINGS, good, [good, good], (error, 1.0)).equal is equal


def test_image_is_the_same_in_any_box() -> None:
    """Bit for bit: what a rank builds for its box is what the whole image holds there."""
    box = (slice(None), slice(None), slice(7, 20), slice(11, 50))
    for scene in scenes(SETTINGS):
        assert torch.equal(scene[WHOLE][box], scene[box])


def test_picture_shows_its_panels(tmp_path: Path) -> None:
    """Read back as a viewer would: the size is right, and the largest error is white where it lies."""
    image, zero = torch.rand(1, 3, 300, 600), torch.zeros(1, 1, 300, 600)
    tiled = zero.clone()
    tiled[..., 150, :] = 0.25
    draw(tmp_path / "x.png", image, zero, zero, tiled)
    width, height, lines = _pixels((tmp_path / "x.png").read_bytes())
    assert (width, height) == (2 * (300 + 16), 2 * (150 + 10 + 8 + 8))
    bright = [sum(line) / len(line) for line in (line[3 * (300 + 16 + 8) : -3 * 8] for line in lines)]
    (seam,) = [row for row in range(height // 2 + 20, height) if bright[row]]
    assert seam == height - 8 - 150 + 75 and bright[seam] == 255


def _pixels(file: bytes) -> tuple[int, int, list[bytes]]:
    """Width, height and lines of a PNG of unfiltered RGB bytes, whose checksums must be right."""
    chunks, at = {}, 8
    while at < len(file):
        (size,) = struct.unpack(">I", file[at : at + 4])
        name, data = file[at + 4 : at + 8], file[at + 8 : at + 8 + size]
        assert struct.unpack(">I", file[at + 8 + size : at + 12 + size]) == (zlib.crc32(name + data),)
        chunks[name], at = data, at + 12 + size
    width, height, *kind = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert kind == [8, 2, 0, 0, 0]
    rows, long = zlib.decompress(chunks[b"IDAT"]), 3 * width + 1
    assert len(rows) == height * long and not any(rows[::long])
    return width, height, [rows[row * long + 1 : (row + 1) * long] for row in range(height)]


def test_explain_a_stream(capsys: pytest.CaptureFixture[str]) -> None:
    case = ["explain", "test_check:right", "--input", "1,3,64,48", "--stream"]
    assert main([*case, "--shards", "4", "--device", "h200"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^shards +4$", shown, re.MULTILINE) and "peak on the device" in shown and "predicted time" in shown
    assert main([*case, "--shards", "4", "--json"]) == 0
    free = json.loads(capsys.readouterr().out)
    assert main([*case, "--memory", str(free["resident"] + 60_000), "--json"]) == 0
    tight = json.loads(capsys.readouterr().out)
    assert tight["shards"][0] > 1 and tight["peak"] <= free["resident"] + 60_000
    for wrong, message in (
        (case, "--stream wants --memory, --shards or both"),
        ([*case, "--memory", "10"], "no number of shards"),
    ):
        with pytest.raises(SystemExit):
            main(wrong)
        assert message in capsys.readouterr().err
