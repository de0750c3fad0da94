"""Decode an image with diffusers' AutoencoderKL over ranks: no tiles, so no seams.

    torchrun --nproc-per-node 2 examples/decode_image.py --size 512 --compare

Shows: convolutions, group norms and attention see the whole image, so the result is that of one process, to rounding.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL
from torch.distributed.device_mesh import init_device_mesh

import torchhalo


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="folder or name for AutoencoderKL.from_pretrained; random weights if not given")
    parser.add_argument("--latent", type=Path, help="of shape (1, channels, height, width), as .npy; random if not given")
    parser.add_argument("--size", type=int, default=512, help="of the image, if the latent is random (default: %(default)s)")
    parser.add_argument("--width", type=int, default=32, help="channels, if the weights are random (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="to write the image to, as .npy, each rank its own box")
    parser.add_argument("--compare", action="store_true", help="with the whole image decoded in one process")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    return parser.parse_args()


def decoder(weights: str | None, width: int) -> AutoencoderKL:
    if weights:
        return AutoencoderKL.from_pretrained(weights)
    return AutoencoderKL(
        block_out_channels=(width, 2 * width, 4 * width, 4 * width),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=min(32, width),
    )


@torch.no_grad()
def main() -> None:
    args = arguments()
    mesh = init_device_mesh(args.device, (int(os.environ["WORLD_SIZE"]),))  # NCCL for CUDA, gloo for the CPU
    first = dist.get_rank() == 0
    torch.manual_seed(0)
    vae = decoder(args.weights, args.width).eval().to(args.device)
    random = np.random.default_rng(0).standard_normal((1, vae.config.latent_channels, args.size // 8, args.size // 8))
    latent = np.load(args.latent, mmap_mode="r") if args.latent else random.astype(np.float32)
    whole = vae.decode(torch.as_tensor(latent, device=args.device)).sample if args.compare else None

    torchhalo.parallelize(vae, mesh)
    started = time.monotonic()
    image = vae.decode(torchhalo.shard(latent, mesh)).sample
    if first:
        seconds = time.monotonic() - started
        shapes = f"{tuple(image.to_local().shape)} of {tuple(image.shape)}"
        print(f"decoded on {mesh.size()} ranks in {seconds:.1f} s, each has {shapes}", flush=True)
    if whole is not None:
        difference = (image.full_tensor() - whole).abs().max().item()
        if first:
            print(f"largest difference from one process: {difference:.1e} of {whole.abs().max().item():.1e}", flush=True)
    if args.output:
        if first:
            np.lib.format.open_memmap(args.output, mode="w+", dtype=np.float32, shape=tuple(image.shape)).flush()
        dist.barrier()
        torchhalo.store(image, np.lib.format.open_memmap(args.output, mode="r+"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
