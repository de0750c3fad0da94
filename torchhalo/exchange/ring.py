"""Blocks of tokens that go from rank to rank in a ring, for what every rank reads all of but need not hold at once.

At step 0 each rank holds its own block; at step 1 that of the rank before it, and so on. A rank passes on only what a rank
further on reads, so that nothing travels in vain, and its neighbour gets it while the rank itself computes on it. What is
worked out of a block, such as its gradient, goes straight home to its owner.

Ranks that own no block and read none are left out of the ring, but join its collectives: all ranks of a process group must.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchhalo.exchange.grids import OwnerLayout
from torchhalo.exchange.layout import Layout
from torchhalo.geometry import Span
from torchhalo.torch_internals import collectives, process_groups, simulation
from torchhalo.torch_internals.tracing import depend_on


class Step(NamedTuple):
    """What one rank holds at one step of the ring; ranks are named by their index along the axes.

    Attributes:
        owner: Whose block it holds.
        held: How many tokens of it have come, from the first on.
        read: How many of these its own queries see.
        passed: How many of these go on to ``after`` at the next step.
        arriving: How many tokens of the next block come from ``before`` at the next step.
        reader: Which rank holds this rank's own block now.
        owed: How many tokens of it that rank sees.
    """

    owner: int
    held: int
    read: int
    passed: int
    after: int
    arriving: int
    before: int
    reader: int
    owed: int


class Ring(NamedTuple):
    """What every rank knows: who owns which tokens, and who reads them.

    Attributes:
        queries, keys: The layouts of who reads and of what is read.
        dim: That of the tokens, in both.
        causal: Whether a query sees only the keys up to its own place.
    """

    queries: Layout | OwnerLayout
    keys: Layout | OwnerLayout
    dim: int
    causal: bool

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes over which blocks travel."""
        return self.keys.cuts[self.dim]

    @property
    def steps(self) -> int:
        """How many there are, on every rank."""
        return max(1, len(_members(self)))

    def block(self, owner: int) -> Span:
        """Where the tokens of a block are in the whole tensor."""
        return self.keys.parts(self.dim)[owner]

    def route(self, coordinate: Sequence[int]) -> tuple[Step, ...]:
        """What the rank at ``coordinate`` holds at each step."""
        return _route(self, tuple(coordinate))


def visible(queries: Span, keys: Span, causal: bool) -> int:
    """How many of ``keys``, from the first on, any of ``queries`` sees.

    >>> visible(Span(2, 4), Span(3, 6), causal=True)
    1
    """
    if not queries.size:
        return 0
    return max(0, min(keys.stop, queries.stop) - keys.start) if causal else keys.size


def _at(ring: Ring, coordinate: Sequence[int], index: int) -> tuple[int, ...]:
    """The rank with an ``index`` along the axes that is elsewhere at ``coordinate``."""
    found = list(coordinate)
    for axis in reversed(ring.axes):
        index, found[axis] = divmod(index, ring.keys.mesh_shape[axis])
    return tuple(found)


@lru_cache(maxsize=1024)
def _members(ring: Ring) -> tuple[int, ...]:
    """The ranks that own a block or read one, by index."""
    others = [range(n) if axis in ring.queries.cuts[ring.dim] else (0,) for axis, n in enumerate(ring.queries.mesh_shape)]

    def reads(index: int) -> bool:
        places = {_at(ring, place, index) for place in product(*others)}
        return any(ring.queries.owned(place).spans[ring.dim].size for place in places)

    return tuple(index for index, part in enumerate(ring.keys.parts(ring.dim)) if part.size or reads(index))


@lru_cache(maxsize=4096)
def _route(ring: Ring, coordinate: tuple[int, ...]) -> tuple[Step, ...]:
    members, own = _members(ring), ring.keys.part(ring.dim, coordinate)
    if own not in members:
        return (Step(own, 0, 0, 0, own, 0, own, own, 0),) * ring.steps
    count, place = len(members), members.index(own)

    def reads(reader: int, owner: int) -> int:
        queries = ring.queries.owned(_at(ring, coordinate, reader)).spans[ring.dim]
        return visible(queries, ring.block(owner), ring.causal)

    def reaches(owner: int, distance: int) -> int:
        """How many tokens of a block go so far, or farther."""
        start = members.index(owner)
        return max((reads(members[(start + far) % count], owner) for far in range(distance, count)), default=0)

    steps = []
    for step in range(count):
        owner, following = members[(place - step) % count], members[(place - step - 1) % count]
        reader = members[(place + step) % count]
        steps.append(
            Step(
                owner,
                reaches(owner, step) if step else ring.block(own).size,
                reads(own, owner),
                reaches(owner, step + 1),
                members[(place + 1) % count],
                reaches(following, step + 1),
                members[(place - 1) % count],
                reader,
                reads(reader, own),
            )
        )
    return tuple(steps)


