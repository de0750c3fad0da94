"""torchvision: classification, segmentation, video, optical flow, and the backbones of its detectors."""

from __future__ import annotations

from typing import Any

from models.zoo.model import Model


def _torchvision(function: str, *shape: int, **options: Any) -> tuple[str, Model]:
    title = function.partition(".")[2] or function
    return f"torchvision {title}", Model(
        f"torchvision.models:{function}", (shape or (2, 3, 64, 96),), {"num_classes": 5, **options}
    )


def _segmentation(function: str, **options: Any) -> tuple[str, Model]:
    return _torchvision(f"segmentation.{function}", 2, 3, 64, 48, weights_backbone=None, **options)


def _video(function: str, *shape: int, **options: Any) -> tuple[str, Model]:
    return _torchvision(f"video.{function}", *(shape or (1, 3, 8, 48, 64)), **options)


TORCHVISION = dict(
    [
        _torchvision("alexnet", 2, 3, 96, 128),
        _torchvision("convnext_tiny", 1, 3, 64, 64),
        _torchvision("densenet121"),
        _torchvision("efficientnet_b0"),
        _torchvision("efficientnet_v2_s", 2, 3, 64, 64),
        _torchvision("googlenet", 2, 3, 64, 96, init_weights=False),
        _torchvision("inception_v3", 2, 3, 96, 96, init_weights=False, aux_logits=False),
        _torchvision("mnasnet0_5"),
        _torchvision("mobilenet_v2"),
        _torchvision("mobilenet_v3_small"),
        _torchvision("mobilenet_v3_large"),
        _torchvision("regnet_x_400mf"),
        _torchvision("regnet_y_400mf"),
        _torchvision("resnet18"),
        _torchvision("resnet50"),
        _torchvision("resnext50_32x4d"),
        _torchvision("wide_resnet50_2", 2, 3, 64, 64),
        _torchvision("shufflenet_v2_x0_5"),
        _torchvision("squeezenet1_0"),
        _torchvision("squeezenet1_1"),
        _torchvision("swin_t", 1, 3, 64, 64),
        _torchvision("swin_v2_t", 1, 3, 64, 64),
        _torchvision("vgg11"),
        _torchvision("vgg11_bn"),
        _torchvision("vit_b_32", 1, 3, 64, 64, image_size=64),
        _segmentation("deeplabv3_resnet50"),
        _segmentation("deeplabv3_mobilenet_v3_large"),
        _segmentation("fcn_resnet50", aux_loss=True),
        _segmentation("lraspp_mobilenet_v3_large"),
        _video("r3d_18"),
        _video("mc3_18"),
        _video("r2plus1d_18"),
        _video("s3d", 1, 3, 16, 224, 224),
        _video("swin3d_t", 1, 3, 4, 32, 32),
    ]
    + [
        (f"torchvision {name}", Model(f"torchvision.models.{name}", inputs, options))
        for name, inputs, options in [
            (
                "maxvit:MaxVit",
                ((2, 3, 64, 64),),
                {
                    "input_size": (64, 64),
                    "stem_channels": 16,
                    "partition_size": 2,
                    "block_channels": [16, 32],
                    "block_layers": [1, 2],
                    "head_dim": 8,
                    "stochastic_depth_prob": 0.2,
                },
            ),
            ("optical_flow:raft_small", ((1, 3, 128, 128), (1, 3, 128, 128)), {}),
            ("optical_flow:raft_large", ((1, 3, 128, 128), (1, 3, 128, 128)), {}),
            (
                "detection.backbone_utils:resnet_fpn_backbone",
                ((2, 3, 64, 96),),
                {"backbone_name": "resnet18", "weights": None},
            ),
            (
                "detection.backbone_utils:mobilenet_backbone",
                ((2, 3, 64, 96),),
                {"backbone_name": "mobilenet_v3_large", "weights": None, "fpn": True},
            ),
        ]
    ]
)
