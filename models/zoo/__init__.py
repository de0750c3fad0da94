"""The table of models: where each comes from, how it is made small, and what it is given."""

from __future__ import annotations

from models.zoo.diffusers import DIFFUSERS
from models.zoo.model import Model
from models.zoo.monai import MONAI
from models.zoo.own import OWN
from models.zoo.segmentation import SEGMENTATION
from models.zoo.timm import TIMM
from models.zoo.torchvision import TORCHVISION
from models.zoo.transformers import TRANSFORMERS

__all__ = ["COMPILED", "EVERYWHERE", "LIBRARIES", "REASONS", "STREAMED", "UNTRIED", "ZOO", "Model"]

LIBRARIES = {
    "Networks of `models/nets.py`": OWN,
    "torchvision": TORCHVISION,
    "timm": TIMM,
    "segmentation_models_pytorch": SEGMENTATION,
    "MONAI": MONAI,
    "diffusers": DIFFUSERS,
    "transformers": TRANSFORMERS,
}
ZOO = {name: model for models in LIBRARIES.values() for name, model in models.items()}

#: What is tried on all meshes, not on two ranks only: our own networks, those of MONAI and diffusers with many kinds of layers,
#: and some of each other library.
EVERYWHERE = {
    *OWN,
    *(f"torchvision {name}" for name in ("resnet50", "densenet121", "deeplabv3_resnet50")),
    *(f"timm {name}" for name in ("efficientnet_b0", "test_convnext", "hrnet_w18_small")),
    *(f"smp {name}, resnet18" for name in ("Unet", "FPN", "PSPNet")),
    *(f"MONAI {name}" for name in ("UNet", "UNet (3-d)", "BasicUNet", "SegResNet", "SegResNetDS", "DynUNet", "VNet")),
    *(f"MONAI {name}" for name in ("AttentionUnet", "HighResNet", "AutoencoderKL")),
    *(f"diffusers {name}" for name in ("AutoencoderKL", "VQModel", "AutoencoderDC", "UNet2DModel")),
    *(f"diffusers AutoencoderKL{name}" for name in ("Wan", "CogVideoX", "HunyuanVideo", "LTXVideo", "Mochi")),
    *(f"transformers {name}" for name in ("SegformerForSemanticSegmentation", "Swinv2ForImageClassification")),
}

#: What is compiled too: that takes longest.
COMPILED = {
    *(f"torchvision {name}" for name in ("resnet18", "squeezenet1_1", "mobilenet_v3_small")),
    *(f"timm {name}" for name in ("test_convnext", "resnet10t", "test_byobnet", "test_mambaout", "tinynet_e", "test_nfnet")),
    *(f"smp {name}, resnet18" for name in ("Unet", "FPN")),
    *(
        f"MONAI {name}"
        for name in ("UNet", "UNet (3-d)", "BasicUNet", "SegResNet", "AttentionUnet", "DynUNet", "AutoencoderKL")
    ),
    *(f"diffusers {name}" for name in ("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC", "UNet2DModel")),
    *(f"transformers {name}" for name in ("ResNetForImageClassification", "ConvNextV2ForImageClassification")),
    *(f"transformers {name}" for name in ("PoolFormerForImageClassification", "SegformerForSemanticSegmentation")),
}

#: What one device runs shard after shard: of each library the smaller ones, with all that its models are made of.
STREAMED = {
    *(f"torchhalo {name}" for name in ("ConvNeXt", "FPN", "PSPNet")),
    *(f"torchvision {name}" for name in ("resnet18", "squeezenet1_1", "shufflenet_v2_x0_5", "mobilenet_v3_small")),
    *(f"timm test_{name}" for name in ("byobnet", "coatnet", "convnext", "mambaout", "nfnet", "vit")),
    *(f"timm {name}" for name in ("resnet10t", "lcnet_035")),
    *(f"smp {name}, resnet18" for name in ("Unet", "FPN", "Linknet")),
    *(f"MONAI {name}" for name in ("UNet", "UNet (3-d)", "BasicUNet", "SegResNet", "DynUNet", "VNet", "AttentionUnet")),
    *(f"MONAI {name}" for name in ("HighResNet", "AutoEncoder", "AutoencoderKL", "AutoencoderKL (3-d)", "MedNeXt", "RegUNet")),
    *(f"diffusers {name}" for name in ("AutoencoderKL", "VQModel", "AutoencoderTiny", "AutoencoderDC", "AutoencoderKLWan")),
    *(f"diffusers {name}" for name in ("AutoencoderKLLTXVideo", "UNet2DModel", "UNet2DConditionModel")),
    *(f"transformers {name}ForImageClassification" for name in ("ResNet", "ConvNextV2", "PoolFormer", "RegNet")),
    *(f"transformers {name}" for name in ("SegformerForSemanticSegmentation", "ViTModel")),
}

_SAMPLED = "exact; `grid_sample` reads where its grid says, which only the values know, and so its input is gathered"

#: Of models that are not exact, or gather: why.
REASONS = {
    "MONAI VoxelMorph": _SAMPLED,
    "MONAI MaskedAutoEncoderViT": "exact; it keeps patches at random places: read by index, the tokens are gathered",
    "transformers DeformableDetrModel": _SAMPLED,
}

#: What is not in the table at all, and why.
UNTRIED = {
    "torchvision's detectors": "their heads pick boxes by value, and need targets to train; two of their backbones are above",
    "torchvision's MViT": "made for 16 frames of 224 by 224 and no others, which takes minutes in float64 on a CPU",
    "diffusers AutoencoderKLAllegro": "its forward raises NotImplementedError in plain torch too",
    "transformers Dinat": "needs natten, which has no build for a CPU and this torch",
}
