"""Train with Lightning's Trainer, the images cut over ranks: one line in `configure_model`.

torchrun --nproc-per-node 2 examples/train_lightning.py --size 64
"""

import argparse
import os

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

import torchhalo


class Segmentation(lightning.LightningModule):
    """A network that finds bright squares; `self.device_mesh` is the strategy's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))

    def configure_model(self) -> None:
        torchhalo.parallelize(self.net, self.device_mesh["tensor_parallel"])

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.print(f"step {self.global_step + 1}: loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def sample(size: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every rank, as one seed gives it."""
    labels = torch.zeros(size, size, dtype=torch.long)
    labels[number : number + size // 2, size // 4 : -size // 4] = 1
    return labels + 0.5 * torch.randn(1, size, size, generator=torch.Generator().manual_seed(number)), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64, help="of the images (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of training (default: %(default)s)")
    args = parser.parse_args()
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(devices=ranks, strategy=strategy, max_epochs=1, use_distributed_sampler=False, **quiet)
    trainer.fit(Segmentation(), DataLoader([sample(args.size, number) for number in range(args.steps)]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
