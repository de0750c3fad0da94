"""Train MONAI's 3-d U-Net on a volume of which each rank reads only its own box.

    torchrun --nproc-per-node 2 examples/train_unet3d.py --size 96

Shows: the model is MONAI's own, the volume is never whole in any process, and the losses do not depend on the number of ranks.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from monai.networks.nets import UNet
from torch.distributed.device_mesh import init_device_mesh

import torchhalo


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64, help="of the volume along each dim (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of training (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the volume (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    return parser.parse_args()


def write_volume(volume: Path, labels: Path, size: int) -> None:
    """Balls in noise, and where they are, written slice by slice as a scanner would."""
    voxels = np.lib.format.open_memmap(volume, mode="w+", dtype=np.float32, shape=(1, 1, size, size, size))
    classes = np.lib.format.open_memmap(labels, mode="w+", dtype=np.uint8, shape=(1, size, size, size))
    random = np.random.default_rng(0)
    y, x = np.ogrid[:size, :size]
    for z in range(size):
        ball = sum((place % 24 - 12) ** 2 for place in (z, y, x)) < 64
        classes[0, z] = ball
        voxels[0, 0, z] = ball + random.normal(size=(size, size), scale=0.5)


def main() -> None:
    args = arguments()
    mesh = init_device_mesh(args.device, (int(os.environ["WORLD_SIZE"]),))  # NCCL for CUDA, gloo for the CPU
    first = dist.get_rank() == 0
    paths = args.folder / "volume.npy", args.folder / "labels.npy"
    if first:
        write_volume(*paths, args.size)
    dist.barrier()
    volume, labels = (np.load(path, mmap_mode="r") for path in paths)
    image = torchhalo.shard(volume, mesh, dims=2)
    target = torchhalo.shard(labels, mesh, dims=1).long()
    if first:
        print(f"each of {mesh.size()} ranks has {tuple(image.to_local().shape)} of {tuple(image.shape)}", flush=True)

    torch.manual_seed(0)
    model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
    torchhalo.parallelize(model, mesh, dims=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(image), target)
        loss.backward()
        optimizer.step()
        if first:
            print(f"step {step + 1}/{args.steps}: loss {loss.item():.6f}", flush=True)
    state = torchhalo.plain_state_dict(model)  # keys and tensors of the plain model, on every rank
    if first:
        torch.save(state, args.folder / "unet3d.pt")
        print(f"weights: {args.folder / 'unet3d.pt'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
