"""Kernels of Triton in tests: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

import numpy
import pytest
from harness import DEVICE

from torchhalo.kernels import depthwise
from torchhalo.torch_internals import tracing

triton = pytest.importorskip("triton", reason="Triton is not installed")
if DEVICE == "cpu" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    try:
        int(numpy.ones(1))
    except (DeprecationWarning, TypeError) as error:
        pytest.skip(f"the interpreter of Triton {triton.__version__} fails with this numpy: {error}", allow_module_level=True)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(depthwise, "usable", tracing.is_plain)
