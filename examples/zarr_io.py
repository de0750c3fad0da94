"""Read an image from a zarr array, run a network over it, and write the result to another, each rank its own box.

    torchrun --nproc-per-node 2 examples/zarr_io.py --input image.zarr --output result.zarr

Shows: no process holds the whole image or the whole result. If the input does not exist, a random one is made.
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import zarr
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchhalo


def network() -> nn.Module:
    """Any network does; its weights come from a seed, so that all ranks have the same."""
    torch.manual_seed(0)
    down = nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU()
    return nn.Sequential(*down, nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(16, 1, 3, padding=1))


def make_image(path: Path, size: int) -> None:
    """A random image, written a band of rows at a time."""
    image = zarr.create_array(path, shape=(1, 3, size, size), chunks=(1, 3, 64, size), dtype="float32")
    for row in range(0, size, 64):
        band = image[:, :, row : row + 64]
        image[:, :, row : row + 64] = torch.randn(band.shape, generator=torch.Generator().manual_seed(row)).numpy()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="a zarr array of shape (1, 3, height, width)")
    parser.add_argument("--output", type=Path, required=True, help="the zarr array to write; one that exists is replaced")
    parser.add_argument("--size", type=int, default=512, help="of the image, if it is made (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    args = parser.parse_args()
    mesh = init_device_mesh(args.device, (int(os.environ["WORLD_SIZE"]),))  # NCCL for CUDA, gloo for the CPU
    first = dist.get_rank() == 0
    if first and not args.input.exists():
        make_image(args.input, args.size)
    dist.barrier()
    image = torchhalo.shard(zarr.open_array(args.input, mode="r"), mesh, dims=2)
    result = torchhalo.parallelize(network(), mesh, dims=2)(image)

    if first:
        # Two ranks must not write into one chunk: the shards are torch.chunk's, so are the chunks.
        rows = math.ceil(result.shape[2] / mesh.size())
        chunks = (1, 1, rows, result.shape[3])
        zarr.create_array(args.output, shape=tuple(result.shape), chunks=chunks, dtype="float32", overwrite=True)
        print(f"{tuple(image.shape)} -> {tuple(result.shape)} in chunks of {chunks}", flush=True)
    dist.barrier()
    torchhalo.store(result, zarr.open_array(args.output, mode="r+"))
    print(f"rank {dist.get_rank()} wrote {tuple(result.to_local().shape)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
