"""The table of models: where each comes from, how it is made small, and what it is given."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn


class Model(NamedTuple):
    """One row.

    Attributes:
        factory: What makes it, as ``package.module:function``; the package is also what must be installed.
        inputs: The shape of each input, or the input itself.
        options: What the factory is given.
    """

    factory: str
    inputs: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def library(self) -> str:
        """The package it comes from."""
        return self.factory.partition(":")[0].partition(".")[0]

    @property
    def missing(self) -> str | None:
        """Why it cannot be tried here, if so."""
        try:
            self.version  # noqa: B018
        except PackageNotFoundError:
            return f"{self.library} is not installed"
        return None

    @property
    def version(self) -> str:
        """That of the package; empty for the models of this one."""
        return "" if self.library == __package__ else version(self.library)

    def make(self) -> nn.Module:
        module, _, function = self.factory.partition(":")
        return attrgetter(function)(importlib.import_module(module))(**self.options)


def _own(function: str, *shape: int) -> Model:
    return Model(f"{__package__}.nets:{function}", (shape,), {})


def _monai(function: str, *shape: int, **options: Any) -> Model:
    channels = {} if "in_channels" in options else {"in_channels": 1, "out_channels": 2}
    return Model(f"monai.networks.nets:{function}", (shape,), {"spatial_dims": len(shape) - 2, **channels, **options})


def _diffusers(function: str, *inputs: Any, **options: Any) -> Model:
    return Model(f"diffusers:{function}", inputs, options)


def _torchvision(function: str, *shape: int, **options: Any) -> Model:
    return Model(f"torchvision.models:{function}", (shape,), {"num_classes": 5, **options})


def _timm(name: str, *shape: int) -> Model:
    return Model("timm:create_model", (shape,), {"model_name": name, "num_classes": 5})


def _segmentation(function: str, *shape: int) -> Model:
    options = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 3}
    return Model(f"segmentation_models_pytorch:{function}", (shape,), options)


ZOO = {
    "ResNet-50": _own("ResNet50", 2, 3, 96, 88),
    "DenseNet": _own("DenseNet", 2, 3, 96, 88),
    "EfficientNet": _own("EfficientNet", 2, 3, 96, 88),
    "ConvNeXt": _own("ConvNeXt", 2, 3, 96, 96),
    "HRNet": _own("HRNet", 1, 3, 96, 96),
    "DeepLabV3": _own("deeplab_v3", 2, 3, 72, 66),
    "FPN": _own("FPN", 1, 3, 96, 88),
    "PSPNet": _own("pspnet", 2, 3, 72, 66),
    "MONAI UNet": _monai("UNet", 1, 1, 40, 24, channels=(4, 8, 16, 16), strides=(2, 2, 2), num_res_units=2, dropout=0.1),
    "MONAI UNet (3-d)": _monai("UNet", 1, 1, 20, 12, 12, channels=(4, 8, 8), strides=(2, 2), norm="BATCH"),
    "MONAI BasicUNet": _monai("BasicUNet", 1, 1, 48, 48, features=(4, 4, 8, 8, 16, 4)),
    "MONAI SegResNet": _monai("SegResNet", 1, 1, 40, 24, init_filters=8, dropout_prob=0.1),
    "MONAI SegResNetDS": _monai("SegResNetDS", 1, 1, 40, 24, init_filters=8, blocks_down=(1, 2, 2, 2), dsdepth=2),
    "MONAI DynUNet": _monai(
        "DynUNet",
        *(1, 1, 40, 24),
        kernel_size=[3, 3, 3, 3],
        strides=[1, 2, 2, 2],
        upsample_kernel_size=[2, 2, 2],
        filters=[4, 8, 8, 16],
        deep_supervision=True,
        deep_supr_num=2,
        res_block=True,
    ),
    # Its dropout is for volumes and would drop whole images; norms of what is left, rounding errors, agree with nothing.
    "MONAI VNet": _monai("VNet", 1, 1, 48, 48, dropout_prob_down=0.0, dropout_prob_up=(0.0, 0.0)),
    "MONAI AttentionUnet": _monai("AttentionUnet", 1, 1, 40, 24, channels=(4, 8, 16, 16), strides=(2, 2, 2)),
    "MONAI HighResNet": _monai("HighResNet", 1, 1, 22, 19, dropout_prob=0.1),
    "MONAI AutoencoderKL": _monai(
        "AutoencoderKL",
        *(1, 1, 36, 28),
        in_channels=1,
        out_channels=1,
        num_res_blocks=(1, 1, 1),
        channels=(8, 8, 16),
        attention_levels=(False, False, True),
        latent_channels=4,
        norm_num_groups=4,
    ),
    "diffusers AutoencoderKL": _diffusers(
        "AutoencoderKL",
        (1, 3, 36, 28),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 16),
        layers_per_block=1,
        norm_num_groups=4,
    ),
    "diffusers VQModel": _diffusers(
        "VQModel",
        (1, 3, 36, 28),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        num_vq_embeddings=16,
    ),
    "diffusers AutoencoderKLWan": _diffusers(
        "AutoencoderKLWan",
        (1, 3, 9, 40, 24),
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    ),
    "diffusers AutoencoderKLCogVideoX": _diffusers(
        "AutoencoderKLCogVideoX",
        (1, 3, 16, 40, 24),
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    ),
    "diffusers AutoencoderKLHunyuanVideo": _diffusers(
        "AutoencoderKLHunyuanVideo",
        (1, 3, 9, 40, 24),
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    ),
    "diffusers AutoencoderKLLTXVideo": _diffusers(
        "AutoencoderKLLTXVideo",
        (1, 3, 17, 40, 24),
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        patch_size=2,
    ),
    "diffusers AutoencoderKLMochi": _diffusers(
        "AutoencoderKLMochi",
        (1, 3, 13, 40, 24),
        latent_channels=4,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    ),
    "diffusers AutoencoderDC": _diffusers(
        "AutoencoderDC",
        (1, 3, 40, 24),
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8, 16),
        decoder_block_out_channels=(8, 8, 16),
        encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
    ),
    "diffusers UNet2DModel": _diffusers(
        "UNet2DModel",
        (1, 3, 40, 24),
        torch.tensor(10),
        block_out_channels=(8, 8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    ),
    "torchvision ResNet-50": _torchvision("resnet50", 2, 3, 96, 88),
    "torchvision DenseNet-121": _torchvision("densenet121", 2, 3, 96, 88),
    "torchvision DeepLabV3": _torchvision("segmentation.deeplabv3_resnet50", 2, 3, 72, 66, weights_backbone=None),
    "timm EfficientNet-B0": _timm("efficientnet_b0", 2, 3, 96, 88),
    "timm ConvNeXt": _timm("convnext_atto", 2, 3, 96, 96),
    "timm HRNet": _timm("hrnet_w18_small", 2, 3, 96, 96),
    "segmentation_models_pytorch Unet": _segmentation("Unet", 2, 3, 96, 96),
    "segmentation_models_pytorch FPN": _segmentation("FPN", 2, 3, 96, 96),
    "segmentation_models_pytorch PSPNet": _segmentation("PSPNet", 2, 3, 96, 96),
}
