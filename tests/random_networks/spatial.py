"""Blocks of windows: convolutions, pools, interpolation, padding, and what moves elements."""

from __future__ import annotations

from math import prod
from random import Random

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from random_networks.block import Block, block, conv, divisor, of, parameter, shape_after


def windows(r: Random, s: tuple[int, ...], largest: int = 5) -> tuple[list[int], ...]:
    """Kernel, stride, padding and dilation per dim, such that there is an output."""
    found = []
    for size in s:
        kernel, stride, dilation = r.randint(1, largest), r.choice([1, 1, 1, 2, 3]), r.choice([1, 1, 1, 2, 3])
        padding = r.choice([0, (kernel - 1) * dilation // 2, r.randint(0, 3)])
        while size + 2 * padding < (kernel - 1) * dilation + 1:
            kernel, dilation = max(1, kernel - 1), max(1, dilation - 1)
        found.append((kernel, stride, padding, dilation))
    return tuple(map(list, zip(*found, strict=True)))


@block
def convolution(r: Random, n: int, c: int, *s: int) -> nn.Module:
    kernel, stride, padding, dilation = windows(r, s)
    groups = r.choice([1, 1, divisor(r, c)])
    out = groups * r.randint(1, 3)
    return conv(len(s), c, out, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=r.random() < 0.7)


@block
def same_convolution(r: Random, n: int, c: int, *s: int) -> nn.Module:
    kernel = [r.choice([1, 3, 3, 5]) for _ in s]
    mode = r.choice(["zeros", "reflect", "replicate", "circular"])
    if mode == "reflect":
        kernel = [min(k, 2 * size - 1) for k, size in zip(kernel, s, strict=True)]
    if mode == "circular":
        kernel = [min(k, 2 * size + 1) for k, size in zip(kernel, s, strict=True)]
    return conv(len(s), c, r.randint(1, 6), kernel, padding="same", padding_mode=mode)


@block
def depthwise_separable(r: Random, n: int, c: int, *s: int) -> nn.Module:
    kernel, out = r.choice([3, 3, 5, 7]), r.randint(1, 6)
    times = r.choice([1, 1, 2])
    return nn.Sequential(
        conv(len(s), c, c * times, kernel, padding=kernel // 2, groups=c, bias=r.random() < 0.5, stride=r.choice([1, 1, 2])),
        conv(len(s), c * times, out),
    )


@block
def factorized_convolution(r: Random, n: int, c: int, *s: int) -> nn.Module:
    layers = []
    for dim in range(len(s)):
        kernel = [r.choice([3, 5, 7]) if dim == d else 1 for d in range(len(s))]
        layers.append(conv(len(s), c, c, kernel, padding=[k // 2 for k in kernel], bias=False))
    return nn.Sequential(*layers)


@block
def transposed_convolution(r: Random, n: int, c: int, *s: int) -> nn.Module:
    groups = r.choice([1, 1, divisor(r, c)])
    stride = [r.choice([1, 2, 2, 3]) for _ in s]
    kernel = [r.randint(1, 4) for _ in s]
    dilation = [r.choice([1, 1, 2]) for _ in s]
    padding = [r.randint(0, min(2, (k - 1) * d // 2)) for k, d in zip(kernel, dilation, strict=True)]
    extra = [r.randint(0, max(t, d) - 1) for t, d in zip(stride, dilation, strict=True)]
    return of("ConvTranspose", len(s))(
        c, groups * r.randint(1, 2), kernel, stride, padding, extra, groups=groups, bias=r.random() < 0.7, dilation=dilation
    )


@block
def normalized_weight(r: Random, n: int, c: int, *s: int) -> nn.Module:
    norm = r.choice([parametrizations.weight_norm, parametrizations.spectral_norm])
    return norm(conv(len(s), c, r.randint(2, 5), 3, padding=1))


@block
def blur(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    if len(s) != 2 or min(s) < 2:
        return None
    mode = r.choice(["reflect", "replicate"])
    kernel = torch.tensor([1.0, 2.0, 1.0])
    kernel = (kernel[:, None] * kernel / 16).expand(c, 1, 3, 3)
    return Block(lambda m, x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode=mode), m.kernel, stride=2, groups=c), kernel=kernel.clone())


@block
def convolution_by_sample(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """Kernels that the sample itself makes: one group per sample."""
    apply = [F.conv1d, F.conv2d, F.conv3d][len(s) - 1]
    out = r.randint(1, 4)
    kernel = (3,) * len(s)

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        weight = m.make(x.mean(tuple(range(2, x.ndim)))).view(n * out, c, *kernel)
        return apply(x.reshape(1, n * c, *s), weight, padding=1, groups=n).view(n, out, *s)

    return Block(forward, make=nn.Linear(c, out * c * prod(kernel)))


def pool_windows(r: Random, s: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
    kernel = [r.randint(1, min(4, size)) for size in s]
    return kernel, [r.randint(1, 3) for _ in s], [r.randint(0, k // 2) for k in kernel]


@block
def max_pool(r: Random, n: int, c: int, *s: int) -> nn.Module:
    kernel, stride, padding = pool_windows(r, s)
    dilation = [
        r.choice([1, 1, 2]) if size + 2 * p > 2 * (k - 1) and size > 4 else 1
        for k, p, size in zip(kernel, padding, s, strict=True)
    ]
    return of("MaxPool", len(s))(kernel, stride, padding, dilation=dilation, ceil_mode=r.random() < 0.4)


@block
def max_pool_and_unpool(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    if min(s) < 2:
        return None
    pool, unpool = of("MaxPool", len(s))(2, return_indices=True), of("MaxUnpool", len(s))(2)

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        y, where = m.pool(x)
        return m.unpool(m.conv(y), where, output_size=x.shape)

    return Block(forward, pool=pool, unpool=unpool, conv=conv(len(s), c, c))


@block
def average_pool(r: Random, n: int, c: int, *s: int) -> nn.Module:
    kernel, stride, padding = pool_windows(r, s)
    options = {"divisor_override": r.randint(1, 5)} if len(s) > 1 and r.random() < 0.2 else {}
    kernel, stride, padding = (kernel, stride, padding) if len(s) > 1 else (kernel[0], stride[0], padding[0])
    return of("AvgPool", len(s))(
        kernel, stride, padding, ceil_mode=r.random() < 0.4, count_include_pad=r.random() < 0.5, **options
    )


@block
def power_pool(r: Random, n: int, c: int, *s: int) -> nn.Module:
    kernel = [r.randint(1, min(3, size)) for size in s]
    stride = [r.randint(1, 2) for _ in s]
    power, ceil = r.choice([2, 2, 3]), r.random() < 0.3
    pool = [F.lp_pool1d, F.lp_pool2d, F.lp_pool3d][len(s) - 1]
    if len(s) == 1:
        return Block(lambda m, x: pool(x.abs() + 0.1, power, kernel[0], stride[0], ceil_mode=ceil))
    return Block(lambda m, x: pool(x.abs() + 0.1, power, kernel, stride, ceil_mode=ceil))


@block
def adaptive_pool(r: Random, n: int, c: int, *s: int) -> nn.Module:
    size = [r.choice([1, r.randint(1, 9), old]) for old in s]
    return of(r.choice(["AdaptiveAvgPool", "AdaptiveMaxPool"]), len(s))(size if len(s) > 1 else size[0])


@block
def interpolation(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    smooth = [["linear"], ["bilinear", "bicubic"], ["trilinear"]][len(s) - 1]
    mode = r.choice(["nearest", "nearest-exact", "area", *smooth, *smooth])
    options: dict[str, object] = {"mode": mode}
    if mode in smooth:
        options["align_corners"] = r.random() < 0.5
        if len(s) == 2:
            options["antialias"] = r.random() < 0.3
    if r.random() < 0.5:
        options["size"] = tuple(r.choice([size, 2 * size, r.randint(1, 12)]) for size in s)
    else:
        options["scale_factor"] = tuple(r.choice([2, 2, 0.5, 1.5, 0.7, 3]) if size > 1 else 2 for size in s)
        options["recompute_scale_factor"] = r.choice([None, True]) if mode != "area" else None
    made = Block(lambda m, x: F.interpolate(x, **options))
    # Of one column torch's own antialiasing on a CPU is wrong: it repeats the first row.
    return None if options.get("antialias") and shape_after(made, (n, c, *s))[-1] == 1 else made


@block
def padding(r: Random, n: int, c: int, *s: int) -> nn.Module:
    mode = r.choice(["constant", "constant", "reflect", "replicate", "circular"])
    amounts = []
    for size in reversed(s):
        most = {"reflect": size - 1, "circular": size}.get(mode, 4)
        least = -((size - 1) // 2) if mode == "constant" and r.random() < 0.4 else 0
        amounts += [r.randint(least, min(3, most)), r.randint(least, min(3, most))]
    value = r.choice([0.0, 1.5])
    return Block(lambda m, x: F.pad(x, amounts, mode, value if mode == "constant" else None))


@block
def pixel_shuffle(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    factor = r.choice([2, 2, 3])
    if len(s) != 2:
        return None
    if r.random() < 0.5 and not any(size % factor for size in s):
        return nn.PixelUnshuffle(factor)
    return nn.Sequential(conv(2, c, factor**2 * r.randint(1, 2)), nn.PixelShuffle(factor))


@block
def channel_shuffle(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    groups = divisor(r, c)
    return Block(lambda m, x: x.view(n, groups, c // groups, *s).transpose(1, 2).reshape(n, c, *s))


@block
def roll(r: Random, n: int, c: int, *s: int) -> nn.Module:
    dims = r.sample(range(1, len(s) + 2), r.randint(1, len(s)))
    shifts = [r.randint(-5, 5) for _ in dims]
    return Block(lambda m, x: x.roll(shifts, dims))


@block
def flip(r: Random, n: int, c: int, *s: int) -> nn.Module:
    dims = r.sample(range(len(s) + 2), r.randint(1, len(s)))
    return Block(lambda m, x: x.flip(dims))


@block
def slices(r: Random, n: int, c: int, *s: int) -> nn.Module:
    cuts = [slice(None), slice(None)]
    for size in s:
        start = r.randint(0, size // 2)
        cuts.append(
            r.choice([slice(None), slice(start, None), slice(start, r.randint(start + 1, size)), slice(start, None, 2)])
        )
    cut = tuple(cuts)
    return Block(lambda m, x: x[cut])


@block
def space_to_depth(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    """By strided slices, concatenated."""
    if any(size % 2 for size in s[-2:]) or len(s) < 2:
        return None
    parts = [(a, b) for a in (0, 1) for b in (0, 1)]
    return Block(
        lambda m, x: m.conv(torch.cat([x[..., a::2, b::2] for a, b in parts], 1)), conv=conv(len(s), 4 * c, r.randint(1, 6))
    )


@block
def gather_windows(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    """Windows as columns, a matrix product, and back."""
    if len(s) != 2:
        return None
    kernel = r.choice([1, 3])
    if r.random() < 0.5:
        return Block(
            lambda m, x: m.mix(F.unfold(x, kernel, padding=kernel // 2).transpose(1, 2)).transpose(1, 2).unflatten(2, s),
            mix=nn.Linear(c * kernel**2, r.randint(1, 5)),
        )
    return Block(lambda m, x: F.fold(m.mix(F.unfold(x, 3, padding=1).mT).mT, s, 3, padding=1), mix=nn.Linear(c * 9, c * 9))


@block
def sampling(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    if len(s) != 2:
        return None
    mode, edges, corners = r.choice(["bilinear", "nearest"]), r.choice(["zeros", "border", "reflection"]), r.random() < 0.5
    size = [n, c, *(r.choice([old, r.randint(1, 9)]) for old in s)]
    return Block(
        lambda m, x: F.grid_sample(
            x, F.affine_grid(m.matrix.expand(n, 2, 3), size, align_corners=corners), mode, edges, align_corners=corners
        ),
        matrix=nn.Parameter(torch.eye(2, 3) + 0.1 * torch.randn(2, 3)),
    )


@block
def repeated(r: Random, n: int, c: int, *s: int) -> nn.Module:
    dim = r.randint(1, len(s) + 1)
    if r.random() < 0.5:
        return Block(lambda m, x: x.repeat_interleave(2, dim))
    times = [2 if d == dim else 1 for d in range(len(s) + 2)]
    return Block(lambda m, x: x.repeat(times))


@block
def written_slice(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """A slice that is written to, in a copy."""
    dim = r.randint(1, len(s) + 1)
    size = (c, *s)[dim - 1]
    start = r.randint(0, size - 1)
    cut = (*[slice(None)] * dim, slice(start, r.randint(start + 1, size)))
    kind = r.choice(["fill", "scale", "set"])

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        if kind == "fill":
            y[cut] = 0.5
        elif kind == "scale":
            y[cut] *= m.factor
        else:
            y[cut] = x.flip(dim)[cut] + m.factor
        return y

    return Block(forward, factor=parameter(1))
