"""The arguments of a fused attention, put where each rank can compute its part, and the way its keys travel.

Where keys and values are many they go from rank to rank in a ring, a block at a time; where they are few, they are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.grids import owner_layout
from torchhalo.exchange.relayout import with_placements, without_grids
from torchhalo.exchange.ring import Ring
from torchhalo.geometry import Box, Span
from torchhalo.ops import randomness
from torchhalo.ops.attention_kernels import BATCH, HEADS, TOKENS, Fused, Kernel, WrittenOut, has_kernel
from torchhalo.torch_internals import dtensors, handlers, process_groups, simulation
from torchhalo.torch_internals.grid_shard import GridShard, at, cuts

#: Keys and values of so many bytes, made whole, travel in a ring; fewer are gathered. A gather is one collective where the
#: ring is one for each rank: below this size their start takes longer than the bytes, and memory is no concern.
RING_BYTES = 32 * 2**20
SEEDS = ("philox_seed", "rng_state")


class Attention:
    """An attention op and its arguments, put where each rank can compute its part.

    Attributes:
        roles: What each axis cuts: batch, heads or queries, or nothing.
        ring: The way of keys and values, over the axes that cut them.
    """

    def __init__(self, op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.op = op
        self.given = handlers.named(op, args, kwargs)
        self.masked = next((name for name in ("attn_mask", "attn_bias") if name in self.given), None)
        given = {name: self.given[name] for name in ("query", "key", "value")}
        if self.masked and self.given[self.masked] is not None:
            given[self.masked] = self.given[self.masked]
        found = dict(zip(given, dtensors.as_dtensors("scaled_dot_product_attention", **given), strict=True))
        self.causal = bool(self.given["is_causal"])
        mask = found.get(self.masked or "")
        if self.drops or self._minds_order(mask, *list(found.values())[:3]):
            found = {name: without_grids(tensor) for name, tensor in found.items()}
            mask = found.get(self.masked or "")
        self.given |= found
        query, key, value = found["query"], found["key"], found["value"]
        self.mesh = query.device_mesh
        self.takes_part = process_groups.coordinate(self.mesh) is not None
        self.roles = _roles(query, key, value)
        self.query = with_placements(query, self.roles)
        placements = _of_keys(self.roles, key, value)
        self.key, self.value = with_placements(key, placements), with_placements(value, placements)
        self.mask = self._cut_mask(mask)
        self.owned = owner_layout(query.shape, self.mesh, self.roles)
        self.ring = Ring(self.owned, owner_layout(key.shape, self.mesh, placements), TOKENS, self.causal)

    def _minds_order(self, mask: DTensor | None, *tensors: DTensor) -> bool:
        """Whether it matters which token is which, and these are grids."""
        grids = any(cuts(p, TOKENS) for t in tensors for p in t.placements if isinstance(p, GridShard))
        return grids and (self.causal or (mask is not None and max(mask.shape[-2:]) > 1))

    def _cut_mask(self, mask: DTensor | None) -> DTensor | None:
        if mask is None:
            return None
        placements: list[Placement] = []
        for role in self.roles:
            dim = role.dim + mask.ndim - 4 if isinstance(role, (Shard, GridShard)) else -1
            cut = dim >= 0 and mask.shape[dim] > 1
            placements.append(at(role, dim) if cut else Replicate())
        return with_placements(mask, placements)

    def rows(self, coordinate: Sequence[int]) -> Box:
        """Which batch, heads and queries the rank at ``coordinate`` computes."""
        return Box(self.owned.owned(coordinate).spans[:3])

    @property
    def keys(self) -> Span:
        """All keys."""
        return Span(0, self.ring.keys.shape[TOKENS])

    @property
    def in_ring(self) -> bool:
        """Whether keys and values travel in a ring; every rank decides that from global shapes alone."""
        if not self.ring.axes or not prod(self.owned.shape):
            return False
        if self.masked is None and self.causal and self._dropout == 0 and not self._same_tokens:
            return False  # the kernel takes no mask, and knows by itself what is visible only if no key is left out
        parts = prod(self.mesh.size(axis) for axis, role in enumerate(self.roles) if cuts(role, BATCH) or cuts(role, HEADS))
        return sum(prod(t.shape) * t.dtype.itemsize for t in (self.key, self.value)) // parts > RING_BYTES

    @property
    def hides(self) -> bool:
        """Whether some query may see no key of a block that is computed."""
        return self.mask is not None or (self.causal and not self._same_tokens)

    @property
    def _same_tokens(self) -> bool:
        """Whether each rank's queries are those of the tokens whose keys it has."""
        queries, keys = self.ring.queries, self.ring.keys
        return queries.shape[TOKENS] == keys.shape[TOKENS] and queries.cuts[TOKENS] == keys.cuts[TOKENS]

    @property
    def _dropout(self) -> float:
        return float(self.given["dropout_p"])

    @property
    def drops(self) -> bool:
        """Whether weights are dropped by torchhalo's own draws."""
        return self._dropout > 0 and not randomness.torch_stream()

    @property
    def has_kernel(self) -> bool:
        """Whether torch has a fused kernel for this."""
        return has_kernel(self.query, self.value, self.mask, self.drops)

    def kernel(self) -> tuple[Kernel, tuple[torch.Tensor, ...]]:
        """What a rank computes, and this rank's tensors that it needs besides."""
        if self.drops or not self.has_kernel:
            return self._written_out()
        known = {"query", "key", "value", self.masked, next(iter(self.given)), "out", "logsumexp"}
        extra = {name: v for name, v in self.given.items() if name not in known and isinstance(v, torch.Tensor)}
        tensors = tuple(dtensors.local(v) if isinstance(v, DTensor) else v for v in extra.values())
        return Fused(self.op, self.given, tuple(extra), self.masked, self.in_ring), tensors

    def _written_out(self) -> tuple[Kernel, tuple[torch.Tensor, ...]]:
        seed = self._seed() if self.drops else []
        if self.drops and not seed:
            raise NotImplementedError(
                f"scaled_dot_product_attention: dropout_p (={self._dropout}) must be 0 for this kernel: "
                "call F.scaled_dot_product_attention, which chooses one that can"
            )
        scale = self.given["scale"]
        scale = self.owned.shape[3] ** -0.5 if scale is None else scale
        shape = (*self.owned.shape[:3], self.keys.size)
        return WrittenOut(shape, self._dropout, scale), tuple(seed)

    def _seed(self) -> list[torch.Tensor]:
        """The seed of the weights to drop, drawn or of the forward pass; none for an op that has no place for it."""
        if "logsumexp" in self.given:
            seeds = [self.given[name] for name in SEEDS if name in self.given]
            return [dtensors.local(s) if isinstance(s, DTensor) else s for s in seeds]
        if not {result.name for result in self.op._schema.returns} & {*SEEDS}:
            return []
        device = dtensors.local(self.query).device
        seed = randomness.seed_of(self.op, self.mesh, device, None)
        return [simulation.per_rank(lambda seed: seed.to(device, non_blocking=True), seed)]


