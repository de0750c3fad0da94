"""What each layer of a model will keep, send and need on a mesh, before anything runs: on shapes alone, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor import Shard

from torchhalo.parallel.arrays import placements_for
from torchhalo.tools.explanation import Explanation
from torchhalo.tools.fake_run import observe_rank
from torchhalo.tools.observe import named
from torchhalo.tools.text import size_text

#: Dense bfloat16 operations per second, and bytes per second to other devices of the host, by the makers' data sheets.
DEVICES = {
    "a100": (312e12, 300e9),
    "h100": (989e12, 450e9),
    "h200": (989e12, 450e9),
    "b200": (2250e12, 900e9),
    "mi300x": (1307e12, 448e9),
}


def explain(
    model: Any,
    sample: Sequence[Any],
    mesh: Sequence[int],
    *,
    dims: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    train: bool = False,
    every_rank: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Explanation:
    """See what sharding does to a model before it runs, on a machine that could never run it.

    The model runs through torchhalo as it would on each rank, on tensors that have shapes and no values: nothing is computed,
    no process is started, no memory is taken, and the bytes are those that a real run sends.

    Args:
        model: A module, a function that makes one, or the name of such a function as ``package.module:function``.
        sample: The shape of the input, or one for each input. A tensor may stand for a shape: if it requires a gradient, so
            does the input; if it is one integer, such as a time step, the input has its value. On the meta device it takes no
            memory.
        mesh: The shape of the mesh, such as ``(2, 4)``.
        dims: Along which dim each axis of the mesh cuts the inputs; chosen as by `parallelize` if not given.
        train: In training mode, with a backward.
        every_rank: Look at all ranks; else at those that differ: at the ends of each axis, and one between.
        progress: Told what is being done.

    Example:
        >>> print(torchhalo.explain(torch.nn.Conv2d(3, 8, 3, padding=1), (1, 3, 4096, 4096), (4,)).busiest.total("sent"))
        98304
    """
    inputs = inputs_of(sample, dtype)
    cut = _cut(inputs, len(mesh), dims)
    made = named(model) if isinstance(model, str) else model
    ends = [range(size) if every_rank else sorted({0, size // 2, size - 1}) for size in mesh]
    ranks = []
    for place in product(*ends):
        progress(f"rank {place} of {size_text(mesh)}")
        ranks.append(observe_rank(made, inputs, tuple(mesh), place, cut, dtype, train))
    progress("one device")
    alone = observe_rank(made, inputs, (1,), (0,), cut[:1], dtype, train).peak
    name = model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)
    shapes = [tuple(x.shape) for x in inputs]
    return Explanation(name, shapes, tuple(mesh), cut, str(dtype).removeprefix("torch."), train, ranks, alone)


def smallest_mesh(
    model: Any,
    sample: Sequence[Any],
    memory: int,
    axes: int = 1,
    *,
    dims: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    train: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[int, ...] | None:
    """The first mesh, of those made by doubling an axis along which shards are longest, on which no rank needs more.

    Args:
        memory: In bytes, for what `Rank.peak` counts.
        axes: How many axes the mesh has. The other arguments are those of `explain`.

    Returns:
        Its shape; None if even the largest that was tried, of 4096 ranks, does not do.

    Example:
        >>> smallest_mesh(torch.nn.Conv2d(3, 64, 3, padding=1), (1, 3, 4096, 4096), 2 * 2**30)
        (4,)
    """
    inputs = inputs_of(sample, dtype)
    cut = _cut(inputs, axes, dims)
    made = named(model) if isinstance(model, str) else model
    mesh = [1] * axes
    while math.prod(mesh) <= 4096:
        progress(f"a mesh of {size_text(mesh)}")
        if observe_rank(made, inputs, tuple(mesh), (0,) * axes, cut, dtype, train).peak <= memory:
            return tuple(mesh)
        mesh[max(range(axes), key=lambda axis: inputs[0].shape[cut[axis]] / mesh[axis])] *= 2
    return None


def inputs_of(sample: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensors that were given, and for each shape one that takes no memory."""
    given = [sample] if isinstance(sample, torch.Tensor) or isinstance(sample[0], int) else sample
    return [x if isinstance(x, torch.Tensor) else torch.empty(tuple(x), dtype=dtype, device="meta") for x in given]


def _cut(inputs: list[torch.Tensor], axes: int, dims: int | Sequence[int] | None) -> tuple[int, ...]:
    return tuple(placement.dim for placement in placements_for(inputs[0].shape, axes, dims) if isinstance(placement, Shard))
