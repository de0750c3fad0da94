"""Train a classifier on images that are cut over ranks, in a loop that does not show it.

    torchrun --nproc-per-node 2 examples/train_classifier.py --size 128

Shows: with `outputs="whole"` the model takes plain images and gives plain logits, so that loss and accuracy are as in one
process; strided convolutions, pools and norms in between stay sharded.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torchhalo

KINDS = 4


class Block(nn.Module):
    """Two convolutions beside a shortcut, at half the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def classifier() -> nn.Module:
    stem = nn.Conv2d(3, 16, 7, stride=2, padding=3), nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(*stem, Block(16, 32), Block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, KINDS))


def batch(count: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes in one of four directions, under noise; the same on every rank, as one seed gives it."""
    labels = torch.randint(KINDS, (count,), generator=generator)
    angle = labels.view(-1, 1, 1) * torch.pi / KINDS
    place = torch.arange(size)
    waves = torch.sin((place.view(1, -1, 1) * angle.sin() + place.view(1, 1, -1) * angle.cos()) / 2)
    return waves.unsqueeze(1) + torch.randn(count, 3, size, size, generator=generator), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128, help="height and width of the images (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="images per step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of training (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    args = parser.parse_args()
    mesh = init_device_mesh(args.device, (int(os.environ["WORLD_SIZE"]),))  # NCCL for CUDA, gloo for the CPU
    torch.manual_seed(0)
    model = torchhalo.parallelize(classifier(), mesh, outputs="whole")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        images, labels = (tensor.to(args.device) for tensor in batch(args.batch, args.size, generator))
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            right = (logits.argmax(1) == labels).float().mean().item()
            print(f"step {step + 1}/{args.steps}: loss {loss.item():.6f}, {right:.0%} right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
