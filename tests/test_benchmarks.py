"""Each benchmark runs in its quickest form and gives the rows that it promises; what it counts with is right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import common
from benchmarks.__main__ import NAMES, main
from benchmarks.model_cases import CASES
from benchmarks.unet_model import Layer, Shape, UNet, layers, least_elements

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing here is large, and threads that wait for each other on busy cores take the longer."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[common.Row], list[str]]:
    """The rows on disk, and the lines of the table on the screen."""
    output = folder / "rows.json"
    assert main([*arguments, "--quick", "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert shown.err, "progress"
    found = json.loads(output.read_text())
    assert found["name"] == arguments[0] and {"command", "date", "torch", "machine"} <= set(found)
    table = [line for line in shown.out.splitlines() if line.startswith("|")]
    assert len(table) == len(found["rows"]) + 2
    return found["rows"], table


def test_conv_local(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It also holds the three ways to the same numbers, and raises if they differ."""
    rows, table = run(tmp_path, capsys, "conv_local", "--shape", "64ch", "stem", "--dtype", "fp32", "--device", "cpu")
    assert [(row["shape"].split()[0], row["format"], row["pass"]) for row in rows] == [
        (shape, format, way) for shape in ("64ch", "3->64ch") for format in ("NHWC", "NCHW") for way in ("forward", "backward")
    ]
    for row in rows:
        for way in ("plain", "sharded", "concat"):
            assert row[f"{way} wall"] > 0 and row[f"{way} memory"] > 0
    assert "wall ms" in table[0] and "gpu" not in table[0]


def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = run(tmp_path, capsys, "overhead", "--op", "conv", "max_pool", "add", "conv+backward")
    assert [row["op"] for row in rows] == ["conv", "max_pool", "add", "conv+backward"]
    assert all(row["plain"] > 0 and row["torchhalo"] > 0 for row in rows)
    assert rows[1]["stock does"], "gathers or, on torch 2.11, raises"
    assert rows[2]["stock does"] == ""


def test_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It also holds the three ways to the same numbers, and raises if they differ."""
    rows, _ = run(tmp_path, capsys, "attention", "--device", "cpu")
    assert [row["pass"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert all(row[f"{way} wall"] > 0 for way in ("plain", "ring", "gathered"))
        assert row["ring memory"] < row["gathered memory"]


def test_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = run(tmp_path, capsys, "scale", "--model", "2d", "--ranks", "2", "64")
    assert [(row["mesh"], row["peers"]) for row in rows] == [("2", 1), ("64", 2), ("8x8", 8)]
    line, long, _ = rows
    assert long["sent"] == 2 * line["sent"], "a neighbour on each side"


def test_unet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It also compares the losses. Two ranks send what the windows need and no more."""
    rows, _ = run(tmp_path, capsys, "unet", "--model", "2d", "--ranks", "2", "--no-others")
    assert [row["way"] for row in rows] == ["one process", "2 ranks"]
    assert all(row["ms"] > 0 for row in rows)
    assert rows[1]["sent"] == rows[1]["bound"] > rows[0]["sent"] == 0


def test_models(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a rank alone are those of the plain model on its shard; a model that fails is a row with its error."""

    def absent() -> torch.nn.Module:
        raise ModuleNotFoundError("No module named 'absent'")

    monkeypatch.setitem(CASES, "resnet", CASES["resnet"]._replace(make=lambda **options: absent()))
    failed, unet = run(tmp_path, capsys, "models", "--models", "resnet", "unet_small")[0]
    assert failed["error"] == "ModuleNotFoundError: No module named 'absent'"
    assert "error" not in unet and unet["differs"] < 1e-12 and unet["way"] == "eager"
    assert all(unet[f"{side} {part}"] > 0 for side in ("plain", "sharded") for part in ("wall", "memory"))


def test_profile_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--quick", "--profile", "unet_small", "--output", str(tmp_path / "rows.json")]) == 0
    shown = capsys.readouterr().out
    assert "== plain ==" in shown and "== sharded ==" in shown and shown.count("Ordered by: internal time") == 2


def test_the_least_that_windows_send() -> None:
    image, half = (1, 3, 8, 5), (1, 3, 4, 5)
    for layer, rows in [
        (Layer("conv", 3, 1, 1, image, image), 2 + 2),
        (Layer("conv", 5, 1, 2, image, image), 4 + 4),
        (Layer("conv", 3, 2, 1, image, half), 1 + 1),
        (Layer("conv", 1, 1, 0, image, image), 0),
        (Layer("transposed", 2, 2, 0, half, image), 0),
        (Layer("transposed", 4, 2, 1, half, image), 2 + 2),
        (Layer("pool", 2, 2, 0, image, half), 0),
        (Layer("pool", 3, 2, 1, image, half), 1 + 1),
    ]:
        assert least_elements(layer, 2) == rows * 3 * 5, layer
    with torch.device("meta"):
        model = UNet(Shape(3, 8, 4, 1, "group"))
    kinds = [layer.kind for layer in layers(model, (1, 1, 8, 8, 8))]
    assert kinds == ["conv"] * 2 + ["pool"] + ["conv"] * 2 + ["transposed"] + ["conv"] * 3


def test_peak_memory_of_a_call() -> None:
    def call() -> torch.Tensor:
        first = torch.ones(2**18)  # 1 MiB
        second = first + 1
        del first
        return second * 2

    assert common.peak_memory(call, "cpu") == 2


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], *([name] for name in NAMES)):
        with pytest.raises(SystemExit) as stopped:
            main([*arguments, "--help"])
        assert stopped.value.code == 0 and "usage: python -m benchmarks" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no op convolve"):
        main(["overhead", "--op", "convolve"])


def test_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of Swin on shards that divide into windows: the rolls' halos, there and back, and nothing else."""
    (row,), _ = run(tmp_path, capsys, "tokens")
    assert row["model"] == "torchvision swin_t" and row["moved"] == row["keys and values"] == 0 < row["halos"]


def test_one_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Streamed rows equal plain ones; tiles do not; the picture is drawn once both are known."""
    names = ["smoke-net", "decode", "train"]
    arguments = ["one_device", "--device", "cpu", "--kept", str(tmp_path), "--rows", *names]
    rows = {row["row"]: row for row in run(tmp_path, capsys, *arguments)[0]}
    assert not [row for row in rows.values() if "error" in row]
    assert max(rows[f"smoke-net-{way}"]["differs"] for way in ("forward", "train")) < 1e-12
    streamed, tiled = rows["decode-128-1MiB"], rows["decode-128-tiled"]
    assert streamed["differs"] < 1e-5 < 0.01 < tiled["differs"] and streamed["planned peak"] <= 2**-10
    assert (tmp_path / "decode-128.png").read_bytes().startswith(b"\x89PNG")
    assert rows["train-16-16MiB"]["gradient differs"] < 1e-5
