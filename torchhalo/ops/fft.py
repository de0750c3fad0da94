"""Fourier transforms: each rank transforms what it has along dims that are whole; a cut dim is made whole first.

Another dim is cut instead meanwhile, by one relayout, and a second one gives the result the placements of the input. Where no
other dim is long enough, as with images of one channel of which both dims are transformed, the dims take turns::

    rfft2, rows cut:    along rows, cut columns instead, along columns, cut rows again
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange import gathers
from torchhalo.exchange.layout import Layout, is_cut, layout
from torchhalo.exchange.relayout import relayout, with_placements
from torchhalo.torch_internals import caching, dtensors, fake_tensors, handlers, process_groups, redistribution, simulation
from torchhalo.torch_internals.tracing import is_traced
from torchhalo.torch_internals.transforms import cuda_strides

aten = torch.ops.aten

TRAFFIC = (
    "nothing along dims that are not cut; else what changes owner when another dim is cut instead, and again on the way back"
)
LIMITS = "gathers where no other dim has two elements"


@handlers.register(aten._fft_c2c.default, traffic=TRAFFIC, limits=LIMITS)
def c2c(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten._fft_c2c``, from complex to complex: the dims in any order."""
    input, dims, norm, forward = handlers.bind(op, args, kwargs)
    dims = sorted(dim % input.ndim for dim in dims)
    result = _result(op, input, dims, norm, forward)
    return _transformed(op, input, result, [dims], lambda dims: (op, dims, norm, forward))


