"""The models of `benchmarks.models`: how each is made, what a shard of its input is, and what a step computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.unet_model import Shape, UNet

#: Of the `torch.nn.Module` and its input; what comes out is trained towards zero, or is the result.
Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Case(NamedTuple):
    """One model.

    Attributes:
        title: For the table.
        make: The model.
        shard: The shape of the input of one rank.
        quick: What ``make`` is given and the shape, for a CPU.
        dim: The dim that is sharded: the whole input is four times as long along it.
        train: Whether a step is forward, loss, backward and optimizer, or the forward alone.
        forward: What is called.
        exact: Whether zeros in the halo give the numbers of the plain model on the shard: not where attention looks at the
            other ranks or interpolation reads over the edge.
    """

    title: str
    make: Callable[..., nn.Module]
    shard: tuple[int, ...]
    quick: tuple[dict[str, Any], tuple[int, ...]]
    dim: int = 2
    train: bool = True
    forward: Forward = lambda model, x: model(x)
    exact: bool = True


def _unet(width: int, depth: int = 4) -> nn.Module:
    return UNet(Shape(2, 0, width, depth, channels=3))


def _resnet(classes: int = 1000, **options: Any) -> nn.Module:
    resnet = import_module("torchvision.models.resnet")
    return resnet.resnet50(num_classes=classes, **options)


def _segresnet(filters: int = 32) -> nn.Module:
    return import_module("monai.networks.nets").SegResNet(
        3, filters, in_channels=4, out_channels=3, blocks_down=(1, 2, 2, 4), blocks_up=(1, 1, 1)
    )


def _autoencoder(channels: Sequence[int] = (128, 256, 512, 512), layers: int = 2, groups: int = 32) -> nn.Module:
    """With its defaults of the size of Stable Diffusion's."""
    return import_module("diffusers").AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=tuple(channels),
        layers_per_block=layers,
        norm_num_groups=groups,
        latent_channels=4,
    )


def _video(width: int = 96, blocks: int = 2) -> nn.Module:
    """With its defaults Wan's."""
    return import_module("diffusers").AutoencoderKLWan(base_dim=width, z_dim=16, num_res_blocks=blocks)


def _decode(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    decode: Any = model.decode
    return decode(x, return_dict=False)[0]


CASES = {
    "unet": Case(
        "U-Net, 64 to 1024 channels", lambda width=64: _unet(width), (1, 3, 512, 2048), ({"width": 4}, (1, 3, 32, 32))
    ),
    "resnet": Case("ResNet-50", _resnet, (8, 3, 128, 512), ({"classes": 5, "width_per_group": 4}, (2, 3, 64, 64))),
    "unet_small": Case(
        "U-Net, 32 to 512 channels", lambda width=32: _unet(width), (1, 3, 128, 512), ({"width": 2}, (1, 3, 32, 32))
    ),
    "segresnet": Case(
        "MONAI SegResNet, 3-d", _segresnet, (1, 4, 48, 192, 192), ({"filters": 8}, (1, 4, 8, 16, 16)), exact=False
    ),
    "autoencoder": Case(
        "diffusers AutoencoderKL, decode",
        _autoencoder,
        (1, 4, 64, 256),
        ({"channels": (8, 8), "layers": 1, "groups": 4}, (1, 4, 8, 8)),
        train=False,
        forward=_decode,
        exact=False,
    ),
    "video": Case(
        "diffusers AutoencoderKLWan, decode",
        _video,
        (1, 16, 2, 32, 128),
        ({"width": 4, "blocks": 1}, (1, 16, 2, 4, 4)),
        dim=3,
        train=False,
        forward=_decode,
        exact=False,
    ),
}


def loss_of(out: torch.Tensor) -> torch.Tensor:
    """Towards zero, so that no target has to be read."""
    return F.mse_loss(out, torch.zeros_like(out))
