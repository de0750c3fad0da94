"""as_strided, where it says what slices and selections would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from torchhalo.ops.inplace import View
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, stale_views

aten = torch.ops.aten


@handlers.register(
    aten.as_strided.default,
    traffic="that of the slices and selections that it stands for",
    limits="raises where the strides are not those of slices and selections of the tensor; autograd gathers its gradient",
)
def as_strided(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.as_strided``."""
    input, size, stride, offset = handlers.bind(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input, size, stride, offset)
    whole = dtensors.local(input)
    if not any(isinstance(p, Shard) for p in input.placements) and whole.stride() == input.stride():
        return dtensors.wrap(op(whole, size, stride, offset), input.device_mesh, input.placements, result)
    plan = _decoded(input.shape, input.stride(), size, stride, offset or 0)
    if plan is None:
        raise NotImplementedError(
            f"as_strided: size (={tuple(size)}), stride (={tuple(stride)}) and storage_offset (={offset or 0}) are no slices "
            f"and selections of a sharded tensor of shape {tuple(input.shape)} and stride {input.stride()}: use these instead"
        )
    out = input
    for dim, (first, count, step) in enumerate(plan[0]):
        if (first, count, step) != (0, input.shape[dim], 1):
            out = out[(*[slice(None)] * dim, slice(first, first + count * step, step))]
    used = [dim for dim in plan[1] if dim is not None]
    for dim in reversed(range(input.ndim)):
        out = out if dim in used else out.select(dim, 0)
    left = sorted(used)
    out = out.permute([left.index(dim) for dim in used])
    for place, shown in enumerate(plan[1]):
        out = out if shown is not None else out.unsqueeze(place)
    final = dtensors.wrap(dtensors.local(out), out.device_mesh, out.placements, result)
    return final if stale_views.get_origin(out) is None else stale_views.set_origin(final, View(out), out)


def _decoded(
    shape: Sequence[int], strides: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int
) -> tuple[list[tuple[int, int, int]], list[int | None]] | None:
    """For each dim of the tensor its first element, how many and which step; for each of the result, the dim that it shows.

    >>> _decoded((4, 6), (6, 1), (2, 3), (6, 1), 8)  # x[1:3, 2:5]
    ([(1, 2, 1), (2, 3, 1)], [0, 1])
    """
    plan = [(0, 1, 1)] * len(shape)
    long = sorted((dim for dim, n in enumerate(shape) if n > 1), key=lambda dim: -strides[dim])
    for dim in long:
        if strides[dim] == 0:
            return None
        first, offset = divmod(offset, strides[dim])
        plan[dim] = (first, 1, 1)
    free: list[int] = list(long)
    shows: list[int | None] = []
    for n, s in zip(size, stride, strict=True):
        found: int | None = None
        if n != 1:
            fits = [d for d in free if s and s % strides[d] == 0 and plan[d][0] + (n - 1) * (s // strides[d]) < shape[d]]
            if not fits:
                return None
            dim = fits[0]
            plan[dim] = (plan[dim][0], n, s // strides[dim])
            free.remove(dim)
            found = dim
        shows.append(found)
    if offset or any(first >= shape[dim] for dim, (first, _, _) in enumerate(plan)):
        return None
    return plan, shows


@handlers.register(aten.as_strided_.default, traffic="nothing", limits="raises unless it changes nothing")
def as_strided_(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.as_strided_``: only where the tensor already has these strides."""
    input, size, stride, offset = handlers.bind(op, args, kwargs)
    long = [dim for dim, n in enumerate(input.shape) if n > 1]
    if tuple(size) == tuple(input.shape) and all(input.stride(dim) == stride[dim] for dim in long) and not offset:
        return input
    raise NotImplementedError(
        f"as_strided_: size (={tuple(size)}), stride (={tuple(stride)}) and storage_offset (={offset or 0}) would change a "
        f"sharded tensor of shape {tuple(input.shape)} and stride {input.stride()}: use slices, or as_strided"
    )
