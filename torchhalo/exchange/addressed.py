"""Reach the elements of a sharded tensor by indices that are data, so that what travels depends on them.

An exchange is planned from shapes alone; here a rank knows only from its indices to whom it must turn. It first tells all ranks
how many elements it sends to each, for which the host waits for the device, and then sends just these. An index that is
wrong on one rank raises on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchhalo.exchange.layout import Layout
from torchhalo.torch_internals import collectives, process_groups, simulation, tracing


def reindexed(
    indices: torch.Tensor, source: Sequence[int], target: Sequence[int], move: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Flat indices into a box of shape ``source`` as ones into a box of shape ``target``.

    Args:
        move: From a dim and the coordinates along it in the source to those in the target.
    """
    found, scale = torch.zeros_like(indices), 1
    for dim in reversed(range(len(source))):
        found = found + move(dim, indices % source[dim] if dim else indices) * scale
        indices, scale = indices // max(1, source[dim]), scale * target[dim]
    return found


class Addresses(NamedTuple):
    """How elements of a sharded tensor are named: by a key, the flat index into the rank's box made whole along ``dims``.

    Attributes:
        layout: Of the tensor.
        dims: The dims, next to each other, that an index goes along.
    """

    layout: Layout
    dims: tuple[int, ...]

    @property
    def volume(self) -> int:
        """How many elements an index can name."""
        return prod(self.layout.shape[dim] for dim in self.dims)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes over which elements travel."""
        return tuple(sorted(axis for dim in self.dims for axis in self.layout.cuts[dim]))

    def frame(self, coordinate: Sequence[int]) -> list[int]:
        """The shape that keys go by; the same for all ranks that may turn to each other."""
        own = self.layout.owned(coordinate).shape
        return [self.layout.shape[dim] if dim in self.dims else size for dim, size in enumerate(own)]

    def keys(self, indices: torch.Tensor, coordinate: Sequence[int]) -> torch.Tensor:
        """One per index, flat; along other dims an index names what lies where it lies itself."""
        frame = self.frame(coordinate)
        keys = indices.clamp(0, max(0, self.volume - 1)) * prod(frame[self.dims[-1] + 1 :])
        for dim, size in enumerate(indices.shape):
            if dim not in self.dims:
                place = torch.arange(size, device=indices.device) * prod(frame[dim + 1 :])
                keys = keys + place.view(-1, *[1] * (indices.ndim - 1 - dim))
        return keys.flatten()

    def owners(self, keys: torch.Tensor, coordinate: Sequence[int]) -> torch.Tensor:
        """The row-major index over ``axes`` of the rank that owns each key's element."""
        frame, mesh, tables = self.frame(coordinate), self.layout.mesh_shape, {}
        strides = {axis: prod(mesh[other] for other in self.axes if other > axis) for axis in self.axes}
        for dim in self.dims:
            cuts = self.layout.cuts[dim]
            places = product(*(range(mesh[axis]) for axis in cuts))
            shares = [sum(at * strides[axis] for at, axis in zip(place, cuts, strict=True)) for place in places]
            lengths = [part.size for part in self.layout.parts(dim)]
            tables[dim] = torch.repeat_interleave(torch.tensor(shares), torch.tensor(lengths)).to(keys.device)
        return reindexed(keys, frame, [1] * len(frame), lambda dim, at: tables[dim][at] if dim in tables else at * 0)

    def positions(self, keys: torch.Tensor, coordinate: Sequence[int]) -> torch.Tensor:
        """The flat index of each key's element in the shard of the rank at ``coordinate``, which owns it."""
        own = self.layout.owned(coordinate)
        starts = [own.spans[dim].start if dim in self.dims else 0 for dim in range(len(own.spans))]
        return reindexed(keys, self.frame(coordinate), own.shape, lambda dim, at: at - starts[dim])


class Route(NamedTuple):
    """Who asks whom for how much.

    Attributes:
        keys: All that this rank names.
        mine: Whether it owns each of them itself.
        away: Which of them it does not, in the order of the group.
        sent, received: How many go to, and come from, each member of the group.
    """

    keys: torch.Tensor
    mine: torch.Tensor
    away: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    group: dist.ProcessGroup

    def send(self, packed: torch.Tensor) -> torch.Tensor:
        """What others send to this rank, of one element for each of ``away``; for `collectives.wait`."""
        return collectives.all_to_all(packed, self.received, self.sent, self.group)

    def reply(self, answers: torch.Tensor) -> torch.Tensor:
        """One element for each of ``away``, of one for each element that came; for `collectives.wait`."""
        return collectives.all_to_all(answers, self.sent, self.received, self.group)


