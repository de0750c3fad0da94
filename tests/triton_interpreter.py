"""Whether Triton's kernels can be tested here: on a GPU, or by an interpreter that works."""

from __future__ import annotations

import numpy
import pytest
from harness import DEVICE


def require() -> None:
    """Skip the test file that calls this, where they cannot."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    if DEVICE == "cpu" and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        try:
            int(numpy.ones(1))
        except (DeprecationWarning, TypeError) as error:
            reason = f"the interpreter of Triton {triton.__version__} fails with this numpy: {error}"
            pytest.skip(reason, allow_module_level=True)
