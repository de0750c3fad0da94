"""Blocks that hold others, and the heads at the end of a network."""

from __future__ import annotations

from math import prod
from random import Random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from random_networks.block import Block, conv, fitted, nested, of, shape_after, some


@nested
def residual(r: Random, n: int, c: int, *s: int) -> nn.Module:
    body = fitted(some(r, (n, c, *s)), (n, c, *s), (n, c, *s))
    if r.random() < 0.5:
        return Block(lambda m, x: x + m.body(x), body=body)
    return Block(lambda m, x: F.relu_(m.body(x) + x), body=body)


@nested
def branches(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """Two branches, concatenated along the channels, or along space."""
    first, second = some(r, (n, c, *s)), some(r, (n, c, *s))
    shape = shape_after(first, (n, c, *s))
    if r.random() < 0.6:
        second = fitted(second, (n, c, *s), (n, shape_after(second, (n, c, *s))[1], *shape[2:]))
        return Block(lambda m, x: torch.cat([m.first(x), m.second(x)], 1), first=first, second=second)
    dim, second = r.randint(2, len(s) + 1), fitted(second, (n, c, *s), shape)
    return Block(lambda m, x: torch.cat([m.first(x), m.second(x)], dim), first=first, second=second)


@nested
def split_channels(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    """Part of the channels goes through other blocks."""
    if c < 2:
        return None
    kept = r.randint(1, c - 1)
    body = fitted(some(r, (n, c - kept, *s)), (n, c - kept, *s), (n, c, *s))

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        a, b = x.split([kept, c - kept], 1)
        return torch.cat([a, m.body(b)], 1)

    return Block(forward, body=body)


@nested
def checkpointed(r: Random, n: int, c: int, *s: int) -> nn.Module:
    reentrant = r.random() < 0.3
    return Block(lambda m, x: checkpoint(m.body, x, use_reentrant=reentrant), body=some(r, (n, c, *s)))


@nested
def down_and_up(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    """To half the size, through blocks, and up again to the size of what was, which is joined."""
    if min(s) < 4:
        return None
    down = conv(len(s), c, c, 3, stride=2, padding=1)
    shape = shape_after(down, (n, c, *s))
    body = some(r, shape)
    up = of("ConvTranspose", len(s))(shape_after(body, shape)[1], c, 2, stride=2)

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        y = F.interpolate(m.up(m.body(m.down(x))), x.shape[2:])
        return torch.cat([x, y], 1)

    return Block(forward, down=down, body=body, up=up)


@nested
def twice(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """The same blocks, with the same parameters, used twice."""
    body = fitted(some(r, (n, c, *s)), (n, c, *s), (n, c, *s))
    return Block(lambda m, x: m.body(0.5 * torch.tanh(m.body(x))), body=body)


@nested
def weighted_branches(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """Branches stacked and summed with weights that a softmax makes."""
    bodies = [fitted(some(r, (n, c, *s)), (n, c, *s), (n, c, *s)) for _ in range(2)]

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        stacked = torch.stack([body(x) for body in m.bodies])
        weights = m.weights.softmax(0).view(2, *[1] * x.ndim)
        return (stacked * weights).sum(0)

    return Block(forward, bodies=nn.ModuleList(bodies), weights=nn.Parameter(torch.zeros(2)))


@nested
def without_gradient(r: Random, n: int, c: int, *s: int) -> nn.Module:
    body = fitted(some(r, (n, c, *s)), (n, c, *s), (n, c, *s))
    return Block(lambda m, x: x + m.body(x.detach()) * x.sigmoid(), body=body)


def head(r: Random, shape: tuple[int, ...]) -> nn.Module | None:
    """What comes last: most often nothing."""
    _, c, *s = shape
    pool = of("AdaptiveAvgPool", len(s))
    return r.choice([
        None, None, None, None,
        nn.Sequential(pool(1), nn.Flatten(), nn.Linear(c, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(c * prod(s), 4), nn.ReLU(inplace=True), nn.Linear(4, 3)),
        nn.Sequential(pool(2), nn.Flatten(), nn.Linear(c * 2 ** len(s), 4), nn.ReLU(inplace=True), nn.Linear(4, 3)),
        Block(lambda m, x: m.linear(x.flatten(2).mean(2)), linear=nn.Linear(c, 2)),
        Block(lambda m, x: m.linear(x.flatten(2).amax(2)).log_softmax(1), linear=nn.Linear(c, 2)),
    ])  # fmt: skip
