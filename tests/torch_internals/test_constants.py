"""Constants are made once per device and dtype, and not while a program is traced."""

from __future__ import annotations

import torch
from harness import simulated
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torchhalo.torch_internals import constants
from torchhalo.torch_internals.constants import constant


def test_the_same_tensor_each_time() -> None:
    like = torch.empty(0, dtype=torch.float64)
    first = constant([[1, 2], [3, 4]], like)
    assert constant([[1, 2], [3, 4]], like) is first and first.dtype == torch.float64
    torch.testing.assert_close(first, torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64), rtol=0, atol=0)
    others = constant([[1, 2], [3, 5]], like), constant([[1, 2], [3, 4]], like, torch.int64), constant([1, 2, 3, 4], like)
    assert all(other is not first for other in others) and others[1].dtype == torch.int64


def test_one_that_is_made_in_inference_mode_serves_outside_of_it() -> None:
    like = torch.empty(0)
    with torch.inference_mode():
        made = constant([0.125, 0.25], like)
    x = torch.ones(2, requires_grad=True)
    (x * constant([0.125, 0.25], like)).sum().backward()
    assert constant([0.125, 0.25], like) is made and x.grad is not None and x.grad.tolist() == [0.125, 0.25]


def test_nothing_is_kept_of_a_traced_program() -> None:
    before = dict(constants._kept)
    with FakeTensorMode():
        assert isinstance(constant([7.5], torch.empty(0)), FakeTensor)
    with simulated(2):
        constant([8.5], torch.empty(0))
    assert constants._kept == before
    assert not isinstance(constant([7.5], torch.empty(0)), FakeTensor)


def test_they_are_let_go_when_there_are_many(monkeypatch) -> None:
    monkeypatch.setattr(constants, "MOST", 3)
    monkeypatch.setattr(constants, "_kept", {})
    for value in range(10):
        constant([value], torch.empty(0))
        assert len(constants._kept) <= 3
