"""Kernels of Triton in tests: on a GPU as they are, elsewhere in Triton's interpreter."""

from __future__ import annotations

from types import ModuleType

import numpy
import pytest
from harness import DEVICE
from torch.distributed._local_tensor import LocalTensor

from torchhalo.torch_internals import tracing

triton = pytest.importorskip("triton", reason="Triton is not installed")
if DEVICE == "cpu" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
    try:
        int(numpy.ones(1))
    except (DeprecationWarning, TypeError) as error:
        pytest.skip(f"the interpreter of Triton {triton.__version__} fails with this numpy: {error}", allow_module_level=True)


def interpret(monkeypatch: pytest.MonkeyPatch, *kernels: ModuleType) -> None:
    """Take the files' kernels for usable on any plain tensor, also of simulated ranks, if there is no GPU."""
    if DEVICE == "cpu":
        for each in kernels:
            monkeypatch.setattr(each, "usable", lambda x, *others: isinstance(x, LocalTensor) or tracing.is_plain(x))
