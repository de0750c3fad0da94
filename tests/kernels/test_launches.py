"""Launches of Triton kernels: of what is compiled for arguments of the same kind, and of no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchhalo.kernels.triton import launches
from torchhalo.kernels.triton.launches import launch


class Kernel:
    """What Triton's decorator makes: it notes what it is asked, and gives what it compiled, which notes its launches."""

    def __init__(self, backend: str | None) -> None:
        self.asked: list[Any] = []
        self.launched: list[Any] = []
        self.compiled = None if backend is None else Compiled(backend, self.launched)

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.asked.append((grid, args, options))
            return self.compiled

        return run


class Compiled:
    def __init__(self, backend: str, launched: list[Any]) -> None:
        self.metadata, self.launched = SimpleNamespace(target=SimpleNamespace(backend=backend)), launched

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.launched.append((grid, args))


def test_triton_is_asked_once_for_arguments_of_a_kind() -> None:
    kernel, memory = Kernel("cuda"), torch.zeros(64)
    wide = torch.zeros(64, dtype=torch.float64)
    assert memory.data_ptr() % 16 == wide.data_ptr() % 16 == 0
    kinds: list[tuple[Any, ...]] = [
        ((4,), (memory, memory), (5, (6, 7)), {}),
        ((4,), (memory, memory[1:]), (5, (6, 7)), {}),
        ((4,), (memory, wide), (5, (6, 7)), {}),
        ((4,), (memory, memory), (5, (6, 8)), {}),
        ((4, 2), (memory, memory), (5, (6, 7)), {}),
        ((4,), (memory, memory), (5, (6, 7)), {"num_warps": 2}),
    ]
    for grid, tensors, rest, options in kinds:
        launch(kernel, grid, tensors, rest, (1,), **options)
        assert kernel.asked.pop() == (grid, (*tensors, 1, *rest), options)
    for grid, tensors, rest, options in kinds:
        launch(kernel, grid, tensors, rest, (2,), **options)
        addresses = [tensor.data_ptr() for tensor in tensors]
        assert kernel.launched.pop() == ((*grid, 1, 1)[:3], (*addresses, 2, *rest))
    launch(kernel, (4,), (memory, memory[4:]), (5, (6, 7)), (1,))
    assert len(kernel.launched) == 1 and not kernel.asked


@pytest.mark.parametrize("backend", [None, "hip"])
def test_triton_is_asked_each_time(backend: str | None) -> None:
    """What is interpreted cannot be launched otherwise; and on other GPUs Triton looks at more than is in the key."""
    kernel = Kernel(backend)
    for number in range(3):
        launch(kernel, (1,), (torch.zeros(4),), (1,), (number,))
    assert [args[1] for _, args, _ in kernel.asked] == [0, 1, 2] and not kernel.launched


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MOST", 3)
    monkeypatch.setattr(launches, "_known", {})
    kernel, tensor = Kernel("cuda"), torch.zeros(4)
    for size in range(10):
        launch(kernel, (1,), (tensor,), (size,))
        assert len(launches._known) <= 3


@pytest.mark.slow
def test_what_triton_itself_launches() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    script = Path(__file__).parents[1] / "triton_launcher.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
