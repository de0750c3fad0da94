"""Whether Triton's kernels can run: only on plain memory of a GPU, and where Triton finds a C compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import triton_compiler
from torch._subclasses.fake_tensor import FakeTensorMode

from torchhalo.kernels import draws, edges, group_norm, triton

USABLE = [draws.usable, group_norm.usable, lambda tensor: edges.usable(tensor, tensor)]


def test_on_plain_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "compiles", lambda: True)
    with FakeTensorMode():
        fake = torch.ones(1, device="cuda")
    assert not any(usable(torch.ones(1, device="cpu")) or usable(fake) for usable in USABLE)


def test_without_triton_or_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = triton.compiles.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(triton, "find_spec", lambda name: None)
        assert not compiles()

    monkeypatch.setattr(triton, "find_spec", lambda name: True)

    class Uncompiled:
        def __getitem__(self, grid: object) -> None:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setitem(sys.modules, "torchhalo.kernels.triton.probe", SimpleNamespace(probe=Uncompiled()))
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: None)
    with pytest.warns(UserWarning, match="Triton cannot compile here.*Failed to find C compiler"):
        assert not compiles()


def test_the_probe_has_memory_where_tensors_are_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch on a fake tensor writes to no address: an illegal access, which ends all work on the device."""
    empty, probed = torch.empty, []

    class Probe:
        def __getitem__(self, grid: object) -> Callable[[torch.Tensor], None]:
            return probed.append

    monkeypatch.setattr(triton, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "torchhalo.kernels.triton.probe", SimpleNamespace(probe=Probe()))
    monkeypatch.setattr(torch, "empty", lambda size, device: empty(size))
    with FakeTensorMode():
        assert triton.compiles.__wrapped__()
    assert [type(tensor) for tensor in probed] == [torch.Tensor]


@pytest.mark.slow
def test_the_kernels_compile() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, triton_compiler.__file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