def find_route(addresses: Addresses, indices: torch.Tensor, mesh: DeviceMesh, message: str) -> Route:
    """Find out who owns what the indices name.

    Args:
        indices: This rank's.
        message: The error if an index is out of range; ``{}`` stands for the index.
    """
    if tracing.is_tracing():
        raise NotImplementedError(
            "where indices reach along a sharded dim, what travels depends on their values, which torch.compile cannot trace: "
            "put the call (max_unpool, gather) in a function under torch.compiler.disable"
        )
    group, places = process_groups.submesh_group(mesh, addresses.axes)
    coordinate = process_groups.coordinate(mesh)

    def place(coordinate: Sequence[int]) -> int:
        index = 0
        for axis in addresses.axes:
            index = index * mesh.shape[axis] + coordinate[axis]
        return places[index]

    def look(indices: torch.Tensor, coordinate: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        keys = addresses.keys(indices, coordinate)
        owners = torch.tensor(places, device=keys.device)[addresses.owners(keys, coordinate)]
        mine = owners == place(coordinate)
        away = (~mine).nonzero()[:, 0]
        away = away[owners[away].argsort(stable=True)]
        ends = torch.stack(indices.aminmax()) if indices.numel() else indices.new_zeros(2)
        return keys, mine, away, torch.cat([torch.bincount(owners[away], minlength=len(places)), ends])

    def agree(told: torch.Tensor, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        rows = dict(zip(product(*map(range, mesh.shape)), told.tolist(), strict=True))
        for *_, least, most in rows.values():
            if least < 0 or most >= max(1, addresses.volume):
                raise RuntimeError(message.format(least if least < 0 else most))
        fiber = [at for at in rows if all(at[a] == coordinate[a] for a in range(mesh.ndim) if a not in addresses.axes)]
        received = {place(at): rows[at][place(coordinate)] for at in fiber}
        return *rows[coordinate][:-2], *(received[member] for member in range(len(places)))

    keys, mine, away, counts = simulation.per_rank(look, indices, coordinate)
    agreed = simulation.per_rank(agree, collectives.all_gather(counts, mesh, range(mesh.ndim)), coordinate)
    return Route(keys, mine, away, agreed[: len(places)], agreed[len(places) :], group)


def scatter(
    values: torch.Tensor,
    indices: torch.Tensor,
    addresses: Addresses,
    mesh: DeviceMesh,
    message: str,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's shard of a tensor in which each value is where its index says; of several at one place, any.

    Args:
        values, indices: This rank's, of one shape.
        addresses: Of the result.
        message: As in `find_route`.
        into: The rank's shard of what has the other elements; zeros, if not given.
    """
    route = find_route(addresses, indices, mesh, message)
    coordinate = process_groups.coordinate(mesh)

    def pack(values: torch.Tensor, keys: torch.Tensor, away: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return values.flatten()[away], keys[away]

    def place(
        values: torch.Tensor,
        keys: torch.Tensor,
        mine: torch.Tensor,
        others: torch.Tensor,
        theirs: torch.Tensor,
        into: torch.Tensor | None,
        coordinate: tuple[int, ...],
    ) -> torch.Tensor:
        shape = addresses.layout.owned(coordinate).shape
        out = values.new_zeros(prod(shape) + 1)  # the last for what is not mine
        if into is not None:
            out[:-1].view(shape).copy_(into)
        out[torch.where(mine, addresses.positions(keys, coordinate), prod(shape))] = values.flatten()
        out[addresses.positions(collectives.wait(theirs), coordinate)] = collectives.wait(others)
        return out[:-1].view(shape)

    packed = simulation.per_rank(pack, values, route.keys, route.away)
    others, theirs = (route.send(each) for each in packed)
    return simulation.per_rank(place, values, route.keys, route.mine, others, theirs, into, coordinate)


def gather(shard: torch.Tensor, indices: torch.Tensor, addresses: Addresses, mesh: DeviceMesh, message: str) -> torch.Tensor:
    """For each of this rank's indices the element that it names.

    Args:
        shard: This rank's, of the tensor that ``addresses`` are of.
        message: As in `find_route`.
    """
    route = find_route(addresses, indices, mesh, message)
    coordinate = process_groups.coordinate(mesh)

    def answer(shard: torch.Tensor, theirs: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
        return shard.flatten()[addresses.positions(collectives.wait(theirs), coordinate)]

    def join(
        shard: torch.Tensor,
        indices: torch.Tensor,
        keys: torch.Tensor,
        mine: torch.Tensor,
        away: torch.Tensor,
        answers: torch.Tensor,
        coordinate: tuple[int, ...],
    ) -> torch.Tensor:
        flat = torch.cat([shard.flatten(), shard.new_zeros(1)])  # the last for what is not mine
        out = flat[torch.where(mine, addresses.positions(keys, coordinate), shard.numel())]
        out[away] = collectives.wait(answers)
        return out.view(indices.shape)

    theirs = route.send(simulation.per_rank(lambda keys, away: keys[away], route.keys, route.away))
    answers = route.reply(simulation.per_rank(answer, shard, theirs, coordinate))
    return simulation.per_rank(join, shard, indices, route.keys, route.mine, route.away, answers, coordinate)
