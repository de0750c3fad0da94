"""segmentation_models_pytorch: each decoder with one encoder, and Unet with encoders of other families."""

from __future__ import annotations

from typing import Any

from models.zoo.model import Model


def _decoder(
    function: str, encoder: str = "resnet18", size: tuple[int, int] = (64, 96), title: str = "", **options: Any
) -> tuple[str, Model]:
    options = {"encoder_name": encoder, "encoder_weights": None, "classes": 3, **options}
    return f"smp {title or function}, {encoder}", Model(f"segmentation_models_pytorch:{function}", ((2, 3, *size),), options)


ENCODERS = [
    *("resnext50_32x4d", "dpn68", "vgg11_bn", "se_resnet50", "densenet121", "inceptionv4", "inceptionresnetv2"),
    *("efficientnet-b0", "mobilenet_v2", "xception", "timm-efficientnet-b0", "timm-tf_efficientnet_lite0", "timm-skresnet18"),
    *("mit_b0", "mobileone_s0", "tu-convnext_atto", "tu-regnetx_002", "tu-hrnet_w18_small", "tu-mobilenetv3_small_050"),
]

SEGMENTATION = dict(
    [
        _decoder("Unet"),
        _decoder("Unet", title="Unet (scSE)", decoder_attention_type="scse"),
        _decoder("UnetPlusPlus"),
        _decoder("MAnet"),
        _decoder("Linknet"),
        _decoder("FPN"),
        _decoder("PSPNet"),
        _decoder("PAN", size=(256, 256)),
        _decoder("DeepLabV3"),
        _decoder("DeepLabV3Plus"),
        _decoder("UPerNet"),
        _decoder("Segformer"),
        _decoder("DPT", "tu-vit_tiny_patch16_224", (64, 64), dynamic_img_size=True),
        *(_decoder("Unet", encoder) for encoder in ENCODERS),
    ]
)
