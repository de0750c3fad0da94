"""Train with Lightning's Fabric, the images cut over ranks: `parallelize` is all that its strategy is told.

torchrun --nproc-per-node 2 examples/train_fabric.py --size 64
"""

import argparse
import os

import torch
import torch.nn.functional as F
from lightning import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

import torchhalo


def cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return torchhalo.parallelize(model, mesh["tensor_parallel"])


def sample(size: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A bright square; the same on every rank, as one seed gives it."""
    labels = torch.zeros(size, size, dtype=torch.long)
    labels[number : number + size // 2, size // 4 : -size // 4] = 1
    return labels + 0.5 * torch.randn(1, size, size, generator=torch.Generator().manual_seed(number)), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64, help="of the images (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of training (default: %(default)s)")
    args = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(devices=ranks, strategy=ModelParallelStrategy(cut, data_parallel_size=1, tensor_parallel_size=ranks))
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
    model = fabric.setup(net)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    # No distributed sampler: all ranks take the same images.
    loader = fabric.setup_dataloaders(
        DataLoader([sample(args.size, number) for number in range(args.steps)]), use_distributed_sampler=False
    )
    for step, (image, labels) in enumerate(loader):
        loss = F.cross_entropy(model(image), labels)
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=10.0)
        optimizer.step()
        line = f"step {step + 1}: loss {loss.item():.6f}"
        if fabric.is_global_zero:
            print(line, flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
