"""The networks of `models` train on sharded inputs as in one process; `python -m models` checks more, and takes longer."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from harness import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor

import torchhalo
from models.__main__ import CONFIGS, Result, page, told
from models.nets import StochasticDepth
from models.zoo import ZOO, Model
from torchhalo.exchange import gathers
from torchhalo.exchange.transfer import counted
from torchhalo.tools.check import Report

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
OWN = [name for name, model in ZOO.items() if model.library == "models"]


def without_chance(model: nn.Module) -> nn.Module:
    """Nothing is dropped: plain torch draws other numbers than a mesh does."""
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
        elif isinstance(module, StochasticDepth):
            module.keep = 1.0
    return model


def trained(model: nn.Module, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs, gradients and buffers after one step backward, whole."""
    outputs = model(*inputs)
    named = outputs if isinstance(outputs, dict) else {"out": outputs}
    torch.stack([output.sin().square().sum() for output in named.values()]).sum().backward()
    found = {f"output {name}": output for name, output in named.items()}
    found |= {f"gradient of input {number}": x.grad for number, x in enumerate(inputs)}
    found |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    found |= dict(model.named_buffers())
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).detach() for name, value in found.items()}


def compare(model: Model, dim: int) -> tuple[list[gathers.Gather], int]:
    """Compare a model with itself in one process; what it gathers, and how many bytes this rank sends in exchanges."""
    torch.manual_seed(0)
    plain = without_chance(model.make()).double().train()
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in model.inputs]
    mesh = mesh_of((2,))
    sharded = torchhalo.parallelize(copy.deepcopy(plain), mesh, dims=dim)
    shards = [torchhalo.shard(x, mesh, dim).requires_grad_() for x in inputs]
    expected = trained(plain, [x.requires_grad_() for x in inputs])
    found: list[gathers.Gather] = []
    with gathers.watch(found.append), counted() as sent:
        results = trained(sharded, shards)
    assert results.keys() == expected.keys()
    for key, value in expected.items():
        # Sums over the sample are cut differently, and batch norms in a row let that grow.
        atol = 1e-9 * max(1.0, float(value.abs().max()))
        torch.testing.assert_close(results[key], value, rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}")
    return found, sum(sent)


@pytest.mark.parametrize("place, name", [*enumerate(OWN)])
def test_a_network_trains_sharded_as_in_one_process(pool, place: int, name: str) -> None:
    for gathered, _ in pool(2).run(compare, ZOO[name], 2 + place % 2):
        # DTensor's pointwise ops gather a dim that has fewer elements than there are ranks, such as a mean over the image.
        assert [gather for gather in gathered if min(gather.shape[dim] for dim in gather.dims) > 1] == []


@pytest.mark.parametrize("model", [ZOO["ConvNeXt"]._replace(options={"blocks": (1, 1)}), ZOO["MONAI UNet (3-d)"]])
def test_explain_tells_what_a_network_sends(pool, model: Model) -> None:
    """Of the two that take the least time; the page does so for all."""
    sent = [sent for _, sent in pool(2).run(compare, model, 2)]
    assert told(model, (2,), [2]) == sent and min(sent) > 0


def test_the_page_lists_every_model_in_every_configuration() -> None:
    lines = PAGE.read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    untried = [line[2:].partition(":")[0] for line in lines if line[:1] == "-"]
    assert rows[0] == ["model", "input", *(config.title for config in CONFIGS.values())]
    assert [row[0] for row in rows[2:]] + untried == list(ZOO), "run `python -m models --output docs/models.md`"


def test_a_page_tells_what_went_wrong_and_what_was_not_tried(monkeypatch) -> None:
    monkeypatch.setitem(ZOO, "absent", Model("no_such_package.nets:net", ((1, 3, 8, 8),), {}))
    good = Report(
        (2,), {"outputs": (1e-12, "0")}, 1e-9, None, None, [("cat", "a", 1, 5)], 1000, [1, 1], 1, [7, 2048], None, None
    )
    wrong = good._replace(differences={"outputs": (1e-3, "0")}, first="stem")
    gathering = good._replace(gathered=[("index", "head", 2, 500)])
    hardly = good._replace(gathered=[("add", "head", 2, 5)], convolved=20_000)
    raising = good._replace(error="in head: ValueError: no")
    results = [Result(report, [7, 2048]) for report in (good, wrong, gathering, raising)]
    others = [Result(hardly, bytes) for bytes in ([7, 2048], [6, 2048], "KeyError: 'no'", [7, 1024])]
    text = page({"FPN": results, "HRNet": others, "absent": []}, CONFIGS, "the command")
    cells = "1e-12, 0.5%, 2.0 KiB | **not exact: 1e-03**, 0.5%, 2.0 KiB | 1e-12, **gathers 50.0%**, 2.0 KiB | **raises**"
    assert f"| FPN | 1x3x96x88 | {cells} |" in text
    different = [f"1e-12, <0.1%, **2.0 KiB, {what}**" for what in ("told 2.0 KiB", "explain raises", "told 1.0 KiB")]
    assert f"| 1e-12, <0.1%, 2.0 KiB | {' | '.join(different)} |" in text
    assert "5 of 8 checks are exact and sharded, 4 of 8 foretold." in text
    assert "by explain: [6, 2048]\n  sent, in the run: [7, 2048]" in text and "by explain: KeyError: 'no'" in text
    assert "first module that differs: stem" in text and "in head: ValueError: no" in text
    assert "- absent: no_such_package is not installed" in text and "`the command`" in text
