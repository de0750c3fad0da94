"""Switching on and off, and everything that torchhalo uses of torch's private API: a release that moves it fails here."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import DEVICE, simulated
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torchhalo
from torchhalo.torch_internals import (
    collectives,
    compilation,
    dtensors,
    fake_tensors,
    grid_shard,
    process_groups,
    simulation,
)

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def off():
    torchhalo.disable()
    yield
    torchhalo.disable()


def installed() -> dict[object, object]:
    return dict(DTensor._op_dispatcher._custom_op_handlers)


def test_enable_and_disable_are_idempotent() -> None:
    stock, stock_hash, tag = installed(), compilation._stock_hash, torch.compiler.config.cache_key_tag
    for _ in range(2):
        torchhalo.enable()
        assert torchhalo.enabled()
        assert installed()[aten.convolution.default] is not stock[aten.convolution.default]
        assert torch.compiler.config.cache_key_tag.count("torchhalo") == 1
    for _ in range(2):
        torchhalo.disable()
        assert not torchhalo.enabled()
        assert installed() == stock
        assert torch.compiler.config.cache_key_tag == tag
        assert getattr(DTensor, "_stable_hash_for_caching", None) is stock_hash


def test_the_context_restores_what_was_in_force() -> None:
    with torchhalo.enable():
        with torchhalo.enable():
            assert torchhalo.enabled()
        assert torchhalo.enabled()
    assert not torchhalo.enabled()
    with pytest.raises(ZeroDivisionError), torchhalo.enable():
        raise ZeroDivisionError
    assert not torchhalo.enabled()


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0a0+git1234", "1.13.1", "unknown"])
def test_another_torch_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(RuntimeError, match=re.escape("torch>=2.11,<2.16") + ".*" + re.escape(version)):
        torchhalo.enable()


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0+cpu", "2.15.2"])
def test_supported_versions_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    torchhalo.enable()


def test_a_dispatcher_without_handlers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DTensor, "_op_dispatcher", object())
    with pytest.raises(RuntimeError, match=r"torch>=2\.11,<2\.16.*_custom_op_handlers"):
        torchhalo.enable()


def test_private_api_is_what_we_expect() -> None:
    """Signatures and attributes that torchhalo relies on, one by one, so that a failure names what moved."""
    assert isinstance(DTensor._op_dispatcher._custom_op_handlers, dict)
    assert isinstance(DTensor._op_dispatcher._allow_implicit_replication, bool)
    modules = grid_shard.api, grid_shard.dispatch, grid_shard.redistribution
    assert {module.redistribute_local_tensor for module in modules} == {modules[0].redistribute_local_tensor}
    assert list(inspect.signature(modules[0].redistribute_local_tensor).parameters)[:3] == [
        "local_tensor",
        "current_spec",
        "target_spec",
    ]
    propagator = DTensor._op_dispatcher.sharding_propagator
    assert list(inspect.signature(propagator.propagate_op_sharding_non_cached).parameters) == ["op_schema"]
    assert callable(propagator.propagate_op_sharding.cache.cache_clear)
    assert dtensors.TensorMeta._fields == ("shape", "stride", "dtype")
    assert list(inspect.signature(dtensors.DTensorSpec).parameters)[:3] == ["mesh", "placements", "tensor_meta"]
    assert list(inspect.signature(collectives.funcol.all_to_all_single).parameters)[:4] == [
        "self",
        "output_split_sizes",
        "input_split_sizes",
        "group",
    ]
    assert collectives.funcol._are_we_tracing() is False
    assert callable(simulation.maybe_run_for_local_tensor)
    with fake_tensors._disable_current_modes(), fake_tensors._fake_mode():
        assert type(torch.empty(2)).__name__ == "FakeTensor"
    assert list(inspect.signature(DTensor._op_dispatcher.redistribute_local_args).parameters) == [
        "op_info",
        "suggested_input_schema",
        "use_val_from_redistribute_schema",
    ]
    assert isinstance(aten.upsample_nearest2d.vec.py_kernels, dict) and hasattr(aten.upsample_nearest2d.vec, "_dispatch_cache")
    assert any(schema.name == "aten::add_" for schema in torch._C._jit_get_all_schemas())
    assert hasattr(torch._C, "_AutoDispatchBelowADInplaceOrView") and callable(compilation.no_python_dispatcher)
    assert list(inspect.signature(torch.nn.SyncBatchNorm.forward).parameters) == ["self", "input"]
    assert "use_local_synchronization" in inspect.signature(dist.new_group).parameters
    assert callable(torch._C._current_autograd_node) and callable(dist.distributed_c10d._get_default_store)


def test_stock_is_wrong_and_torchhalo_mends_it() -> None:
    """Why the package exists; also that `disable` really gives DTensor its own convolution back."""
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        x = distribute_tensor(torch.randn(1, 2, 4, 8), mesh, [Shard(2)])
        w = distribute_tensor(torch.randn(2, 2, 3, 3), mesh, [Replicate()])
        assert F.conv2d(x, w, padding=1).shape == (1, 2, 4, 8)
        right = F.conv2d(x, w, padding=1).full_tensor().reconcile()
        torchhalo.disable()
        try:
            wrong = F.conv2d(x, w, padding=1).full_tensor().reconcile()
        except Exception:
            return
        assert wrong.shape != right.shape or not torch.allclose(wrong, right)


def test_a_world_knows_nothing_of_those_before() -> None:
    """An equal mesh of another world is seen from another rank."""
    for rank, members in ((0, (0, 2)), (3, (1, 3))):
        with simulated(4) if rank == 0 else simulation.fake_world(4, rank):
            assert process_groups.submesh_members(init_device_mesh(DEVICE, (2, 2)), [0]) == members


def test_collectives_know_axes_in_any_order() -> None:
    """What is gathered comes in row-major order of the axes as they are given; a sum of rows goes back likewise."""
    with simulated(6):
        mesh = init_device_mesh(DEVICE, (2, 3))
        ranks = torch.arange(6, device=DEVICE)
        own = dtensors.local(distribute_tensor(ranks, mesh, [Shard(0), Shard(0)]))
        for axes, expected in (((0, 1), ranks), ((1, 0), ranks.view(2, 3).t().flatten())):
            found = collectives.all_gather(own, mesh, axes)
            assert all(torch.equal(each.flatten(), expected) for each in found._local_tensors.values())
            back = collectives.reduce_scatter(found, mesh, axes)
            assert all(each.item() == 6 * rank for rank, each in back._local_tensors.items())


def test_a_thread_that_lets_go_of_tensors_at_the_end_is_waited_for(tmp_path: Path) -> None:
    """As gloo's do: Python ends threads that want its lock once it is ending itself, and C++ does not stand that."""
    code = """
import threading, time
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchhalo.torch_internals import process_groups

def finish():
    time.sleep(0.02)
    open("finished", "w").close()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
process_groups.submesh_group(init_device_mesh("cpu", (1,)), (0,))
threading.Thread(target=finish, daemon=True).start()
"""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=120)
    assert (tmp_path / "finished").exists()
