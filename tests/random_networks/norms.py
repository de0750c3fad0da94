"""Blocks that normalize."""

from __future__ import annotations

from math import prod
from random import Random

import torch
from torch import nn
from torch.nn import functional as F

from random_networks.block import Block, Norm, block, divisor, of, parameter


@block
def batch_norm(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    if n * prod(s) < 4:
        return None
    options = {"affine": r.random() < 0.8, "track_running_stats": r.random() < 0.8, "momentum": r.choice([0.1, 0.5, None])}
    if r.random() < 0.2:
        return Block(lambda m, x: m.norm(x.flatten(2)).unflatten(2, s), norm=Norm(nn.BatchNorm1d(c, **options)))
    return Norm(of("BatchNorm", len(s))(c, **options))


@block
def group_norm(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    groups = divisor(r, c)
    return Norm(nn.GroupNorm(groups, c, affine=r.random() < 0.8)) if c // groups * prod(s) > 3 else None


@block
def instance_norm(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    options = {"affine": r.random() < 0.5, "track_running_stats": r.random() < 0.3}
    return Norm(of("InstanceNorm", len(s))(c, **options)) if prod(s) > 3 else None


@block
def channels_last_norm(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    norm = r.choice([nn.LayerNorm, nn.LayerNorm, nn.RMSNorm])(c)
    if c == 1:
        return None
    if r.random() < 0.3:
        return Block(lambda m, x: m.norm(x.movedim(1, -1).contiguous()).movedim(-1, 1).contiguous(), norm=norm)
    return Block(lambda m, x: m.norm(x.movedim(1, -1)).movedim(-1, 1), norm=norm)


@block
def norm_of_sample(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    over = r.randint(1, len(s) + 1)
    shape = (n, c, *s)[-over:]
    return nn.LayerNorm(shape, elementwise_affine=r.random() < 0.6) if prod(shape) > 3 else None


@block
def local_response_norm(r: Random, n: int, c: int, *s: int) -> nn.Module:
    norm = nn.LocalResponseNorm(r.randint(1, 4), alpha=0.1)
    return Block(lambda m, x: m.norm(x.contiguous()), norm=norm)  # of volumes it makes a view


@block
def response_norm(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """Norms over space, compared between the channels."""
    dims = tuple(range(2, len(s) + 2))

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        size = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
        return x * (size / (size.mean(1, keepdim=True) + 1e-3)) * m.factor + x

    return Block(forward, factor=parameter(c, *[1] * len(s)))


@block
def unit_vectors(r: Random, n: int, c: int, *s: int) -> nn.Module:
    dim, power = r.randint(1, len(s) + 1), r.choice([2.0, 1.0])
    return Block(lambda m, x: F.normalize(x, power, dim, eps=1e-3))


@block
def standardized(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    dims = r.sample(range(1, len(s) + 2), r.randint(1, len(s)))
    if prod((n, c, *s)[dim] for dim in dims) < 3:
        return None
    if r.random() < 0.5:
        return Block(lambda m, x: (x - x.mean(dims, keepdim=True)) / (x.var(dims, keepdim=True) + 1e-2).sqrt())
    return Block(lambda m, x: x - x.mean(dims, keepdim=True) + x.std(dims, keepdim=True).clamp_min(0.1))
