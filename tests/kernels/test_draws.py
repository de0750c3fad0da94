"""Draws by Triton's kernel, on a GPU or in Triton's interpreter, beside those by torch's ops on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, shard, simulated, whole
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import interpret
from memory import any_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from torchhalo.geometry import Box, Span
from torchhalo.kernels import draws, random_numbers

SETTINGS: dict[str, Any] = {"deadline": None, "derandomize": True, "suppress_health_check": list(HealthCheck)}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, draws)


def by_torch() -> Any:
    """Inside, no kernel is usable."""
    return mock.patch.object(draws, "usable", lambda tensor: False)


@st.composite
def parts(draw: st.DrawFn) -> draws.Part:
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=0, max_size=5)))
    spans = []
    for size in shape:
        start = draw(st.integers(0, size))
        spans.append(Span(start, draw(st.integers(start, size))))
    seed = draw(st.sampled_from([0, 1, 2**31, 2**62 + 16, 2**63 - 2]))
    return draws.Part(Box(tuple(spans)), shape, torch.tensor(seed, device="cpu"))


WAYS: list[tuple[draws.Draw, tuple[float, ...]]] = [
    *((random_numbers.bernoulli, (p,)) for p in (0, 0.3, 1.0)),
    *((random_numbers.uniform, bounds) for bounds in ((), (0.0, 1.0), (-1.3, 2.7))),
    *((random_numbers.normal, moments) for moments in ((), (1.1, 2.3), (0.0, 0.0))),
]


@settings(max_examples=60, **SETTINGS)
@given(part=parts(), way=st.sampled_from(WAYS), dtype=st.sampled_from(sorted(draws.DTYPES, key=str)), data=st.data())
def test_the_numbers_of_the_cpu(
    part: draws.Part, way: tuple[draws.Draw, tuple[float, ...]], dtype: torch.dtype, data: st.DataObject
) -> None:
    """To the bit, in any memory; normal ones to what the last places of a logarithm, a root and a cosine are worth."""
    draw, parameters = way
    if dtype == torch.bool and draw is not random_numbers.bernoulli:
        return
    expected = torch.empty(part.box.shape, dtype=dtype, device="cpu")
    with by_torch():
        draws.fill(expected, draw, part, *parameters)
    out = data.draw(any_memory(repeated=False))(torch.zeros(part.box.shape, dtype=dtype, device=DEVICE))
    seed = part.seed.to(data.draw(st.sampled_from(["cpu", DEVICE])))
    draws.fill(out, draw, part._replace(seed=seed), *parameters)
    tolerance = 0.0
    if draw is random_numbers.normal and dtype != torch.bool:
        tolerance = 32 * torch.finfo(dtype).eps  # of numbers below nine, and three times that
    if dtype == torch.bfloat16 and DEVICE == "cpu" and parameters not in ((), (0.0, 1.0)):
        tolerance = 32 * torch.finfo(dtype).eps  # Triton's interpreter cuts off what its compiler rounds
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=tolerance)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of infinity times zero
@settings(max_examples=40, **SETTINGS)
@given(part=parts(), p=st.sampled_from([0.0, 0.3, 0.5, 1.0]), data=st.data())
def test_dropout_of_any_memory(part: draws.Part, p: float, data: st.DataObject) -> None:
    """The product and what is kept, to the bit, also of what is infinite or no number."""
    dtype = data.draw(st.sampled_from([torch.float16, torch.float32, torch.float64]))
    x = torch.randn(part.box.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu").to(dtype)
    x[x > 1.5], x[x < -1.5] = math.inf, math.nan
    x = data.draw(any_memory())(x)
    strides = torch.empty(part.box.shape).stride()
    with by_torch():
        expected = draws.dropout(x, p, part, strides)
    for found, each in zip(draws.dropout(x.to(DEVICE), p, part, strides), expected, strict=True):
        assert found.dtype == each.dtype and found.stride() == strides
        torch.testing.assert_close(found.cpu(), each, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows, cols", [(1, 5000), (5000, 1), (3, 1025), (700, 3)])
def test_many_blocks(rows: int, cols: int) -> None:
    """More than a program draws, along either side; the rows of a part are no neighbours in the whole tensor."""
    part = draws.Part(Box((Span(2, 2 + rows), Span(1, 1 + cols))), (rows + 3, cols + 2), torch.tensor(9, device="cpu"))
    expected, out = torch.empty(rows, cols, device="cpu"), torch.empty(rows, cols, device=DEVICE)
    with by_torch():
        draws.fill(expected, random_numbers.uniform, part)
    draws.fill(out, random_numbers.uniform, part)
    assert torch.equal(out.cpu(), expected)


def test_what_kernels_leave_to_torch() -> None:
    """Other draws and dtypes, parameters that are tensors, and elements that share memory, of which torch complains."""
    part = draws.Part(Box((Span(0, 4), Span(0, 3))), (4, 3), torch.tensor(1))
    with mock.patch.object(draws, "_launch") as launch:
        for dtype, draw, *parameters in (
            (torch.float32, random_numbers.exponential, 2.0),
            (torch.int64, random_numbers.bernoulli, 0.5),
            (torch.float32, random_numbers.bernoulli, torch.full((4, 3), 0.5, device=DEVICE)),
        ):
            draws.fill(torch.empty(4, 3, dtype=dtype, device=DEVICE), draw, part, *parameters)
        with pytest.raises(RuntimeError, match="more than one element"):
            draws.fill(torch.empty(4, 1, device=DEVICE).expand(4, 3), random_numbers.uniform, part)
    launch.assert_not_called()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_one_launch(memory_format: torch.memory_format) -> None:
    """Sharded draws: one kernel for each rank with elements, whatever the memory, and the numbers of the usual way."""
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: torch.native_dropout(x, 0.3, True)[0],
        lambda x: F.dropout(x, 0.3),
        torch.rand_like,
        torch.randn_like,
        lambda x: x.clone().normal_(1, 2),
    ]
    for way in ways:
        results = []
        for usable in (by_torch(), mock.patch.object(draws, "usable", draws.usable)):
            with simulated(3), usable, mock.patch.object(draws, "_launch", wraps=draws._launch) as launch:
                x = torch.ones(2, 3, 4, 8, device=DEVICE).contiguous(memory_format=memory_format)
                x = shard(x, init_device_mesh(DEVICE, (3,)), [Shard(2)])
                torch.manual_seed(5)
                y = way(x)
                assert y.is_contiguous(memory_format=memory_format)
                results.append(whole(y))
        assert launch.call_count == 2
        torch.testing.assert_close(*results, rtol=0, atol=1e-5)
