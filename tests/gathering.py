"""A rule for an op that gathers what is cut along its dim, for torch releases whose DTensor has none.

Tests of gathers need such an op, which is not torchhalo's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from torchhalo.torch_internals.handlers import has_rule

MEDIAN = torch.ops.aten.median.dim


def rule(x: Any, dim: int, keepdim: bool = False) -> list[Any]:
    reduced, found = dim % x.ndim, [([Replicate()] * 2, [Replicate(), None, None])]
    for each in range(x.ndim):
        if each != reduced:
            left = Shard(each if keepdim or each < reduced else each - 1)
            found.append(([left, left], [Shard(each), None, None]))
    return found


if not has_rule(MEDIAN):
    register_sharding(MEDIAN)(rule)
