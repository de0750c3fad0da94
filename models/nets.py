"""Small networks with the topology of well-known ones: the same layers in the same order, few channels, few blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn


def conv(
    source: int,
    target: int,
    kernel: int = 3,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    act: Callable[[], nn.Module] | None = nn.ReLU,
) -> nn.Sequential:
    """Convolution that keeps the size but for its stride, batch norm, and the activation if there is one."""
    padding = dilation * (kernel - 1) // 2
    layers = [
        nn.Conv2d(source, target, kernel, stride, padding, dilation, groups, bias=False),
        nn.BatchNorm2d(target),
    ]
    return nn.Sequential(*layers, *([act()] if act else []))


# ResNet and what is built on it.


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 beside a shortcut."""

    def __init__(self, source: int, width: int, stride: int = 1, dilation: int = 1):
        super().__init__()
        target = 4 * width
        self.body = nn.Sequential(
            conv(source, width, 1), conv(width, width, 3, stride, dilation), conv(width, target, 1, act=None)
        )
        same = stride == 1 and source == target
        self.shortcut = nn.Identity() if same else conv(source, target, 1, stride, act=None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Backbone(nn.Module):
    """The four stages of a ResNet, each a list item of what it gives.

    Args:
        blocks: How many bottlenecks each stage has.
        width: Channels of the stem.
        dilations: Of the last two stages; one that is dilated keeps its size.
    """

    def __init__(self, blocks: Sequence[int] = (1, 1, 2, 1), width: int = 4, dilations: Sequence[int] = (1, 1)):
        super().__init__()
        self.stem = nn.Sequential(conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList()
        self.channels = [4 * width, 8 * width, 16 * width, 32 * width]
        source = width
        for count, target, stride, dilation in zip(blocks, self.channels, (1, 2, 2, 2), (1, 1, *dilations), strict=True):
            stride = 1 if dilation > 1 else stride
            first = Bottleneck(source, target // 4, stride, dilation)
            rest = [Bottleneck(target, target // 4, 1, dilation) for _ in range(count - 1)]
            self.stages.append(nn.Sequential(first, *rest))
            source = target

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.stem(x)
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        return levels


class ResNet50(nn.Module):
    """The 3, 4, 6, 3 bottlenecks of ResNet-50 as a classifier."""

    def __init__(self, width: int = 2, classes: int = 5):
        super().__init__()
        self.backbone = Backbone((3, 4, 6, 3), width)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(self.backbone.channels[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(self.pool(self.backbone(x)[-1]), 1))


class FPN(nn.Module):
    """Feature pyramid: lateral 1x1 convolutions, a way down by nearest interpolation, and a coarser level on top."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.backbone = Backbone()
        self.lateral = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in self.backbone.channels)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in self.backbone.channels)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        levels = [lateral(level) for lateral, level in zip(self.lateral, self.backbone(x), strict=True)]
        for fine in reversed(range(len(levels) - 1)):
            levels[fine] = levels[fine] + F.interpolate(levels[fine + 1], size=levels[fine].shape[-2:], mode="nearest")
        found = {f"p{n}": smooth(level) for n, (smooth, level) in enumerate(zip(self.smooth, levels, strict=True), start=2)}
        return found | {"pool": F.max_pool2d(found["p5"], 1, 2)}


class Segmenter(nn.Module):
    """A dilated backbone, a module that sees context, and an auxiliary head, both resized to the input.

    Args:
        context: Of the deepest channels; gives ``width`` channels.
    """

    def __init__(self, context: Callable[[int, int], nn.Module], align: bool, width: int = 8, classes: int = 3):
        super().__init__()
        self.backbone = Backbone(dilations=(2, 4))
        middle, deepest = self.backbone.channels[-2:]
        self.head = nn.Sequential(context(deepest, width), conv(width, width), nn.Conv2d(width, classes, 1))
        self.auxiliary = nn.Sequential(conv(middle, width), nn.Dropout(0.1), nn.Conv2d(width, classes, 1))
        self.align = align

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        *_, middle, deepest = self.backbone(x)
        found = {"out": self.head(deepest), "aux": self.auxiliary(middle)}
        return {
            name: F.interpolate(value, size=x.shape[-2:], mode="bilinear", align_corners=self.align)
            for name, value in found.items()
        }


class ASPP(nn.Module):
    """Parallel convolutions of growing dilation, and the mean of the whole image."""

    def __init__(self, source: int, width: int, rates: Sequence[int] = (2, 4, 6)):
        super().__init__()
        self.branches = nn.ModuleList([conv(source, width, 1), *(conv(source, width, 3, dilation=rate) for rate in rates)])
        self.image = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(source, width, 1))
        self.project = nn.Sequential(conv((len(rates) + 2) * width, width, 1), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = F.interpolate(self.image(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.project(torch.cat([*(branch(x) for branch in self.branches), image], dim=1))


class Pyramid(nn.Module):
    """Means over coarser and coarser grids, resized and joined to what they are means of."""

    def __init__(self, source: int, width: int, sizes: Sequence[int] = (1, 2, 3, 6)):
        super().__init__()
        part = source // len(sizes)
        self.levels = nn.ModuleList(nn.Sequential(nn.AdaptiveAvgPool2d(size), conv(source, part, 1)) for size in sizes)
        self.project = nn.Sequential(conv(source + part * len(sizes), width), nn.Dropout2d(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-2:]
        levels = [F.interpolate(level(x), size=size, mode="bilinear", align_corners=True) for level in self.levels]
        return self.project(torch.cat([x, *levels], dim=1))


def deeplab_v3() -> nn.Module:
    return Segmenter(ASPP, align=False)


def pspnet() -> nn.Module:
    return Segmenter(Pyramid, align=True)


# DenseNet.


class DenseLayer(nn.Module):
    """Norm, activation, 1x1, norm, activation, 3x3; what it gives is joined to what it got."""

    def __init__(self, source: int, growth: int):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(source), nn.Conv2d(source, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, self.dropout(new)], dim=1)


class DenseNet(nn.Module):
    """Blocks of dense layers with halving transitions, as a classifier."""

    def __init__(self, layers: Sequence[int] = (2, 3, 4, 3), growth: int = 4, classes: int = 5):
        super().__init__()
        channels = 2 * growth
        self.features = nn.Sequential(conv(3, channels, 7, 2), nn.MaxPool2d(3, 2, 1))
        for number, count in enumerate(layers):
            if number:
                self.features.append(self._transition(channels, channels // 2))
                channels //= 2
            for _ in range(count):
                self.features.append(DenseLayer(channels, growth))
                channels += growth
        self.features.append(nn.BatchNorm2d(channels))
        self.head = nn.Linear(channels, classes)

    @staticmethod
    def _transition(source: int, target: int) -> nn.Module:
        return nn.Sequential(
            nn.BatchNorm2d(source), nn.ReLU(inplace=True), nn.Conv2d(source, target, 1, bias=False), nn.AvgPool2d(2, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(F.relu(self.features(x)), (1, 1)).flatten(1))


# EfficientNet.


class SqueezeExcite(nn.Module):
    """Each channel scaled by a gate that sees the means of all channels."""

    def __init__(self, channels: int, squeezed: int):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * gate.sigmoid()


class StochasticDepth(nn.Module):
    """In training, drops the whole branch of a sample now and then."""

    def __init__(self, probability: float):
        super().__init__()
        self.keep = 1 - probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(self.keep).div_(self.keep)


class MBConv(nn.Module):
    """Inverted bottleneck: widen, depthwise, squeeze and excite, project."""

    def __init__(self, source: int, target: int, kernel: int, stride: int, expand: int, drop: float):
        super().__init__()
        width = source * expand
        widen = [conv(source, width, 1, act=nn.SiLU)] if expand > 1 else []
        self.body = nn.Sequential(
            *widen,
            conv(width, width, kernel, stride, groups=width, act=nn.SiLU),
            SqueezeExcite(width, max(1, source // 4)),
            conv(width, target, 1, act=None),
        )
        self.drop = StochasticDepth(drop) if stride == 1 and source == target else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) if self.drop is None else x + self.drop(self.body(x))


class EfficientNet(nn.Module):
    """The seven stages of EfficientNet-B0 as a classifier."""

    # kernel, stride, expansion, channels, blocks
    STAGES = (
        (3, 1, 1, 4, 1),
        (3, 2, 4, 4, 2),
        (5, 2, 4, 6, 2),
        (3, 2, 4, 8, 2),
        (5, 1, 4, 8, 2),
        (5, 2, 4, 12, 2),
        (3, 1, 4, 16, 1),
    )

    def __init__(self, classes: int = 5):
        super().__init__()
        source = 6
        self.features = nn.Sequential(conv(3, source, 3, 2, act=nn.SiLU))
        for kernel, stride, expand, target, blocks in self.STAGES:
            for block in range(blocks):
                self.features.append(MBConv(source, target, kernel, 1 if block else stride, expand, 0.1))
                source = target
        self.features.append(conv(source, 32, 1, act=nn.SiLU))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


# ConvNeXt.


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of an image, which are not its last dim."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, then a perceptron of each pixel with channels last, scaled and joined to the shortcut."""

    def __init__(self, channels: int, drop: float):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(channels, eps=1e-6), nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )
        self.scale = nn.Parameter(torch.full((channels,), 0.5))
        self.drop = StochasticDepth(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.scale * self.perceptron(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.drop(y.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    """Patches of 4x4, four stages that halve in between, as a classifier."""

    def __init__(self, blocks: Sequence[int] = (1, 1, 3, 1), width: int = 4, classes: int = 5):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, width, 4, 4), ChannelNorm(width, eps=1e-6))
        for number, count in enumerate(blocks):
            if number:
                self.features += nn.Sequential(ChannelNorm(width, eps=1e-6), nn.Conv2d(width, 2 * width, 2, 2))
                width *= 2
            self.features += nn.Sequential(*(ConvNeXtBlock(width, 0.1) for _ in range(count)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.features(x).mean((-2, -1))))


# HRNet.


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, channels: int):
        super().__init__()
        self.body = nn.Sequential(conv(channels, channels), conv(channels, channels, act=None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + x)


class Exchange(nn.Module):
    """Branches of halving size, then each the sum of all: strided convolutions on the way down, interpolation on the way up."""

    def __init__(self, channels: Sequence[int]):
        super().__init__()
        self.branches = nn.ModuleList(BasicBlock(count) for count in channels)
        self.ways = nn.ModuleList(
            nn.ModuleList(self._way(channels, source, target) for source in range(len(channels)))
            for target in range(len(channels))
        )

    @staticmethod
    def _way(channels: Sequence[int], source: int, target: int) -> nn.Module:
        if source == target:
            return nn.Identity()
        if source > target:
            up = nn.Upsample(scale_factor=2 ** (source - target), mode="nearest")
            return nn.Sequential(conv(channels[source], channels[target], 1, act=None), up)
        steps = [conv(channels[source], channels[source], 3, 2) for _ in range(target - source - 1)]
        return nn.Sequential(*steps, conv(channels[source], channels[target], 3, 2, act=None))

    def forward(self, levels: list[torch.Tensor]) -> list[torch.Tensor]:
        levels = [branch(level) for branch, level in zip(self.branches, levels, strict=True)]
        sums = []
        for ways in self.ways:
            first, *rest = (way(level) for way, level in zip(ways, levels, strict=True))
            for value in rest:
                first = first + value
            sums.append(F.relu(first))
        return sums


class HRNet(nn.Module):
    """Two to four branches in parallel that keep exchanging, all of them resized to the finest in the end."""

    def __init__(self, width: int = 4, classes: int = 3):
        super().__init__()
        channels = [width * 2**level for level in range(4)]
        self.stem = nn.Sequential(conv(3, 8, 3, 2), conv(8, 8, 3, 2), Bottleneck(8, 4), conv(16, width))
        self.downs = nn.ModuleList(conv(channels[level], channels[level + 1], 3, 2) for level in range(3))
        self.stages = nn.ModuleList(Exchange(channels[: level + 2]) for level in range(3))
        self.head = nn.Sequential(conv(sum(channels), 16, 1), nn.Conv2d(16, classes, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = [self.stem(x)]
        for down, stage in zip(self.downs, self.stages, strict=True):
            levels = stage([*levels, down(levels[-1])])
        size = levels[0].shape[-2:]
        finest = [levels[0], *(F.interpolate(level, size=size, mode="bilinear") for level in levels[1:])]
        return F.interpolate(self.head(torch.cat(finest, dim=1)), size=x.shape[-2:], mode="bilinear")
