"""Counts: histograms and different values. Each rank counts its own, and the counts are added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchhalo.exchange.broadcasting import moved
from torchhalo.exchange.gather_dim import padded
from torchhalo.exchange.rows import must_run
from torchhalo.torch_internals import collectives, dtensors, fake_tensors, handlers, process_groups, redistribution

aten = torch.ops.aten

TRACED = "the shape of the result depends on values: torch.compile cannot trace it"


def _cut(input: DTensor) -> list[int]:
    """The axes along which ranks have different elements."""
    return [axis for axis, p in enumerate(input.placements) if isinstance(p, Shard)]


def _everywhere(value: torch.Tensor, like: DTensor) -> DTensor:
    """What every rank knows alike."""
    return dtensors.wrap(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, dtensors.meta(value))


def _must_be_inside(name: str, input: DTensor) -> None:
    if process_groups.coordinate(input.device_mesh) is None:
        raise NotImplementedError(f"{name}: a rank outside of the mesh cannot know the shape of the result")


def _ends(input: DTensor, low: int, high: int) -> tuple[int, int]:
    """The smallest and the largest integer, at most ``low`` and at least ``high``: on all ranks alike."""
    shard = dtensors.local(input)
    own = torch.stack(shard.to(torch.int64).aminmax()) if shard.numel() else torch.tensor([low, high], device=shard.device)
    found = collectives.all_gather(own, input.device_mesh, _cut(input))
    return min(low, int(found[:, 0].min())), max(high, int(found[:, 1].max()))


@handlers.register(aten.bincount.default, traffic="two numbers from every rank, and the counts, added up", limits=TRACED)
def bincount(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.bincount``: ``0 2 2 1 2 -> 1 1 3``."""
    input, weights, minlength = handlers.bind(op, args, kwargs)
    input, weights = dtensors.as_dtensors("bincount", self=input, weights=weights)
    must_run("bincount")
    _must_be_inside("bincount", input)
    if input.ndim != 1 or input.dtype.is_floating_point or (weights is not None and weights.shape != input.shape):
        return op(*(t if t is None else torch.empty(t.shape, dtype=t.dtype) for t in (input, weights)), minlength)
    input = redistribution.reduce_partial(input)
    low, high = _ends(input, 0, minlength - 1)
    if low < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    local = None if weights is None else dtensors.local(moved(weights, input.placements))
    counts = op(dtensors.local(input), local, high + 1)
    return _everywhere(collectives.all_reduce(counts, input.device_mesh, _cut(input)), input)


@handlers.register(aten.histc.default, traffic="the counts, added up; without `min` and `max`, two numbers from every rank")
def histc(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.histc``."""
    input, bins, low, high = handlers.bind(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input, bins, low, high)
    input = redistribution.reduce_partial(input)
    if process_groups.coordinate(input.device_mesh) is None:
        return _everywhere(dtensors.local(input).new_empty(result.shape), input)
    low, high = _range(input, low, high)
    counts = op(dtensors.local(input), bins, low, high)
    return _everywhere(collectives.all_reduce(counts, input.device_mesh, _cut(input)), input)


def _range(input: DTensor, low: Any, high: Any) -> tuple[Any, Any]:
    """The ends of a histogram, those of the values if none are given."""
    if low == high and input.numel():
        low, high = (float(end) for end in aten.aminmax(input))
    return (low - 1, high + 1) if low == high else (low, high)


@handlers.register(
    aten.histogram.bin_ct,
    aten.histogram.bins_tensor,
    traffic="the counts, added up; without `range`, two numbers from every rank",
)
def histogram(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    """Handler of ``aten.histogram``, counts and edges."""
    named = dict(zip((arg.name for arg in op._schema.arguments), handlers.bind(op, args, kwargs), strict=True))
    input, bins, weight = dtensors.as_dtensors(
        "histogram",
        self=named["self"],
        bins=named["bins"] if isinstance(named["bins"], torch.Tensor) else None,
        weight=named["weight"],
    )
    input = redistribution.reduce_partial(input)
    _must_be_inside("histogram", input)
    shards: list[Any] = [dtensors.local(input).flatten()]
    if bins is None:
        shards.append(named["bins"])
        if named["range"] is None:
            kwargs = {"range": [0.0, 1.0] if not input.numel() else list(_half(*map(float, aten.aminmax(input))))}
        else:
            kwargs = {"range": named["range"]}
    else:
        shards.append(dtensors.local(redistribution.whole(bins)))
        kwargs = {}
    if weight is not None:
        kwargs["weight"] = dtensors.local(moved(weight, input.placements)).flatten()
    counts, edges = op(*shards, **kwargs)
    counts = collectives.all_reduce(counts, input.device_mesh, _cut(input))
    if named["density"]:
        counts = counts / (counts.sum() * edges.diff())
    return _everywhere(counts, input), _everywhere(edges, input)


def _half(low: float, high: float) -> tuple[float, float]:
    return (low - 0.5, high + 0.5) if low == high else (low, high)


@handlers.register(
    aten._unique2.default,
    traffic="the different values of every rank, and how often it has them, to all ranks",
    limits=f"{TRACED}; every rank holds the different values of all ranks",
)
def unique(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor, DTensor]:
    """Handler of ``aten._unique2``, which is `torch.unique` without a dim."""
    input, _, return_inverse, return_counts = handlers.bind(op, args, kwargs)
    must_run("unique")
    _must_be_inside("unique", input)
    input, mesh = redistribution.reduce_partial(input), input.device_mesh
    values, inverse, counts = op(dtensors.local(input), True, True, True)
    found, often, first = _all_rows(input, values, counts)
    merged, where, _ = op(found, True, True, False)
    added = torch.zeros(len(merged), dtype=torch.int64, device=merged.device).index_add_(0, where, often)
    nothing = _everywhere(added.new_empty(0), input)
    if return_inverse:
        own = where[first : first + len(values)][inverse]
        shape = tuple(input.shape)
        stride = torch.empty(shape, device="meta").stride()
        indices = dtensors.wrap(own.contiguous(), mesh, input.placements, dtensors.Meta(shape, stride, torch.int64))
    return (
        _everywhere(merged, input),
        indices if return_inverse else nothing,
        _everywhere(added, input) if return_counts else nothing,
    )


def _all_rows(input: DTensor, *columns: torch.Tensor) -> tuple[Any, ...]:
    """Columns of one length on each rank, those of all ranks one after the other; and where this rank's begin."""
    mesh, axes = input.device_mesh, _cut(input)
    coordinate = process_groups.coordinate(mesh)
    assert coordinate is not None
    lengths = collectives.all_gather(torch.tensor(len(columns[0]), device=columns[0].device), mesh, axes).tolist()
    place = 0
    for axis in axes:
        place = place * mesh.size(axis) + coordinate[axis]
    gathered = [
        torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])
        for rows in (collectives.all_gather(padded(column, 0, max(lengths)), mesh, axes) for column in columns)
    ]
    return *gathered, sum(lengths[:place])


@handlers.register(aten._is_all_true.default, aten._is_any_true.default, traffic="one number from every rank")
def truth(op: handlers.Op, args: Sequence[Any], kwargs: dict[str, Any]) -> object:
    """Handler of the checks that `torch.distributions` makes of its arguments."""
    return (aten.all if op is aten._is_all_true.default else aten.any).default(*args)


handlers.register_composites(__name__, aten.is_nonzero.default, aten.item.default, traffic="that of reading one number")
