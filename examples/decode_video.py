"""Decode a video with diffusers' AutoencoderKLWan over ranks, cut along its height: no tiles, so no seams.

    torchrun --nproc-per-node 2 examples/decode_video.py --frames 9 --size 128 --compare

Shows: a causal 3-d decoder that goes from frame to frame with a cache of its own runs as it is. Each rank has all frames of its
rows; along time nothing is cut, since the decoder takes one latent frame after the other.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan
from torch.distributed.device_mesh import init_device_mesh

import torchhalo


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="folder or name for AutoencoderKLWan.from_pretrained; random weights if not given")
    parser.add_argument("--frames", type=int, default=9, help="of the video, 4n + 1 (default: %(default)s)")
    parser.add_argument("--size", type=int, default=128, help="height and width of the video (default: %(default)s)")
    parser.add_argument("--width", type=int, default=16, help="channels, if the weights are random (default: %(default)s)")
    parser.add_argument("--compare", action="store_true", help="with the whole video decoded in one process")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    args = arguments()
    mesh = init_device_mesh(args.device, (int(os.environ["WORLD_SIZE"]),))  # NCCL for CUDA, gloo for the CPU
    first = dist.get_rank() == 0
    torch.manual_seed(0)
    made = AutoencoderKLWan.from_pretrained(args.weights) if args.weights else AutoencoderKLWan(base_dim=args.width)
    vae = made.eval().to(args.device)
    shape = (1, vae.config.z_dim, (args.frames - 1) // 4 + 1, args.size // 8, args.size // 8)
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(args.device)
    whole = vae.decode(latent).sample if args.compare else None

    torchhalo.parallelize(vae, mesh, dims=3)
    started = time.monotonic()
    video = vae.decode(latent).sample
    if first:
        seconds = time.monotonic() - started
        shapes = f"{tuple(video.to_local().shape)} of {tuple(video.shape)}"
        print(f"decoded on {mesh.size()} ranks in {seconds:.1f} s, each has {shapes}", flush=True)
    if whole is not None:
        difference = (video.full_tensor() - whole).abs().max().item()
        if first:
            print(f"largest difference from one process: {difference:.1e} of {whole.abs().max().item():.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
