"""Pipelines of diffusers, unmodified, with tiny random weights: the images of one process, whatever is parallelized."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import mesh_of

import torchhalo

SIZE = 32
GENERATOR = torch.Generator().manual_seed(1)
PROMPT, NEGATIVE = (torch.randn(1, 6, 8, generator=GENERATOR) for _ in range(2))
IMAGE = torch.rand(1, 3, SIZE, SIZE, generator=GENERATOR)
MASK = torch.zeros(1, 1, SIZE, SIZE)
MASK[:, :, 8:20, 10:24] = 1
BLOCKS = {"block_out_channels": (4, 8), "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "layers_per_block": 1}
NETWORK = {**BLOCKS, "in_channels": 4, "cross_attention_dim": 8, "norm_num_groups": 2, "attention_head_dim": 2}


def vae() -> Any:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return AutoencoderKL(block_out_channels=(4, 4), norm_num_groups=2, sample_size=SIZE, shift_factor=0.1, **blocks)


def unet(**settings: Any) -> Any:
    from diffusers import UNet2DConditionModel

    up = ("CrossAttnUpBlock2D", "UpBlock2D")
    return UNet2DConditionModel(sample_size=16, out_channels=4, up_block_types=up, **NETWORK, **settings)


def stable_diffusion(name: str, **parts: Any) -> Any:
    import diffusers

    texts = {"text_encoder": None, "tokenizer": None}
    checks = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    scheduler = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False)
    return getattr(diffusers, name)(vae=vae(), unet=unet(), scheduler=scheduler, **parts, **texts, **checks)


def text_to_image() -> tuple[Any, dict[str, Any]]:
    return stable_diffusion("StableDiffusionPipeline"), {"height": SIZE, "width": SIZE}


def image_to_image() -> tuple[Any, dict[str, Any]]:
    return stable_diffusion("StableDiffusionImg2ImgPipeline"), {"image": IMAGE, "strength": 0.9}


def inpainting() -> tuple[Any, dict[str, Any]]:
    given = {"image": IMAGE, "mask_image": MASK, "strength": 0.9, "height": SIZE, "width": SIZE}
    return stable_diffusion("StableDiffusionInpaintPipeline"), given


def controlnet() -> tuple[Any, dict[str, Any]]:
    from diffusers import ControlNetModel

    network = ControlNetModel(conditioning_embedding_out_channels=(4, 8), **NETWORK)
    for parameter in network.parameters():  # its last layers are zero
        torch.nn.init.normal_(parameter, std=0.1)
    return stable_diffusion("StableDiffusionControlNetPipeline", controlnet=network), {"image": IMAGE}


def xl() -> tuple[Any, dict[str, Any]]:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 32}
    texts = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    with torch.device("cpu"):  # it makes arrays of its tables
        scheduler = EulerDiscreteScheduler()
    made = StableDiffusionXLPipeline(vae=vae(), unet=unet(**added), scheduler=scheduler, **texts)
    pooled = {"pooled_prompt_embeds": PROMPT[:, 0], "negative_pooled_prompt_embeds": NEGATIVE[:, 0]}
    return made, {"height": SIZE, "width": SIZE, **pooled}


def diffusion_transformer() -> tuple[Any, dict[str, Any]]:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    sizes = {"sample_size": 16, "patch_size": 1, "in_channels": 4, "out_channels": 4, "pos_embed_max_size": 32}
    widths = {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 8, "caption_projection_dim": 16}
    network = SD3Transformer2DModel(num_layers=1, pooled_projection_dim=8, **sizes, **widths)
    texts = dict.fromkeys(f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in ("", "_2", "_3"))
    made = StableDiffusion3Pipeline(vae=vae(), transformer=network, scheduler=FlowMatchEulerDiscreteScheduler(), **texts)
    pooled = {"pooled_prompt_embeds": PROMPT[:, 0], "negative_pooled_prompt_embeds": NEGATIVE[:, 0]}
    return made, {"height": SIZE, "width": SIZE, **pooled}


def video() -> tuple[Any, dict[str, Any]]:
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    latents = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    decoder = AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, **latents)
    widths = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 8, "freq_dim": 16, "ffn_dim": 16}
    network = WanTransformer3DModel(in_channels=4, out_channels=4, num_layers=1, rope_max_seq_len=32, **widths)
    scheduler = FlowMatchEulerDiscreteScheduler()
    made = WanPipeline(vae=decoder, transformer=network, scheduler=scheduler, text_encoder=None, tokenizer=None)
    return made, {"height": SIZE, "width": SIZE, "num_frames": 5}


MAKERS = {
    maker.__name__: maker for maker in (text_to_image, image_to_image, inpainting, controlnet, xl, diffusion_transformer, video)
}


def pictures(name: str, parallelized: tuple[str, ...]) -> np.ndarray:
    torch.manual_seed(0)
    pipeline, given = MAKERS[name]()
    pipeline.set_progress_bar_config(disable=True)
    for part in parallelized:
        # Of a video, the height: its decoder takes one latent frame after the other.
        torchhalo.parallelize(getattr(pipeline, part), mesh_of((2,)), dims=3 if name == "video" else 2, outputs="whole")
    torch.manual_seed(1)
    prompts = {"prompt_embeds": PROMPT, "negative_prompt_embeds": NEGATIVE, "generator": torch.Generator().manual_seed(0)}
    output = pipeline(num_inference_steps=2, output_type="np", **prompts, **given)
    return np.asarray(output.frames if name == "video" else output.images)


def check_pipeline(name: str) -> None:
    expected = pictures(name, ())
    denoisers = {"controlnet": ("unet", "controlnet"), "diffusion_transformer": ("transformer",), "video": ("transformer",)}
    denoiser = denoisers.get(name, ("unet",))
    for parallelized in (("vae",), denoiser, ("vae", *denoiser)):
        # float32, and two steps of some twenty layers
        np.testing.assert_allclose(pictures(name, parallelized), expected, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_pipelines_give_the_images_of_one_process(pool, name: str) -> None:
    pool(2).run(check_pipeline, name)
