"""A plain loop with autocast, a gradient scaler and accumulation, on an OME-Zarr image of which each rank reads its own box.

torchrun --nproc-per-node 2 examples/train_loop.py --size 256
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zarr
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchhalo


def write_image(path: Path, size: int) -> None:
    """Cells and where they are, as level 0 of an OME-Zarr image of two time points: (t, c, z, y, x)."""
    cells = np.indices((size, size)).sum(0) % 32 < 12
    noisy = cells + np.random.default_rng(0).normal(size=cells.shape, scale=0.3)
    level = zarr.open_group(path, mode="w").create_array("0", shape=(2, 1, 1, size, size), chunks=(1, 1, 1, 64, 64), dtype="f4")
    level[:] = np.stack([noisy, cells])[:, None, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, help="height and width of the image (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="of training, two backwards each (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(), help="for the data (default: this one)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    if dist.get_rank() == 0:
        write_image(args.folder / "cells.zarr", args.size)
    dist.barrier()
    image = torchhalo.shard(zarr.open_array(args.folder / "cells.zarr" / "0", mode="r"), mesh, dims=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))
    torchhalo.parallelize(model.to(device), mesh)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.02), torch.amp.GradScaler(device)
    for step in range(2 * args.steps):
        with torch.autocast(device, torch.bfloat16), torchhalo.no_sync(model) if step % 2 == 0 else torch.enable_grad():
            loss = F.binary_cross_entropy_with_logits(model(image[0]), image[1])
            scaler.scale(loss / 2).backward()
        if step % 2 == 0:
            continue
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step // 2 + 1}: loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
