"""A plain U-Net in 2-d and 3-d, and what its windows must send at least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

CONV = {2: nn.Conv2d, 3: nn.Conv3d}
UP = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
BATCH_NORM = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
GROUPS = 4


class Shape(NamedTuple):
    """Of a U-Net and its input.

    Attributes:
        dims: 2 or 3.
        size: Of the image along each dim; ``2**depth`` must divide it.
        width: Channels of the first level; each further one has twice as many.
        depth: How often the image is halved.
        norm: "batch" or "group".
        channels: Of the image.
    """

    dims: int
    size: int
    width: int
    depth: int
    norm: str = "batch"
    channels: int = 1

    @property
    def input(self) -> tuple[int, ...]:
        return (1, self.channels, *[self.size] * self.dims)

    @property
    def widths(self) -> list[int]:
        return [self.width * 2**level for level in range(self.depth + 1)]

    def __str__(self) -> str:
        return (
            f"{self.dims}-d {'x'.join([str(self.size)] * self.dims)}, width {self.width}, depth {self.depth}, {self.norm} norm"
        )


class UNet(nn.Module):
    """Two convolutions with norm and ReLU per level, max pooling down, transposed convolution up, skips joined."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        widths, dims = shape.widths, shape.dims
        self.down = nn.ModuleList(
            _block(shape, below, width) for below, width in zip([shape.channels, *widths], widths, strict=False)
        )
        self.pool = POOL[dims](2)
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.up = nn.ModuleList(UP[dims](deep, width, 2, stride=2) for deep, width in pairs)
        self.join = nn.ModuleList(_block(shape, 2 * width, width) for _, width in pairs)
        self.head = CONV[dims](shape.width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


def _block(shape: Shape, first: int, last: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (first, last):
        norm = BATCH_NORM[shape.dims](last) if shape.norm == "batch" else nn.GroupNorm(GROUPS, last)
        layers += [CONV[shape.dims](channels, last, 3, padding=1), norm, nn.ReLU()]
    return nn.Sequential(*layers)


class Layer(NamedTuple):
    """A layer with a window, as it stands in a model.

    Attributes:
        kind: "conv", "transposed" or "pool".
        kernel, stride, padding: Along the first spatial dim.
        input, output: Shapes.
    """

    kind: str
    kernel: int
    stride: int
    padding: int
    input: tuple[int, ...]
    output: tuple[int, ...]


def layers(model: nn.Module, shape: Sequence[int]) -> list[Layer]:
    """The layers of ``model`` that have a window, in the order in which an input of ``shape`` meets them."""
    found: list[Layer] = []

    def note(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        kind = "pool" if isinstance(module, tuple(POOL.values())) else "transposed" if module.transposed else "conv"
        window = [
            value if isinstance(value, int) else value[0] for value in (module.kernel_size, module.stride, module.padding)
        ]
        found.append(Layer(kind, *window, tuple(args[0].shape), tuple(output.shape)))

    windowed = (*CONV.values(), *UP.values(), *POOL.values())
    handles = [module.register_forward_hook(note) for module in model.modules() if isinstance(module, windowed)]
    with torch.no_grad():
        model(torch.empty(tuple(shape), device=next(model.parameters()).device))
    for handle in handles:
        handle.remove()
    return found


def least_elements(layer: Layer, ranks: int) -> int:
    """How many elements must travel, forward and backward together, if both sides are cut along their first spatial dim.

    Counted row by row: forward, the inputs that a rank's outputs read and that it does not own; backward, for a convolution
    the gradients of the outputs that its inputs reach, for a pool the gradients of the inputs that it read from others.
    """
    rows, outs = layer.input[2], layer.output[2]
    sparse, dense = (rows, outs) if layer.kind == "transposed" else (outs, rows)
    pairs = {
        (i, at) for i in range(sparse) for k in range(layer.kernel) if 0 <= (at := i * layer.stride - layer.padding + k) < dense
    }
    reads = {(at, i) for i, at in pairs} if layer.kind == "transposed" else pairs  # (output, input)
    forward = _lacking(reads, outs, rows, ranks) * _rest(layer.input)
    if layer.kind == "pool":
        return 2 * forward
    return forward + _lacking({(i, o) for o, i in reads}, rows, outs, ranks) * _rest(layer.output)


def _lacking(reads: set[tuple[int, int]], targets: int, sources: int, ranks: int) -> int:
    """Over all ranks, how many sources a rank's targets read that it does not own."""
    owner_of_target, owner_of_source = (_owners(size, ranks) for size in (targets, sources))
    return len({(owner_of_target[t], s) for t, s in reads if owner_of_target[t] != owner_of_source[s]})


def _owners(size: int, ranks: int) -> list[int]:
    return [rank for rank, part in enumerate(torch.arange(size).chunk(ranks)) for _ in part]


def _rest(shape: Sequence[int]) -> int:
    return torch.Size((*shape[:2], *shape[3:])).numel()