def _roles(query: DTensor, key: DTensor, value: DTensor) -> list[Placement]:
    """For each axis, what it cuts: batch, heads or queries; nothing, if none of the three tensors is cut along such a dim."""
    tensors = (query, key, value)
    roles: list[Placement] = []
    for placements in zip(*(t.placements for t in tensors), strict=True):
        cut = [p for p in placements if any(cuts(p, dim) for dim in (BATCH, HEADS, TOKENS))]
        role = cut[0] if cut else Replicate()
        # a grid of keys is none of queries
        roles.append(Shard(TOKENS) if cuts(role, TOKENS) and role != placements[0] else role)
    parts = prod(query.device_mesh.size(axis) for axis, role in enumerate(roles) if cuts(role, HEADS))
    if query.shape[HEADS] != key.shape[HEADS] and any(t.shape[HEADS] % parts for t in tensors):
        # heads that share a key would be on two ranks
        roles = [Replicate() if cuts(role, HEADS) else role for role in roles]
    return roles if _one_kind(roles) else [Shard(p.dim) if isinstance(p, GridShard) else p for p in roles]


def _of_keys(roles: Sequence[Placement], key: DTensor, value: DTensor) -> list[Placement]:
    """The placements of keys and values: along axes that cut the queries, their own; nothing travels where they are whole."""
    placements: list[Placement] = []
    for role, *own in zip(roles, key.placements, value.placements, strict=True):
        if not cuts(role, TOKENS):
            placements.append(role)
        elif not any(isinstance(p, (Shard, GridShard)) for p in own):
            placements.append(Replicate())
        else:
            placements.append(next((p for p in own if cuts(p, TOKENS)), Shard(TOKENS)))
    return placements if _one_kind(placements) else [Shard(p.dim) if isinstance(p, GridShard) else p for p in placements]


def _one_kind(placements: Sequence[Placement]) -> bool:
    """Whether no dim is cut as a grid along one axis and otherwise along another."""
    kinds = {(p.dim, getattr(p, "sizes", None)) for p in placements if isinstance(p, (Shard, GridShard))}
    return len({dim for dim, _ in kinds}) == len(kinds)
