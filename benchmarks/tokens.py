"""What hybrids of convolutions and tokens send in a training step, by what it is for; nothing is computed.

Each model takes one step on shapes alone, as the first of the ranks that cut its last dim. `halos` are what windows and rolls
read of other ranks, `keys and values` what attention reads, or shares out by samples or heads, and the gradients that go home.
`moved` is what else goes from one sharding to another or is gathered, and partial sums of activations: what a better layout
would save.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Shard

from benchmarks import common
from benchmarks.common import Column, Record, Row, key
from torchhalo.exchange import gathers
from torchhalo.exchange.plan import Exchange
from torchhalo.ops.attention_inputs import ATTENTION
from torchhalo.tools.fake_run import observe_rank
from torchhalo.torch_internals import calls, watching

COLUMNS = ("halos", "keys and values", "moved")
#: Collectives of these ops that are not exchanges bring keys and values.
PRODUCTS = ("bmm", "baddbmm")


class Hybrid(NamedTuple):
    """A model: what makes it, with which options, and the shape of its image."""

    factory: str
    shape: tuple[int, ...]
    options: dict[str, Any]

    def make(self) -> nn.Module:
        module, _, function = self.factory.partition(":")
        found = getattr(import_module(module), function)
        if module == "transformers":
            return found(found.config_class(**self.options))
        return found(**self.options)


def _timm(name: str, size: int, **options: Any) -> Hybrid:
    return Hybrid("timm:create_model", (1, 3, size, size), {"model_name": name, **options})


def _vision(name: str, *shape: int) -> Hybrid:
    module = "torchvision.models.video" if len(shape) == 5 else "torchvision.models"
    return Hybrid(f"{module}:{name}", shape, {})


_MONAI = {"in_channels": 1, "out_channels": 2}
_KL = {"in_channels": 1, "out_channels": 1, "latent_channels": 4, "num_res_blocks": 1, "norm_num_groups": 16}
_AT_THE_END = {"attention_levels": (False, False, True)}
_SWIN = {**_MONAI, "feature_size": 12}

HYBRIDS: dict[str, Hybrid] = {
    "torchvision convnext_tiny": _vision("convnext_tiny", 1, 3, 448, 448),
    "torchvision swin_t": _vision("swin_t", 1, 3, 448, 448),
    "torchvision swin_v2_t": _vision("swin_v2_t", 1, 3, 512, 512),
    "torchvision swin3d_t": _vision("swin3d_t", 1, 3, 8, 224, 224),
    "torchvision maxvit_t": _vision("maxvit_t", 1, 3, 224, 224),
    "torchvision vit_b_16": _vision("vit_b_16", 1, 3, 224, 224),
    "timm convnext_atto": _timm("convnext_atto", 448),
    "timm edgenext_xx_small": _timm("edgenext_xx_small", 256),
    "timm poolformerv2_s12": _timm("poolformerv2_s12", 448),
    "timm pvt_v2_b0": _timm("pvt_v2_b0", 448),
    "timm mobilevit_xxs": _timm("mobilevit_xxs", 256),
    "timm coat_lite_tiny": _timm("coat_lite_tiny", 224),
    "timm coatnet_pico_rw_224": _timm("coatnet_pico_rw_224", 224),
    "timm davit_tiny": _timm("davit_tiny", 448),
    "timm hiera_tiny_224": _timm("hiera_tiny_224", 224),
    "timm maxvit_tiny_tf_224": _timm("maxvit_tiny_tf_224", 224),
    "timm swin_tiny_patch4_window7_224": _timm("swin_tiny_patch4_window7_224", 448, img_size=448),
    "timm swinv2_tiny_window8_256": _timm("swinv2_tiny_window8_256", 512, img_size=512),
    "timm focalnet_tiny_srf": _timm("focalnet_tiny_srf", 448),
    "timm vit_tiny_patch16_224": _timm("vit_tiny_patch16_224", 224),
    "smp Segformer, mit_b0": Hybrid(
        "segmentation_models_pytorch:Segformer", (1, 3, 512, 512), {"encoder_name": "mit_b0", "encoder_weights": None}
    ),
    "MONAI SwinUNETR": Hybrid("monai.networks.nets:SwinUNETR", (1, 1, 448, 448), {**_SWIN, "spatial_dims": 2}),
    "MONAI SwinUNETR (3-d)": Hybrid("monai.networks.nets:SwinUNETR", (1, 1, 64, 64, 224), _SWIN),
    "MONAI UNETR (3-d)": Hybrid(
        "monai.networks.nets:UNETR",
        (1, 1, 64, 64, 64),
        {**_MONAI, "img_size": (64, 64, 64), "hidden_size": 96, "mlp_dim": 192, "num_heads": 4, "feature_size": 8},
    ),
    "MONAI AutoencoderKL": Hybrid(
        "monai.networks.nets:AutoencoderKL",
        (1, 1, 128, 128),
        {**_KL, **_AT_THE_END, "spatial_dims": 2, "channels": (32, 64, 64)},
    ),
    "MONAI AutoencoderKL (3-d)": Hybrid(
        "monai.networks.nets:AutoencoderKL",
        (1, 1, 32, 32, 64),
        {**_KL, **_AT_THE_END, "spatial_dims": 3, "channels": (16, 32, 32)},
    ),
    "diffusers AutoencoderKL": Hybrid(
        "diffusers:AutoencoderKL",
        (1, 3, 128, 128),
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 16,
        },
    ),
    "transformers SwinForImageClassification": Hybrid(
        "transformers:SwinForImageClassification", (1, 3, 448, 448), {"image_size": 448}
    ),
    "transformers SegformerForSemanticSegmentation": Hybrid(
        "transformers:SegformerForSemanticSegmentation", (1, 3, 512, 512), {}
    ),
    "transformers PvtV2ForImageClassification": Hybrid(
        "transformers:PvtV2ForImageClassification", (1, 3, 448, 448), {"image_size": 448}
    ),
}


class _Counter(watching.Watcher):
    """Bytes that this rank sends or receives, by what they are for."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()

    def collective(self, each: watching.Collective) -> None:
        call, size, ranks = calls.running_call(), each.tensor.element_size(), each.group.size()
        name = "" if call is None else call.name
        attends = name in PRODUCTS or "attention" in name or each.about == ATTENTION
        if each.kind == "all_to_all" and isinstance(each.about, Exchange):
            self.bytes["halos"] += sum(each.sent) * size
        elif attends and each.kind == "all_to_all":
            self.bytes["keys and values"] += sum(each.sent) * size
        elif each.kind == "all_to_all" and call is None:
            self.bytes["moved"] += sum(each.sent) * size
        elif attends and each.kind in ("all_gather", "reduce_scatter"):
            share = ranks - 1 if each.kind == "all_gather" else (ranks - 1) / ranks
            self.bytes["keys and values"] += int(each.tensor.numel() * size * share)

    def redistribution(self, each: watching.Redistribution) -> None:
        """Partial sums of products: all are added up on every rank, or each rank's share. Those of a sum are few."""
        call = calls.running_call()
        if call is not None and call.name == "sum":
            return
        size = prod(map(int, each.shape)) * each.dtype.itemsize
        for axis, (before, after) in enumerate(zip(each.source, each.target, strict=True)):
            ranks = each.mesh.size(axis)
            if before.is_partial() and not after.is_partial() and (each.op is not None or len(each.shape) > 2):
                self.bytes["moved"] += (1 if isinstance(after, Shard) else 2) * size * (ranks - 1) // ranks

    def moves(self, event: gathers.Gather | gathers.Move) -> None:
        """A gather for a product that DTensor computes is of keys and values too."""
        self.bytes["keys and values" if event.op.removeprefix("aten.").split(".")[0] in PRODUCTS else "moved"] += event.bytes


