"""What one rank sees of a sharded tensor: its shard at once, the rest when the halo has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchhalo.exchange.assembly import assemble, empty, part_of, recipe, resized
from torchhalo.exchange.memory import dense, memory_order, strides
from torchhalo.exchange.plan import Exchange, Index, Plan, Recipe
from torchhalo.exchange.transfer import group_places, received, start
from torchhalo.geometry import Box, Grid
from torchhalo.torch_internals import collectives, process_groups, simulation, tracing
from torchhalo.torch_internals.tracing import depend_on


class Source:
    """What one rank sees of a sharded tensor: its shard at once, the rest of what it needs when the halo has come."""

    def __init__(
        self,
        shard: torch.Tensor,
        halo: torch.Tensor | None,
        exchange: Exchange,
        plan: Plan,
        format: torch.memory_format,
        fill: float,
    ) -> None:
        self.shard, self.exchange, self.plan = shard, exchange, plan
        self._halo, self._format, self._order, self._fill = halo, format, memory_order(format, shard.ndim), fill
        self._pieces: list[torch.Tensor] | None = None
        self.used = False

    def pieces(self) -> list[torch.Tensor]:
        """What the rank received, one tensor for each of ``plan.receives``."""
        if self._pieces is None:
            self._pieces = received(self._halo, self.shard, self.exchange, self.plan, self._order)
        return self._pieces

    def over(self, recipe: Recipe) -> torch.Tensor:
        """The tensor over a region, filled up where that reaches beyond it; the shard itself where that is all."""
        self.used |= bool(recipe.landed)
        return assemble(self.shard, self.pieces() if recipe.landed else (), self.exchange.dims, recipe, self._fill)

    def stacked(self, recipes: Sequence[Recipe]) -> torch.Tensor:
        """Regions of one shape, one behind another along the batch, in memory that may be written to."""
        shard, dims = self.shard, self.exchange.dims
        if len(recipes) == 1:
            region = self.over(recipes[0])
            return region.clone() if region is shard else region
        self.used |= any(recipe.landed for recipe in recipes)
        shape = resized(shard.shape, dims, recipes[0].region)
        lines = [recipe.line for recipe in recipes if recipe.line is not None]
        order = self._order or range(shard.ndim)
        if len(lines) == len(recipes) and len({dim for dim, _ in lines}) == 1 and not tracing.is_traced(shard):
            dim = lines[0][0]
            if all(shard.shape[outer] == 1 for outer in order[: order.index(dim)]):
                # The regions lie one behind another in memory too: one launch puts them there.
                parts = [part_of(shard, self.pieces(), part) for _, line in lines for part in line]
                line = [len(recipes) * size if d == dim else size for d, size in enumerate(shape)]
                # Into memory of ours: left to itself, torch looks at the strides of the parts to choose a memory format.
                out = empty(shard, [len(recipes), *shape[1:]])
                torch.cat(parts, dim, out=out.as_strided(line, strides(line, self._format)))
                return out
        out = empty(shard, [len(recipes) * shape[0], *shape[1:]])
        for each, part in zip(recipes, out.chunk(len(recipes)), strict=True):
            assemble(shard, self.pieces() if each.landed else (), dims, each, self._fill, part)
        return out

    def held(self, recipe: Recipe) -> torch.Tensor:
        """The part of the shard that a recipe is made of, which has nothing else, as a view."""
        (cut,) = (cut for _, cut in recipe.own)
        return self.shard if recipe.untouched else self.shard[cut]

    def region(self, region: Box | Grid) -> torch.Tensor:
        """As `over`, for a caller that does not keep the recipe."""
        return self.over(recipe(self.exchange, self.plan, region))


def run(
    kernel: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    shard: torch.Tensor,
    exchange: Exchange,
    mesh: DeviceMesh,
    *others: torch.Tensor | None,
    format: torch.memory_format = torch.contiguous_format,
    fill: float = 0.0,
) -> Any:
    """Start the exchange and compute on each rank what it owns of the target.

    Args:
        kernel: Called with a `Source`, the rank's coordinate and ``others``, all of one rank. What it does before it asks the
            source for more than the shard overlaps with the exchange. It returns a tensor or a flat tuple of tensors.
        shard: What this rank holds of the exchange's source.
        others: Tensors that the kernel also wants.
        format: The memory format of the whole source, and of the shard.
        fill: The value of what lies outside the source.
    """
    order = memory_order(format, shard.ndim)
    halo = start(shard, exchange, mesh, order)
    places = group_places(exchange, mesh)

    def on_rank(
        shard: torch.Tensor,
        halo: torch.Tensor | None,
        others: Sequence[torch.Tensor | None],
        coordinate: tuple[int, ...],
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        source = Source(dense(shard, format), halo, exchange, exchange.plan(coordinate, places), format, fill)
        result = kernel(source, coordinate, *others)
        if halo is None:
            return result
        source.pieces()  # also where nobody asked: torch keeps the state of an exchange until it is waited for
        if source.used or not tracing.is_traced(halo):
            return result
        halo = collectives.wait(halo)
        if isinstance(result, torch.Tensor):
            return depend_on(result, halo)
        smallest = min(result, key=torch.Tensor.numel)
        return tuple(depend_on(tensor, halo) if tensor is smallest else tensor for tensor in result)

    return simulation.per_rank(on_rank, shard, halo, others, process_groups.coordinate(mesh))


def stacked_view(tensor: torch.Tensor, cuts: Sequence[Index]) -> torch.Tensor | None:
    """The cuts of ``tensor``, of one shape, one behind another along the batch, as a view of it; None where there is none.

    So two strips are written in one launch.
    """
    if len(cuts) != 2 or tensor.shape[0] != 1 or tracing.is_traced(tensor):
        return None
    first, second = (tensor[cut] for cut in cuts)
    step = second.storage_offset() - first.storage_offset()
    if step < 0 or first.shape != second.shape:
        return None
    return tensor.as_strided((2, *first.shape[1:]), (step, *first.stride()[1:]), first.storage_offset())
