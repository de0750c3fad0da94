"""Train and evaluate with MONAI's engines on a NIfTI volume of which each rank reads its own box.

torchrun --nproc-per-node 2 examples/train_monai.py --size 32
"""

import argparse
import os
from pathlib import Path

import nibabel
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from monai.engines import SupervisedEvaluator, SupervisedTrainer
from monai.handlers import MeanDice, StatsHandler, ValidationHandler, from_engine
from monai.inferers import SimpleInferer
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from torch.distributed.device_mesh import init_device_mesh

import torchhalo


def write_volume(folder: Path, size: int) -> None:
    ball = ((((np.indices((size, size, size)) % 16) - 8) ** 2).sum(0) < 25).astype(float)
    for name, scale in (("image", 0.3), ("label", 0)):
        nibabel.save(nibabel.Nifti1Image(np.random.default_rng(0).normal(ball, scale), np.eye(4)), folder / f"{name}.nii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=32, help="of the volume along each dim (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=8, help="of training (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(), help="for the data (default: this one)")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    if dist.get_rank() == 0:
        write_volume(args.folder, args.size)
    dist.barrier()
    image, label = (torchhalo.shard(nibabel.load(args.folder / f"{name}.nii").dataobj, mesh, 0) for name in ("image", "label"))
    data = [{"image": image[None, None].float(), "label": F.one_hot(label.long(), 2).movedim(-1, 0)[None].float()}]
    torch.manual_seed(0)
    model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16), strides=(2,)).to(device)
    torchhalo.parallelize(model, mesh)
    common = {"device": device, "network": model, "epoch_length": 1, "inferer": SimpleInferer(), "decollate": True}
    dice = MeanDice(output_transform=from_engine(["pred", "label"]), include_background=True)
    final = {"postprocessing": lambda each: {"pred": each["pred"].argmax(0, keepdim=True), "label": each["label"][1:]}}
    evaluator = SupervisedEvaluator(val_data_loader=data, key_val_metric={"dice": dice}, **final, **common)
    handlers = [ValidationHandler(1, evaluator), StatsHandler(output_transform=from_engine(["loss"], first=True))]
    train = {"loss_function": DiceCELoss(softmax=True), "optimizer": torch.optim.Adam(model.parameters(), lr=0.02)}
    SupervisedTrainer(max_epochs=args.epochs, train_data_loader=data, train_handlers=handlers, **train, **common).run()
    if dist.get_rank() == 0:
        print(f"mean Dice {evaluator.state.metrics['dice']:.6f} after {args.epochs} epochs", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
