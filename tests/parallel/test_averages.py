"""Averages of weights, copies and files of a parallelized model, and sliding windows over one: as in one process."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import swa_utils

import torchhalo


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 1)).double()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, each_step: Callable[[], object]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 9, 6, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        each_step()


class Average:
    """An average, how it is updated, its tensors and what it predicts."""

    def __init__(self, update: Callable[[], object], state: Callable[[], dict[str, Any]], predict: Callable[..., Any]):
        self.update, self.state, self.predict = update, state, predict


def averages() -> Iterator[Callable[[nn.Module], Average]]:
    from diffusers.training_utils import EMAModel
    from timm.utils import ModelEmaV3

    for settings in (
        {},
        {"avg_fn": swa_utils.get_swa_avg_fn()},
        {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
        {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
    ):

        def of_torch(model: nn.Module, settings: dict[str, Any] = settings) -> Average:
            average = swa_utils.AveragedModel(model, **settings)
            return Average(lambda: average.update_parameters(model), average.state_dict, average)

        yield of_torch

    def of_diffusers(model: nn.Module) -> Average:
        average = EMAModel(model.parameters(), decay=0.9)

        def predict(x: torch.Tensor) -> torch.Tensor:
            average.store(model.parameters())
            average.copy_to(model.parameters())
            y = model(x)
            average.restore(model.parameters())
            return y

        state = lambda: {str(place): tensor for place, tensor in enumerate(average.shadow_params)}  # noqa: E731
        return Average(lambda: average.step(model.parameters()), state, predict)

    def of_timm(model: nn.Module) -> Average:
        average = ModelEmaV3(model, decay=0.9)
        return Average(lambda: average.update(model), average.module.state_dict, average)

    yield from (of_diffusers, of_timm)


def check_averages() -> int:
    x = torch.randn(1, 3, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    count = 0
    for make in averages():
        found = []
        for model in (made(), torchhalo.parallelize(made(), mesh_of((2,)))):
            average = make(model)
            train(model, average.update)
            found.append({**average.state(), "prediction": average.predict(x)})
        assert found[0].keys() == found[1].keys()
        for plain, sharded in zip(*(state.values() for state in found), strict=True):
            torch.testing.assert_close(whole(sharded), plain, rtol=0, atol=1e-12)
        count += 1
    return count


@pytest.mark.slow
def test_averages_of_weights(pool) -> None:
    assert pool(2).run(check_averages) == [7, 7]


def check_copies() -> None:
    """Copies, also from files, train as the original does: their gradients are reduced by hooks of their own."""
    model = torchhalo.parallelize(made(), mesh_of((2,)))
    train(model, lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    copied = copy.deepcopy(model)
    for net in (model, loaded, copied):
        train(net, lambda: None)
    expected = torchhalo.plain_state_dict(model)
    for net in (loaded, copied):
        for key, value in torchhalo.plain_state_dict(net).items():
            assert torch.equal(value, expected[key]), key
        assert not any(isinstance(p, DTensor) for p in torchhalo.unparallelize(net).parameters())


def test_copies_and_files(pool) -> None:
    pool(2).run(check_copies)


def check_sliding_windows() -> None:
    from monai.inferers import sliding_window_inference
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    model = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)).double().eval()
    x = torch.randn(1, 1, 30, 26, dtype=torch.float64)
    for outputs in ("whole", "sharded"):
        sharded = torchhalo.parallelize(copy.deepcopy(model), mesh_of((2,)), outputs=outputs)
        for settings in ({"mode": "constant"}, {"mode": "gaussian", "overlap": 0.5}):
            expected = sliding_window_inference(x, (16, 16), 2, model, **settings)
            for image in (x, torchhalo.shard(x, mesh_of((2,)))):
                found = sliding_window_inference(image, (16, 16), 2, sharded, **settings)
                torch.testing.assert_close(whole(found), expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_sliding_windows(pool) -> None:
    pool(2).run(check_sliding_windows)
