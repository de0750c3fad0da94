"""One op of each family on shards that lie in memory in unusual ways, parameters and gradients too: the values of one process.

The random tests of norms, reductions, indices, transforms and local kernels draw such memory as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from harness import assert_parity, mesh_of
from memory import MEMORIES
from torch.distributed.tensor import Replicate, Shard

import torchhalo

Function = Callable[..., torch.Tensor]
SHAPE = (1, 4, 7, 6)


def unpool(x: torch.Tensor) -> torch.Tensor:
    y, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y, indices, 2, output_size=x.shape[2:])


def attend(x: torch.Tensor) -> torch.Tensor:
    tokens = x.flatten(2).transpose(1, 2).unsqueeze(1)
    return F.scaled_dot_product_attention(tokens, 2 * tokens, tokens)


def fill(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, :, 1:5, ::2] = 3.0
    y[:, 1:] *= 2
    return y


def mark(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x > 0.4, 0.5) + torch.where(x < 0, x, x.square())


#: By family: a function of x, and the shapes of its parameters.
FAMILIES: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(5, 4, 3, 3), (5,)]),
    "strided": (lambda x, w: F.conv2d(x, w, stride=2, dilation=2, padding=2), [(3, 4, 3, 3)]),
    "depthwise": (lambda x, w: F.conv2d(x, w, padding=2, groups=4), [(4, 1, 5, 5)]),
    "pointwise convolution": (F.conv2d, [(3, 4, 1, 1)]),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1), [(4, 3, 4, 4)]),
    "volume": (lambda x, w: F.conv3d(x.unsqueeze(0), w, padding=1), [(2, 1, 3, 3, 3)]),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, 1), []),
    "average pool": (lambda x: F.avg_pool2d(x, 3, 1, 1), []),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, (3, 4)), []),
    "unpool": (unpool, []),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2.0), []),
    "bilinear": (lambda x: F.interpolate(x, (9, 11), mode="bilinear"), []),
    "bicubic": (lambda x: F.interpolate(x, (5, 9), mode="bicubic", antialias=True), []),
    "reflect": (lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"), []),
    "circular": (lambda x: F.pad(x, (1, 2, 2, 1), mode="circular"), []),
    "constant": (lambda x: F.pad(x, (1, 2, 2, 1), value=2.0), []),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), []),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [(4,), (4,)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(4,), (4,)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), (4,), w, b), [(4,), (4,)]),
    "mean": (lambda x: x.mean((2, 3)), []),
    "variance": (lambda x: x.var((1, 2)), []),
    "extrema": (lambda x: x.amax(2) - x.amin((2, 3)).unsqueeze(-1), []),
    "softmax": (lambda x: x.softmax(2), []),
    "scan": (lambda x: x.cumsum(2), []),
    "slices": (lambda x: torch.cat([x[:, :, 2:], x[:, :, :3].flip(2), x[:, :, ::2]], 2), []),
    "roll": (lambda x: x.roll((2, 1), (2, 3)), []),
    "views": (lambda x: x.reshape(1, 2, 2, 42).transpose(1, 3).unflatten(1, (7, 6)), []),
    "matrix product": (lambda x, w: x.flatten(2).transpose(1, 2) @ w, [(4, 3)]),
    "linear": (lambda x, w, b: F.linear(x.movedim(1, -1), w, b), [(3, 4), (3,)]),
    "einsum": (lambda x, w: torch.einsum("nchw,cd->ndhw", x, w), [(4, 3)]),
    "attention": (attend, []),
    "sampling": (lambda x, t: F.grid_sample(x, F.affine_grid(t, (1, 4, 5, 6), False), align_corners=False), [(1, 2, 3)]),
    "index": (lambda x: x[:, :, torch.tensor([5, 0, 0, 3])], []),
    "table": (lambda x, t: x + t[torch.arange(7) % 3].view(7, 1), [(3,)]),
    "writes": (fill, []),
    "masks": (mark, []),
    "activation": (lambda x, w: F.hardswish(F.prelu(x, w)), [(4,)]),
    "distance": (lambda x, y: torch.cdist(x.flatten(2), y), [(1, 3, 42)]),
    "transform": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2, s=(7, 6)), []),
    "loss": (lambda x, y: F.mse_loss(x.sigmoid(), y), [SHAPE]),
    "entropy": (lambda x: F.cross_entropy(x, torch.arange(42).view(1, 7, 6) % 4), []),
    "weight norm": (lambda x, v, g: F.conv2d(x, torch._weight_norm(v, g, 0)), [(3, 4, 1, 1), (3, 1, 1, 1)]),
}


def check(name: str) -> None:
    function, parameters = FAMILIES[name]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in (SHAPE, *parameters)]
    placements = [[Shard(2)], *[[Replicate()] for _ in parameters]]
    usual, *others = MEMORIES.values()
    for memory in others:
        for kept in ([memory] * (len(tensors) + 1), [memory, *[usual] * len(tensors)], [*[usual] * len(tensors), memory]):
            with torchhalo.plain_as_replicated(), warnings.catch_warnings():
                warnings.simplefilter("ignore", torchhalo.GatherWarning)  # of grid_sample, and of indices in any order
                try:  # norms of an expanded tensor divide by the root of eps
                    assert_parity(function, tensors, mesh_of((2,)), placements, atol=1e-9, memory=kept)
                except Exception as error:
                    raise AssertionError(f"{name}, {kept}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("names", [list(FAMILIES)[start::4] for start in range(4)])
def test_any_memory(pool, names: list[str]) -> None:
    """On processes: simulated ranks cannot interpolate what is sliced out of a larger tensor."""
    for name in names:
        pool(2).run(check, name)
