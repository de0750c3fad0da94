"""Ops that gather a sharded activation: named outside `strict`, refused inside it; and results written to ``out=``."""

from __future__ import annotations

import warnings

import gathering  # noqa: F401, the rule of `median`
import pytest
import torch
import torch.nn.functional as F
from harness import DEVICE, shard, simulated, whole, wire
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torchhalo
from torchhalo.exchange import gathers


def image(mesh: DeviceMesh, *placements: object) -> DTensor:
    return shard(torch.randn(1, 2, 8, 6), mesh, placements)  # type: ignore[arg-type]


def test_a_gather_warns_once_with_op_shape_and_bytes() -> None:
    with simulated(4):
        x = image(init_device_mesh(DEVICE, (4,)), Shard(2))
        with pytest.warns(torchhalo.GatherWarning, match=r"aten.median.*\(1, 2, 8, 6\) along dim 2: 288 bytes") as caught:
            x.median(2)
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x.median(2)


def test_strict_refuses_before_anything_is_sent() -> None:
    with simulated(4):
        x = image(init_device_mesh(DEVICE, (2, 2)), Shard(2), Shard(3))
        with wire() as sent, pytest.raises(torchhalo.GatherError, match=r"aten.median.*dim 2: 96 bytes"), torchhalo.strict():
            x.median(2)
        assert sent == []
        with torchhalo.strict(), pytest.raises(torchhalo.GatherError):
            x.median(3)
        with pytest.warns(torchhalo.GatherWarning):
            x.median(3)


def test_strict_lets_through_what_stays_sharded_or_what_the_user_gathers() -> None:
    with simulated(2), torchhalo.strict():
        mesh = init_device_mesh(DEVICE, (2,))
        x = image(mesh, Shard(2))
        y = F.conv2d(x, shard(torch.randn(3, 2, 3, 3), mesh, [Shard(0)]), padding=1).relu()
        y.full_tensor()
        y.redistribute(mesh, [Replicate()])
        x.median(3)
        image(mesh, Replicate()).median(2)


def test_strict_names_the_convolution_that_gathers_channels() -> None:
    with simulated(2), torchhalo.strict():
        mesh = init_device_mesh(DEVICE, (2,))
        x = shard(torch.randn(1, 3, 8, 6), mesh, [Shard(1)])
        w = shard(torch.randn(3, 1, 3, 3), mesh, [Replicate()])
        with pytest.raises(torchhalo.GatherError, match=r"aten.convolution.*dim 1"):
            F.conv2d(x, w, groups=3)


def test_an_axis_of_one_rank_gathers_nothing() -> None:
    with simulated(2), torchhalo.strict():
        image(init_device_mesh(DEVICE, (2, 1)), Replicate(), Shard(2)).median(2)


def test_watch_lists_all_and_ends_with_its_block() -> None:
    with simulated(2):
        x = image(init_device_mesh(DEVICE, (2,)), Shard(2))
        found: list[gathers.Gather] = []
        with gathers.watch(found.append):
            x.median(2)
            x.median(2)
        assert [(g.shape, g.dims, g.bytes) for g in found] == [((1, 2, 8, 6), (2,), 192)] * 2
        with pytest.warns(torchhalo.GatherWarning):
            x.median(2)
        assert len(found) == 2


def test_disable_takes_the_watch_away() -> None:
    with simulated(2):
        x = image(init_device_mesh(DEVICE, (2,)), Shard(2))
        torchhalo.disable()
        with torchhalo.strict():
            x.median(2)


def test_out_variants_write_into_what_is_given() -> None:
    with simulated(2):
        mesh = init_device_mesh(DEVICE, (2,))
        x, w = image(mesh, Shard(2)), shard(torch.randn(3, 2, 3, 3), mesh, [Replicate()])
        expected = whole(F.conv2d(x, w))
        for placement in (Shard(2), Shard(3)):
            out = shard(torch.zeros(1, 3, 6, 4), mesh, [placement])
            given = torch.ops.aten.convolution.out(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, out=out)
            assert given is out and out.placements == (placement,)
            assert torch.equal(whole(out), expected)
        with pytest.raises(RuntimeError, match=r"convolution: `out` must be .*\(1, 3, 6, 4\).*\(1, 3, 5, 4\)"):
            small = shard(torch.zeros(1, 3, 5, 4), mesh, [Shard(2)])
            torch.ops.aten.convolution.out(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, out=small)