def pass_on(
    ring: Ring, mesh: DeviceMesh, step: int, held: tuple[torch.Tensor, ...], like: tuple[torch.Tensor, ...], cause: torch.Tensor
) -> torch.Tensor:
    """Start the exchange that ends ``step``: the block that is here goes to the next rank.

    Args:
        held: The shards at step 0, later the one flat buffer that has come.
        like: The shards, which tell the shapes.
        cause: What a compiler must do before.

    Returns:
        The next block as one flat buffer, for `collectives.wait` and `unpacked`.
    """
    group, places = process_groups.submesh_group(mesh, ring.axes)

    def pack(held: tuple[torch.Tensor, ...], like: tuple[torch.Tensor, ...], cause: torch.Tensor, *coordinate: int) -> Any:
        at = ring.route(coordinate)[step]
        sent, received = [0] * len(places), [0] * len(places)
        each = sum(_each(tensor, ring.dim) for tensor in like)
        sent[places[at.after]] = at.passed * each
        received[places[at.before]] = at.arriving * each
        if step and at.passed == at.held:
            flat = held[0]
        else:
            blocks = unpacked(held[0], like, ring.dim, at.held) if step else held
            flat = torch.cat([block.narrow(ring.dim, 0, at.passed).reshape(-1) for block in blocks])
        return depend_on(flat, cause), *received, *sent

    packed, *counts = simulation.per_rank(pack, held, like, cause, *_own(mesh))
    return collectives.all_to_all(packed, counts[: len(places)], counts[len(places) :], group)


def unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor], dim: int, tokens: int) -> list[torch.Tensor]:
    """The blocks of so many tokens that a flat buffer holds, as views of it."""
    shapes = [[tokens if d == dim else n for d, n in enumerate(tensor.shape)] for tensor in like]
    pieces = flat.split_with_sizes([prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def send_home(ring: Ring, mesh: DeviceMesh, step: int, values: tuple[torch.Tensor, ...], cause: torch.Tensor) -> torch.Tensor:
    """Start the exchange by which each rank gets what another has worked out of its block at ``step``.

    Args:
        values: A value for each element of ``step``'s block that this rank's queries see.
        cause: What a compiler must do before.

    Returns:
        The values for this rank's own block as one flat buffer, for `collectives.wait` and `add_home`.
    """
    group, places = process_groups.submesh_group(mesh, ring.axes)

    def pack(values: tuple[torch.Tensor, ...], cause: torch.Tensor, *coordinate: int) -> Any:
        at = ring.route(coordinate)[step]
        sent, received = [0] * len(places), [0] * len(places)
        each = sum(_each(tensor, ring.dim) for tensor in values)
        sent[places[at.owner]] = at.read * each
        received[places[at.reader]] = at.owed * each
        return depend_on(torch.cat([value.reshape(-1) for value in values]), cause), *received, *sent

    packed, *counts = simulation.per_rank(pack, values, cause, *_own(mesh))
    return collectives.all_to_all(packed, counts[: len(places)], counts[len(places) :], group)


def add_home(
    ring: Ring, mesh: DeviceMesh, step: int, sums: tuple[torch.Tensor, ...], arrived: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Add what `send_home` brought to ``sums``, in place, which hold a value for each element of this rank's own block."""
    arrived = collectives.wait(arrived)

    def add(sums: tuple[torch.Tensor, ...], arrived: torch.Tensor, *coordinate: int) -> tuple[torch.Tensor, ...]:
        owed = ring.route(coordinate)[step].owed
        for total, values in zip(sums, unpacked(arrived, sums, ring.dim, owed), strict=True):
            total.narrow(ring.dim, 0, owed).add_(values)
        return tuple(depend_on(total, arrived) for total in sums) if not arrived.numel() else sums

    return simulation.per_rank(add, sums, arrived, *_own(mesh))


def _each(tensor: torch.Tensor, dim: int) -> int:
    """How many elements a token has."""
    return prod(size for d, size in enumerate(tensor.shape) if d != dim)


def _own(mesh: DeviceMesh) -> tuple[int, ...]:
    coordinate = process_groups.coordinate(mesh)
    assert coordinate is not None, "a rank outside the mesh has no part in a ring"
    return coordinate
