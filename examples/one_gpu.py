"""One device decodes an image, and trains on a volume, that it could not hold: no torchrun, no tiles, no seams.

    python examples/one_gpu.py --memory 300MB --compare

Shows: `torchhalo.stream` within a budget; the numbers are those of the plain model.
"""

import argparse
import copy

import torch
from diffusers import AutoencoderKL
from monai.networks.nets import SegResNet

import torchhalo


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512, help="of the image (default: %(default)s)")
    parser.add_argument("--width", type=int, default=32, help="channels of the decoder (default: %(default)s)")
    parser.add_argument("--volume", type=int, default=64, help="side of the volume (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="of training (default: %(default)s)")
    parser.add_argument("--memory", default="300MB", help="on the device (default: %(default)s)")
    parser.add_argument("--compare", action="store_true", help="with the plain model, which needs more")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    return parser.parse_args()


@torch.no_grad()
def decode(args: argparse.Namespace) -> None:
    vae = AutoencoderKL(
        block_out_channels=(args.width, 2 * args.width),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=min(32, args.width),
    )
    vae = vae.eval().to(args.device)
    latent = torch.randn(1, 4, args.size // 2, args.size // 2)
    expected = vae.decode(latent.to(args.device)).sample.cpu() if args.compare else None
    torchhalo.stream(vae, memory=args.memory)
    image = vae.decode(latent).sample
    print(f"decoded an image of {tuple(image.shape)}")
    if expected is not None:
        print(f"largest difference from the plain decoder: {(image - expected).abs().max():.1e} of {expected.abs().max():.1e}")


def train(args: argparse.Namespace) -> None:
    model = SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=2).to(args.device)
    volume = torch.randn(1, 1, *[args.volume] * 3)
    labels = (volume[:, 0] > 0).long()
    models = [torchhalo.stream(copy.deepcopy(model), memory=args.memory)] + [model] * args.compare
    for name, net in zip(("streamed", "plain"), models):  # noqa: B905
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        x, y = (volume, labels) if name == "streamed" else (volume.to(args.device), labels.to(args.device))
        for step in range(args.steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            print(f"{name}, step {step}: loss {loss.item():.5f}")


if __name__ == "__main__":
    given = arguments()
    torch.manual_seed(0)
    decode(given)
    train(given)
