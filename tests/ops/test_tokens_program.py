"""What ops of tokens look up instead of working it out at each call."""

from __future__ import annotations

import pytest
from harness import DEVICE, shard, simulated
from test_tokens import LOCAL, network, weight
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from torchhalo.ops import tokens_program


def test_a_step_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that shapes tell is looked up from the second step on; numbers that are equal and of other types are told apart."""
    prepared: list[object] = []
    make = tokens_program.Program.__init__

    def count(self: tokens_program.Program, mesh: object, op: object, *rest: object) -> None:
        prepared.append(op)
        make(self, mesh, op, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(tokens_program.Program, "__init__", count)
    step = network([name for name in LOCAL if name != "written"])
    with simulated(2):
        x = shard(weight(2, 4, 5, 7), init_device_mesh(DEVICE, (2,)), [Shard(3)]).requires_grad_()
        for run in range(2):
            prepared.clear()
            out = step(x)
            out.backward(out.detach())
            assert bool(prepared) == (run == 0), prepared
    assert tokens_program.described([1, 2.0]) != tokens_program.described([1.0, 2]) != tokens_program.described([True, 2.0])