@handlers.register(aten._fft_r2c.default, traffic=TRAFFIC, limits=LIMITS)
def r2c(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten._fft_r2c``: the last dim first, which makes complex numbers of real ones."""
    input, dims, norm, onesided = handlers.bind(op, args, kwargs)
    *others, last = _last_apart(dims, input.ndim)
    result = _result(op, input, [*others, last], norm, onesided)

    def call(dims: list[int]) -> tuple[Any, ...]:
        if last not in dims:
            return aten._fft_c2c.default, dims, norm, True
        return op, sorted(dims, key=last.__eq__), norm, onesided  # which halves the last one

    return _transformed(op, input, result, [[last], others], call)


@handlers.register(aten._fft_c2r.default, traffic=TRAFFIC, limits=LIMITS)
def c2r(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten._fft_c2r``: the last dim last, which makes real numbers of complex ones."""
    input, dims, norm, size = handlers.bind(op, args, kwargs)
    *others, last = _last_apart(dims, input.ndim)
    result = _result(op, input, [*others, last], norm, size)

    def call(dims: list[int]) -> tuple[Any, ...]:
        return (op, dims, norm, size) if last in dims else (aten._fft_c2c.default, dims, norm, False)

    return _transformed(op, input, result, [others, [last]], call)


def _result(op: handlers.Op, input: DTensor, dims: list[int], *rest: Any) -> dtensors.Meta:
    """What plain torch returns; fake tensors know the strides of a CPU's kernels alone."""
    signature = dtensors.signature(input)
    (result,) = fake_tensors.plain_result(op, replace(signature, device="cpu"), dims, *rest)
    if signature.device != "cuda":
        return result  # type: ignore[no-any-return]
    shape, stride, _ = signature.meta
    return result._replace(stride=cuda_strides(op, shape, stride, dims, result.shape))  # type: ignore[no-any-return]


def _last_apart(dims: Sequence[int], ndim: int) -> list[int]:
    """The last dim last and the others sorted: fake tensors of torch 2.11 raise if they are not."""
    *others, last = (dim % ndim for dim in dims)
    return [*sorted(others), last]


# DTensor would run the shards as they are.
handlers.register_composites(
    __name__,
    *(
        getattr(aten, f"fft_{inverse}{name}{ndim}").default
        for name in ("fft", "rfft", "hfft")
        for inverse in ("", "i")
        for ndim in ("", "2", "n")
    ),
    aten.fft_fftshift.default,
    aten.fft_ifftshift.default,
    traffic="that of the transforms, pads, slices and rolls that it is made of",
)


class Step(NamedTuple):
    """Give the tensor ``placements``, then transform it along ``dims``."""

    placements: tuple[Placement, ...]
    dims: tuple[int, ...]


def _transformed(
    op: handlers.Op,
    input: DTensor,
    result: dtensors.Meta,
    stages: Sequence[Sequence[int]],
    call: Callable[[list[int]], tuple[Any, ...]],
) -> DTensor:
    """``input``, transformed and placed as before.

    Args:
        stages: Dims that may be transformed in any order, after those of all stages before them.
        call: The op that transforms along some of the dims, and its arguments after the tensor.
    """
    mesh, home = input.device_mesh, redistribution.reduced_placements(input.placements)
    coordinate = process_groups.coordinate(mesh)
    if coordinate is None:
        return dtensors.wrap(dtensors.local(input).new_empty(0, dtype=result.dtype), mesh, home, result)
    shape = tuple(map(int, input.shape))
    steps = caching.cached_on_mesh(mesh, _steps, shape, result.shape, tuple(home), tuple(map(tuple, stages)))
    for step in steps:
        gathers.notice(gathers.Redistribution(op, shape, input.dtype, mesh, home, step.placements))
    tensor = redistribution.reduce_partial(input)
    for step in steps:
        tensor = with_placements(tensor, step.placements)
        each, *args = call(list(step.dims))
        (meta,) = fake_tensors.plain_result(each, tensor, *args)
        target = layout(meta.shape, mesh, step.placements)
        shard = simulation.per_rank(_on_shard, dtensors.local(tensor), each, args, target, meta.dtype, *coordinate)
        tensor = dtensors.wrap(shard, mesh, step.placements, meta)
    if tensor.placements != tuple(home):
        return relayout(tensor, result, home)
    if tensor.stride() != result.stride:  # where the dims took turns
        tensor = dtensors.wrap(_ordered(dtensors.local(tensor), result.stride), mesh, home, result)
    return tensor


def _on_shard(
    shard: torch.Tensor, op: handlers.Op, args: Sequence[Any], target: Layout, dtype: torch.dtype, *coordinate: int
) -> torch.Tensor:
    if not shard.numel():  # which not every library of transforms takes
        return shard.new_empty(target.owned(coordinate).shape, dtype=dtype)
    out = op(shard, *args)
    # torch 2.11 traces transforms with other strides than those of their kernels
    return out.clone(memory_format=torch.contiguous_format) if is_traced(shard) else out


def _ordered(shard: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A shard whose dims lie in memory as those of a whole tensor of ``stride``."""
    order = sorted(range(shard.ndim), key=lambda dim: stride[dim], reverse=True)
    return shard.permute(order).contiguous().permute([order.index(dim) for dim in range(shard.ndim)])


def _steps(
    mesh: DeviceMesh,
    before: tuple[int, ...],
    after: tuple[int, ...],
    placements: tuple[Placement, ...],
    stages: tuple[tuple[int, ...], ...],
) -> list[Step]:
    """The steps from a tensor of shape ``before`` to one of shape ``after``: all dims that are whole, then others."""
    steps: list[Step] = []
    left = stages
    while any(left):
        done = [dim for dim in range(len(before)) if not any(dim in stage for stage in left)]
        shape = [a if dim in done else b for dim, (b, a) in enumerate(zip(before, after, strict=True))]
        placements = placements if _ready(mesh, placements, left) else _instead(mesh, shape, placements, left)
        dims = _ready(mesh, placements, left)
        steps.append(Step(placements, dims))
        left = tuple(tuple(dim for dim in stage if dim not in dims) for stage in left)
    return steps


def _ready(mesh: DeviceMesh, placements: Sequence[Placement], stages: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The dims that can be transformed at once: those that are whole, if all dims of the stages before are."""
    found: list[int] = []
    for stage in stages:
        whole = [dim for dim in stage if not is_cut(mesh, placements, dim)]
        found += whole
        if len(whole) < len(stage):
            break
    return tuple(found)


def _instead(
    mesh: DeviceMesh, shape: Sequence[int], placements: Sequence[Placement], stages: Sequence[Sequence[int]]
) -> tuple[Placement, ...]:
    """How else to cut a tensor of ``shape``, so that dims are ready: the largest shard as small as can be, then many dims."""
    dims = [Shard(dim) for dim, size in enumerate(shape) if size > 1]
    found = product(*([*dims, Replicate()] if isinstance(p, Shard) else [p] for p in placements))

    def cost(each: Sequence[Placement]) -> tuple[int, ...]:
        largest = prod(layout(shape, mesh, each).owned((0,) * mesh.ndim).shape)
        return largest, -len(_ready(mesh, each, stages)), sum(p != q for p, q in zip(each, placements, strict=True))

    return min((each for each in found if _ready(mesh, each, stages)), key=cost)
