"""Train and evaluate with MONAI's engines on a NIfTI volume of which each rank reads its own box.

torchrun --nproc-per-node 2 examples/train_monai.py --size 32
"""

import argparse
import os
import tempfile
from pathlib import Path

import nibabel
import numpy as np
import torch
import torch.distributed as dist
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import MeanDice, StatsHandler, ValidationHandler, from_engine
from monai.inferers import SimpleInferer
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from torch.distributed.device_mesh import init_device_mesh

import torchhalo


def write_volume(folder: Path, size: int) -> None:
    place = np.indices((size, size, size)) % 16 - 8
    ball = ((place**2).sum(0) < 25).astype(np.uint8)
    noisy = (ball + np.random.default_rng(0).normal(size=ball.shape, scale=0.3)).astype(np.float32)
    for name, array in (("image", noisy), ("label", ball)):
        nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), folder / f"{name}.nii")


def one_hot(output: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{"pred": (each["pred"].argmax(0, keepdim=True) > 0).float(), "label": each["label"].float()} for each in output]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=32, help="of the volume along each dim (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="of training (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="(default: %(default)s)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    if dist.get_rank() == 0:
        write_volume(args.folder, args.size)
    dist.barrier()
    parts = {name: torchhalo.shard(nibabel.load(args.folder / f"{name}.nii").dataobj, mesh, 0) for name in ("image", "label")}
    data = [{name: part[None, None].float() for name, part in parts.items()}]  # what a data loader would give
    torch.manual_seed(0)
    model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16), strides=(2,)).to(device)
    torchhalo.parallelize(model, mesh)
    common = {"device": device, "network": model, "inferer": SimpleInferer(), "decollate": True}
    dice = {"dice": MeanDice(output_transform=from_engine(["pred", "label"]), include_background=True)}
    evaluator = SupervisedEvaluator(
        val_data_loader=data, epoch_length=1, postprocessing=lambda each: one_hot([each])[0], key_val_metric=dice, **common
    )
    trainer = SupervisedTrainer(
        max_epochs=args.epochs,
        train_data_loader=data,
        epoch_length=1,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loss_function=DiceCELoss(to_onehot_y=True, softmax=True),
        train_handlers=[ValidationHandler(1, evaluator), StatsHandler(output_transform=from_engine(["loss"], first=True))],
        **common,
    )
    trainer.run()
    if dist.get_rank() == 0:
        print(f"mean Dice {evaluator.state.metrics['dice']:.6f} after {args.epochs} epochs", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
