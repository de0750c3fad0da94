"""Train on a whole slide with Accelerate: each rank reads its own box of a tiled TIFF; gradients accumulate over two slides.

torchrun --nproc-per-node 2 examples/train_slide.py --size 256
"""

import argparse
import os
from pathlib import Path

import numpy as np
import tifffile
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zarr
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchhalo


def write_slides(paths: list[Path], size: int) -> None:
    """Dark squares on a noisy ground: (rows, columns, colors), in tiles."""
    for slide, path in zip(np.random.default_rng(0).integers(128, 255, (2, size, size, 3), np.uint8), paths, strict=True):
        slide[size // 4 : size // 2, size // 8 : -size // 8] //= 2
        tifffile.imwrite(path, slide, tile=(64, 64), photometric="rgb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, help="height and width of the slides (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="of training, two slides each (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(), help="for the data (default: this one)")
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    mesh = init_device_mesh(accelerator.device.type, (int(os.environ["WORLD_SIZE"]),))
    paths = [args.folder / f"slide{number}.tiff" for number in range(2)]
    accelerator.on_main_process(write_slides)(paths, args.size)
    dist.barrier()
    slides = [zarr.open_array(tifffile.imread(path, aszarr=True), mode="r") for path in paths]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2, padding=2), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1))
    torchhalo.parallelize(model.to(accelerator.device), mesh)
    optimizer = accelerator.prepare(torch.optim.Adam(model.parameters(), lr=0.02))
    for step in range(2 * args.steps):
        slide = torchhalo.shard(slides[step % 2], mesh, dims=0)  # rows; read from the tiles of this rank alone
        image = slide.permute(2, 0, 1).unsqueeze(0).float() / 255
        with accelerator.accumulate(model):
            loss = F.binary_cross_entropy_with_logits(model(image), (image.mean(1, keepdim=True) < 0.5).float())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        line = f"step {step + 1}: loss {loss.item():.6f}, this rank has {tuple(slide.to_local().shape)}"
        accelerator.on_main_process(print)(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
