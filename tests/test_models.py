"""Models train on sharded inputs as in one process; `python -m models` checks more of them, and takes longer."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from models import __main__ as command
from models import jobs, page
from models.running import CONFIGS, told
from models.streaming import SHARDS, Result
from models.streaming_page import streaming_page, within
from models.zoo import COMPILED, EVERYWHERE, LIBRARIES, REASONS, STREAMED, ZOO, Model
from torchhalo.tools.check import Report, compared
from torchhalo.tools.observe import Case, observe

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
STREAMED_PAGE = PAGE.with_name("streamed.md")
#: Of each library those that take the least time for what they have: tables read by index, attention, windows, skips, volumes.
SAMPLE = [
    "torchvision squeezenet1_1",
    "torchvision shufflenet_v2_x0_5",
    "timm test_convnext",
    "timm test_coatnet",
    "smp FPN, resnet18",
    "MONAI UNet (3-d)",
    "MONAI DynUNet",
    "diffusers AutoencoderKL",
    "diffusers UNet2DModel",
    "transformers SegformerForSemanticSegmentation",
    "transformers Swinv2ForImageClassification",
    "transformers DetrModel",
]
OWN = [name for name, model in ZOO.items() if model.library == "models"]


def check(pool: Any, model: Model, dim: int) -> Report:
    """A check as `python -m models` makes it, in processes that are there already."""
    case = Case(model.make, model.inputs, None, True, True, torch.float64, 0)
    (alone,) = pool(1).run(observe, case, None)
    dims = (dim % len(model.inputs[0]),)
    return compared((2,), 1e-9, alone, pool(2).run(observe, case._replace(dims=dims), (2,)))


@pytest.mark.parametrize("place, name", [*enumerate([*OWN, *SAMPLE])])
def test_a_model_trains_sharded_as_in_one_process(pool, place: int, name: str) -> None:
    report = check(pool, ZOO[name], 2 + place % 2)
    assert report.exact, report
    # DTensor's pointwise ops gather a dim that has fewer elements than there are ranks, such as a mean over the image.
    assert sum(size for *_, size in report.gathered) <= 0.0005 * report.convolved, report


@pytest.mark.parametrize("model", [ZOO["torchhalo ConvNeXt"]._replace(options={"blocks": (1, 1)}), ZOO["MONAI UNet (3-d)"]])
def test_explain_tells_what_a_model_sends(pool, model: Model) -> None:
    """Of the two that take the least time; the page does so for more."""
    sent = check(pool, model, 2).sent
    assert told(model, CONFIGS["first"]) == sent and min(sent) > 0


def test_the_page_lists_every_model_and_every_reason() -> None:
    text = PAGE.read_text()
    for library, models in LIBRARIES.items():
        section = text.partition(f"\n## {library}\n")[2].partition("\n## ")[0]
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"][2:]
        listed = [[name.partition(" ")[2], page.inputs(model)] for name, model in models.items()]
        assert [row[:2] for row in rows] == listed, "run `make models`"
        for name, row in zip(models, rows, strict=True):
            assert "**" not in row[2] or f"\n- {name}: " in text, f"{name} is not exact, and the page does not say why"


def test_names_in_lists_of_models_are_in_the_table() -> None:
    assert {*COMPILED, *EVERYWHERE, *REASONS, *SAMPLE, *STREAMED} <= ZOO.keys() and len(ZOO) >= 250
    assert len({command._path(Path(), "check", name) for name in ZOO}) == len(ZOO)


GOOD = Report(
    (2,), {"outputs": (1e-12, "0")}, 1e-9, None, None, [("cat", "a", 1, 5)], [], 1000, [1, 1], 1, [7, 2048], None, None
)
FIRST, SECOND, THIRD, FOURTH = list(ZOO)[:4]


def test_a_page_tells_what_went_wrong_and_what_was_not_tried() -> None:
    wrong = GOOD._replace(differences={"outputs": (1e-3, "0")}, first="stem")
    gathering = GOOD._replace(gathered=[("index", "head", 2, 500)])
    raising = GOOD._replace(error="in head: ValueError: no")
    results: dict[str, dict[str, Any]] = {
        FIRST: {"last": GOOD._asdict(), "told": {"last": [7, 2048]}, "compiled": {"difference": 1e-15, "error": None}},
        SECOND: {"last": wrong._asdict(), "first": gathering._asdict(), "told": {"last": [6, 2048]}},
        THIRD: {"last": raising._asdict(), "compiled": {"difference": None, "error": "a break", "plain": "a break"}},
        FOURTH: {"error": "in one process already: no"},
    }
    text = page.page(results, "`the command`")
    rows = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    assert rows[FIRST.partition(" ")[2]].endswith(" | 1e-12 | 2.0 KiB | 0.5% | yes | yes |")
    assert rows[SECOND.partition(" ")[2]].endswith(" | **no: 1e-03** | 2.0 KiB | 0.5% | **no** |  |")
    assert rows[THIRD.partition(" ")[2]].endswith(" | **raises** |  |  |  | nor does it plain |")
    assert rows[FOURTH.partition(" ")[2]].endswith(" | **raises** |  |  |  |  |")
    assert rows[SECOND] == f"| {SECOND} | 1e-12, 2.0 KiB, gathers **50.0%** |  |  |"
    assert "**1 of 4 models are exact**" in text and "1 of 1 checks are exact" in text and "1 of 2 checks that were" in text
    assert f"- {SECOND}, 2 ranks, dim 2: `gathers in index`" in text
    assert f"- {SECOND}, 2 ranks, last dim: `differs by 1e-03, first in stem`" in text
    assert "told [6, 2048], sent [7, 2048]" in text and f"- {FOURTH}: `in one process already: no`" in text
    assert f"- {THIRD}, compiled: `a break`" in text and "`the command`" in text


def test_the_page_of_streamed_models_has_forty_that_are_exact() -> None:
    text = STREAMED_PAGE.read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    found = [row for row in rows if row[0] != "model" and row[0] != "---"]
    assert len(found) >= 40
    assert all(float(difference) <= 1e-9 for row in found for difference in row[2 : 2 + len(SHARDS)])


def test_a_page_tells_which_streamed_models_are_wrong_or_exceed_their_budget() -> None:
    good = {str(count): Result(1e-15, 2e-14, 4096, 8192, 3072, 3072)._asdict() for count in SHARDS}
    wrong = {**good, "5": {**good["5"], "forward": 1e-3}}
    over = {**good, "16": {**good["16"], "counted": 5000}}
    results = {FIRST: good, SECOND: wrong, THIRD: over, FOURTH: {"error": "no rule"}}
    assert [within(each) for each in results.values()] == [True, False, False, False]
    text = streaming_page(results, "`the command`")
    rows = {line.split(" | ")[0][2:]: line for line in text.splitlines() if line.startswith("| ")}
    assert rows[FIRST.partition(" ")[2]].endswith(" | 2e-14 | 2e-14 | 2e-14 | 3.0 KiB | 4.0 KiB | 8.0 KiB |")
    assert " | 2e-14 | **no: 1e-03** | 2e-14 | " in rows[SECOND.partition(" ")[2]]
    assert "**1 of 4 models are exact** over 2, 5 and 16 shards" in text and f"- {FOURTH}: `no rule`" in text
    assert "In 8 of 9 training steps" in text and "in 1 it exceeded the budget" in text


def waits(seconds: float) -> dict[str, Any]:
    time.sleep(seconds)
    return {"waited": seconds}


def dies() -> dict[str, Any]:
    raise SystemExit(3)


def test_a_job_that_dies_or_takes_too_long_is_an_error_of_its_model(tmp_path: Path) -> None:
    works = {"good": partial(waits, 0), "dead": dies, "late": partial(waits, 60), "last": partial(waits, 0.1)}
    started = time.monotonic()
    found = dict(jobs.run([jobs.Job(name, tmp_path / name, work) for name, work in works.items()], 2, timeout=2))
    assert found["good"] == {"waited": 0} and found["last"] == {"waited": 0.1} and time.monotonic() - started < 20
    assert found["dead"] == {"error": "the process died"} and found["late"] == {"error": "took more than 2 s"}
    assert json.loads((tmp_path / "late").read_text()) == found["late"]


def test_results_that_are_there_are_not_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, result in [("check", {"last": GOOD._asdict()}), ("explain", {"told": {"last": [7, 2048]}})]:
        (tmp_path / kind).mkdir()
        command._path(tmp_path, kind, FIRST).write_text(json.dumps(result))
    output = tmp_path / "page.md"
    arguments = ["--only", FIRST, "--kinds", "check", "explain", "--results", str(tmp_path), "--output", str(output)]
    assert command.main(arguments) == 0 and capsys.readouterr().out == ""
    assert "| 1e-12 | 2.0 KiB | 0.5% | yes |  |" in output.read_text()
