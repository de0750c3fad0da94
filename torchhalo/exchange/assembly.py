"""Put a region together from a shard and the pieces that a rank received."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchhalo.exchange.plan import Exchange, Index, Plan, Recipe, index, overlap
from torchhalo.geometry import Box, Grid, boxes


def recipe(exchange: Exchange, plan: Plan, region: Box | Grid) -> Recipe:
    """How to put together ``region``: ``plan.exact``, or a box, which may reach beyond the tensor."""
    if region not in plan.recipes:
        plan.recipes[region] = _recipe(exchange, plan, region)
    return plan.recipes[region]


def _recipe(exchange: Exchange, plan: Plan, region: Box | Grid) -> Recipe:
    kept = common(plan.owned, region)
    landed = [(number, box, _shared(box, region)) for number, box in enumerate(plan.receives)]
    landed = [(number, box, part) for number, box, part in landed if part.size]
    parts = [*kept, *(part for _, _, part in landed)]
    whole = sum(box.size for box in parts) == region.size
    return Recipe(
        region.shape,
        tuple((index(exchange, box, region), index(exchange, box, plan.owned)) for box in kept),
        tuple(
            (index(exchange, part, region), number, None if part == box else index(exchange, part, as_grid(box)))
            for number, box, part in landed
        ),
        region == plan.owned and not landed,
        whole,
        _line(exchange, plan, region, kept, landed) if whole and isinstance(region, Box) else None,
    )


def _line(
    exchange: Exchange, plan: Plan, region: Box, kept: Sequence[Box], landed: Sequence[tuple[int, Box, Box]]
) -> tuple[int, tuple[Index | int, ...]] | None:
    parts: list[tuple[Box, Index | int]] = [(box, index(exchange, box, plan.owned)) for box in kept]
    parts += [(part, number) for number, box, part in landed if part == box]
    if not parts or len(parts) < len(kept) + len(landed):
        return None
    for at, dim in enumerate(exchange.dims):
        if any(box.spans[at].step > 1 for box, _ in parts):
            continue
        if all(box.spans[:at] + box.spans[at + 1 :] == region.spans[:at] + region.spans[at + 1 :] for box, _ in parts):
            return dim, tuple(part for _, part in sorted(parts, key=lambda part: part[0].spans[at].start))
    return None


def assemble(
    shard: torch.Tensor,
    pieces: Sequence[torch.Tensor],
    dims: Sequence[int],
    recipe: Recipe,
    fill: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A region, from the shard and what `received` gave, on one rank.

    Args:
        dims: The exchange's.
        fill: The value of what lies outside the tensor, or is not needed.
        out: Where to put it; if not given, in a new tensor, or, where the region is the shard, nowhere.
    """
    if recipe.untouched and out is None:
        return shard
    if recipe.line is not None:
        dim, parts = recipe.line
        return torch.cat([part_of(shard, pieces, part) for part in parts], dim, out=out)
    if out is None:
        out = empty(shard, resized(shard.shape, dims, recipe.region))
    if not recipe.whole:
        out.fill_(fill)
    for target, source in recipe.own:
        out[target].copy_(shard[source])
    for target, number, cut in recipe.landed:
        out[target].copy_(pieces[number] if cut is None else pieces[number][cut])
    return out


def part_of(shard: torch.Tensor, pieces: Sequence[torch.Tensor], part: Index | int) -> torch.Tensor:
    """A part that `Recipe.line` names."""
    return pieces[part] if isinstance(part, int) else shard[part]


def resized(shape: Sequence[int], dims: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """``shape`` with other sizes along ``dims``."""
    out = list(shape)
    for dim, size in zip(dims, sizes, strict=True):
        out[dim] = size
    return out


def common(owned: Box, region: Box | Grid) -> tuple[Box, ...]:
    """What a rank has itself of a region."""
    if isinstance(region, Grid):
        return boxes(overlap(runs, span) for runs, span in zip(region.runs, owned.spans, strict=True))
    own = owned & region
    return (own,) if own.size else ()


def as_grid(box: Box) -> Grid:
    return Grid(tuple((span,) for span in box.spans))


def _shared(box: Box, region: Box | Grid) -> Box:
    """What of ``box`` lies in the region; a grid holds all that a rank receives."""
    return box if isinstance(region, Grid) else box & region


def empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """An uninitialised tensor of ``shape`` whose dims lie in memory as those of ``like``."""
    order = sorted(range(like.ndim), key=like.stride, reverse=True)
    dense = like.new_empty([shape[dim] for dim in order])
    return dense.permute([order.index(dim) for dim in range(like.ndim)])
