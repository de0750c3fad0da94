"""What one rank on a GPU can show of training at scale, besides the page itself: a start, checkpoints, and a long run."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_checkpoint
import test_soak
import test_start
import torch
from torch.distributed.device_mesh import init_device_mesh

import torchhalo


def test_start_from_the_meta_device(gpu: str) -> None:
    mesh = init_device_mesh(gpu, (1,))
    torch.manual_seed(4)
    with torch.device("meta"):
        model = test_start.Net()
    torchhalo.materialize(torchhalo.parallelize(model, mesh))
    assert all(tensor.is_cuda for tensor in [*model.parameters(), *model.buffers()])
    plain = test_start.Net()
    plain.load_state_dict(torchhalo.plain_state_dict(model))
    test_start.train(plain, 2)
    test_start.train(model, 2, mesh)
    for key, value in torchhalo.plain_state_dict(model).items():
        torch.testing.assert_close(value.cpu(), plain.state_dict()[key], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", list(test_checkpoint.OPTIMIZERS))
def test_a_checkpoint_is_read_on_both_devices(gpu: str, tmp_path: Path, name: str) -> None:
    before, after = range(test_checkpoint.BEFORE), range(test_checkpoint.BEFORE, test_checkpoint.BEFORE + test_checkpoint.AFTER)
    mesh, optimizer_of = init_device_mesh(gpu, (1,)), test_checkpoint.OPTIMIZERS[name]
    expected, _ = test_checkpoint.made("plain")
    optimizer = optimizer_of(expected.parameters())
    test_checkpoint.train(expected, optimizer, None, before)
    test_checkpoint.train(expected, optimizer, None, after)

    torch.manual_seed(1)
    saved = torchhalo.parallelize(test_checkpoint.Net().to(gpu), mesh)
    optimizer = optimizer_of(saved.parameters())
    test_checkpoint.train(saved, optimizer, mesh, before)
    torchhalo.Checkpoints(tmp_path).save(test_checkpoint.BEFORE, saved, optimizer)

    for model, cut in ((test_checkpoint.Net(), None), (torchhalo.parallelize(test_checkpoint.Net().to(gpu), mesh), mesh)):
        optimizer = optimizer_of(model.parameters())
        assert torchhalo.Checkpoints(tmp_path).load(model, optimizer) == {"step": test_checkpoint.BEFORE}
        test_checkpoint.train(model, optimizer, cut, after)
        found = test_checkpoint.parameters_of(model)
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(found[key].cpu(), value, rtol=0, atol=1e-9)


def test_a_long_run_of_changing_sizes(gpu: str) -> None:
    """The sizes of the soak; the GPU's memory is counted where that counts the heap."""
    plain = test_soak.made().to(gpu)
    expected = test_soak.train(plain)
    mesh = init_device_mesh(gpu, (1,))
    model = torchhalo.parallelize(test_soak.made().to(gpu), mesh, dims=2)
    counts: list[int] = []

    def watch(step: int) -> None:
        if step in test_soak.COUNTED:
            test_soak.held(mesh)
            counts.append(torch.cuda.memory_allocated())

    losses = test_soak.train(model, mesh, watch)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)
    for key, value in torchhalo.plain_state_dict(model).items():
        torch.testing.assert_close(value, plain.state_dict()[key], rtol=0, atol=1e-9)
    # The sample of the step is counted too, of which the largest here has 40 KiB.
    assert max(counts) - counts[0] < 2**16, counts