def measure(hybrid: Hybrid, ranks: int) -> dict[str, int]:
    """What the first of the ranks sends in a step, in bytes: the second one, as the first shows what attention wants moved."""
    counter = _Counter()

    def make() -> nn.Module:
        model = hybrid.make()
        model.register_forward_pre_hook(lambda *_: counter.bytes.clear())
        return model

    image = torch.empty(hybrid.shape, device="meta", requires_grad=True)
    with watching.watched_by(counter), gathers.watch_moves(counter.moves), gathers.watch(counter.moves):
        observe_rank(make, [image], (ranks,), (0,), (len(hybrid.shape) - 1,), torch.float32, True)
    return {name: counter.bytes[name] for name in COLUMNS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", nargs="+", metavar="NAME", choices=HYBRIDS, help="these alone")
    parser.add_argument("--ranks", type=int, default=2)


def run(arguments: argparse.Namespace, record: Record) -> None:
    names = arguments.model or (["torchvision swin_t"] if arguments.quick else list(HYBRIDS))
    for name in names:
        print(name, file=sys.stderr)
        hybrid = HYBRIDS[name]
        record.add({"model": name, "input": "x".join(map(str, hybrid.shape)), **measure(hybrid, arguments.ranks)})


def table(rows: list[Row]) -> str:
    def kib(name: str) -> Column:
        return Column(f"{name}, KiB", lambda row: row[name] / 1024, "{:,.0f}")

    return common.table(rows, [key("model"), key("input"), *map(kib, COLUMNS)])
