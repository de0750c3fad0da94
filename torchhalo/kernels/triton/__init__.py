"""Triton kernels, and whether they can run here.

Each file is imported only by the file of the same name in ``kernels``, when a GPU or the interpreter needs it. `launches`
needs no Triton: it launches what it is given.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch

from torchhalo.torch_internals import fake_tensors


@lru_cache(maxsize=1)
def compiles() -> bool:
    """Whether Triton is installed, and finds the C compiler that it needs besides."""
    if find_spec("triton") is None:
        return False
    try:
        # Memory, also where the first to ask is on fake tensors: a kernel would write to an address that there is not.
        memory = fake_tensors.without_fakes(lambda: torch.empty(1, device="cuda"))
        import_module("torchhalo.kernels.triton.probe").probe[1,](memory)
    except Exception as error:
        warnings.warn(
            f"Triton cannot compile here: convolutions, norms and random draws will take more time and memory ({error})",
            stacklevel=2,
        )
        return False
    return True
