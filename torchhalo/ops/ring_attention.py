"""Attention whose keys and values travel in a ring: a rank holds its own, the block that it computes on, and the next one.

Each step attends to the block that is here, while the next one travels; the outputs are merged by their logsumexp::

    step 0      attend to the own block             the own block goes to the next rank
    step 1      attend to the block of rank - 1     it goes on
    ...

Backward, the blocks travel again, with the final output and logsumexp each gives its part of all gradients, and those of its
keys and values are sent straight home. What is wholly in the future of a causal attention is neither sent nor computed.
"""

from __future__ import annotations

import torch

from torchhalo.exchange import ring as exchange
from torchhalo.kernels.attention import merged
from torchhalo.ops.attention_kernels import TOKENS, Inputs, Kernel, Part, Saved, count_visible, cut, part_of
from torchhalo.ops.attention_work import Attention
from torchhalo.torch_internals import collectives, dtensors, process_groups, simulation
from torchhalo.torch_internals.tracing import depend_on

Pair = tuple[torch.Tensor, ...]


class _Walk:
    """What this rank has of the attention: its shards, and what blocks come by."""

    def __init__(self, this: Attention, kernel: Kernel, extra: Pair):
        self.this, self.kernel, self.extra = this, kernel, extra
        self.ring, self.mesh = this.ring, this.mesh
        self.query = dtensors.local(this.query)
        self.shards: Pair = (dtensors.local(this.key), dtensors.local(this.value))
        self.mask = None if this.mask is None else dtensors.local(this.mask)
        coordinate = process_groups.coordinate(this.mesh)
        assert coordinate is not None
        self.coordinate = coordinate

    def next(self, step: int, held: Pair, cause: torch.Tensor) -> torch.Tensor | None:
        """Start to fetch the block of the step after ``step``, if there is one."""
        if step + 1 == self.ring.steps:
            return None
        return exchange.pass_on(self.ring, self.mesh, step, held, self.shards, cause)

    def part(self, step: int, held: Pair, shards: Pair, coordinate: tuple[int, ...]) -> tuple[Part, Pair]:
        """Of the rank at ``coordinate``: where its queries and the keys that they see are, and these keys and values."""
        at = self.ring.route(coordinate)[step]
        part = part_of(self.this.rows(coordinate), self.ring.block(at.owner), self.this.causal)
        blocks = held if step == 0 else exchange.unpacked(held[0], shards, TOKENS, at.held)
        return part, tuple(block.narrow(TOKENS, 0, at.read) for block in blocks)


def forward(this: Attention, kernel: Kernel, extra: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's output and logsumexp (batch, heads, queries)."""
    walk = _Walk(this, kernel, extra)

    def compute(
        step: int,
        state: Pair,
        held: Pair,
        query: torch.Tensor,
        shards: Pair,
        mask: torch.Tensor | None,
        extra: Pair,
        *coordinate: int,
    ) -> Pair:
        part, (key, value) = walk.part(step, held, shards, coordinate)
        if not query.numel() or not key.numel():
            if step:
                return depend_on(state[0], held[0]), *state[1:]
            shape, dtype = query.shape[:3], torch.promote_types(query.dtype, torch.float32)
            sums = query.new_full(shape, float("-inf"), dtype=dtype)
            out = query.new_zeros([*shape, value.shape[3]], dtype=dtype)
            return out, sums, torch.zeros_like(sums) if this.hides else sums.new_empty(0)
        out, sums = kernel.forward(part, Inputs(query, key, value, mask, extra))
        seen = count_visible(part, mask, sums) if this.hides else sums.new_empty(0)
        return merged(state, (out, sums, seen)) if step else (out.to(sums.dtype), sums, seen)  # type: ignore[arg-type]

    def finish(out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return out.to(query.dtype)

    state: Pair = ()
    held, cause = walk.shards, walk.query
    for step in range(this.ring.steps):
        coming = walk.next(step, held, cause)
        state = simulation.per_rank(compute, step, state, held, walk.query, walk.shards, walk.mask, extra, *walk.coordinate)
        if coming is not None:
            cause = collectives.wait(coming)
            held = (cause,)
    return simulation.per_rank(finish, state[0], walk.query), state[1]


def backward(this: Attention, kernel: Kernel, extra: Pair, saved: Pair, mask_grad: bool) -> list[torch.Tensor]:
    """This rank's gradients of query, key, value and, where wanted, mask.

    Args:
        saved: Its gradient of the output, its output and its logsumexp.
    """
    walk = _Walk(this, kernel, extra)

    def compute(
        step: int,
        sums: Pair,
        held: Pair,
        query: torch.Tensor,
        shards: Pair,
        mask: torch.Tensor | None,
        saved: Pair,
        extra: Pair,
        *coordinate: int,
    ) -> Pair:
        part, (key, value) = walk.part(step, held, shards, coordinate)
        if not sums:
            dtype = torch.promote_types(query.dtype, torch.float32)
            sums = (query.new_zeros(query.shape, dtype=dtype), *_mask_sums(mask if mask_grad else None, dtype))
        if not query.numel() or not key.numel():
            return *(depend_on(total, held[0]) for total in sums), torch.zeros_like(key), torch.zeros_like(value)
        found = kernel.backward(part, Inputs(query, key, value, mask, extra), Saved(*saved), mask_grad)
        of_query, of_key, of_value, *of_mask = found
        sums[0].add_(of_query)
        for total, columns in zip(sums[1:], of_mask, strict=True):
            into = cut(total, part.keys)
            assert into is not None
            into.add_(columns)
        return *sums, of_key, of_value

    def at_home(shards: Pair, grads: Pair) -> Pair:
        dtype = torch.promote_types(shards[0].dtype, torch.float32)
        found = tuple(shard.new_zeros(shard.shape, dtype=dtype) for shard in shards)
        for total, grad in zip(found, grads, strict=True):
            total.narrow(TOKENS, 0, grad.shape[TOKENS]).add_(grad)
        return found

    def finish(sums: Pair, likes: Pair) -> Pair:
        return tuple(total.to(like.dtype) for total, like in zip(sums, likes, strict=True))

    sums: Pair = ()
    home: Pair = ()
    leaving = None
    # Else a compiler would keep the blocks of the forward pass, or fetch these before: they are the same.
    held, cause = walk.shards, saved[0]
    for step in range(this.ring.steps):
        coming = walk.next(step, held, cause)
        *sums_, of_key, of_value = simulation.per_rank(
            compute, step, sums, held, walk.query, walk.shards, walk.mask, saved, extra, *walk.coordinate
        )
        sums = tuple(sums_)
        if coming is not None:
            cause = collectives.wait(coming)
            held = (cause,)
        if step == 0:
            home = simulation.per_rank(at_home, walk.shards, (of_key, of_value))
            continue
        if leaving is not None:
            home = exchange.add_home(this.ring, this.mesh, step - 1, home, leaving)
        leaving = cause = exchange.send_home(this.ring, this.mesh, step, (of_key, of_value), cause)
        del of_key, of_value
    if leaving is not None:
        home = exchange.add_home(this.ring, this.mesh, this.ring.steps - 1, home, leaving)
    masks = (walk.mask,) if mask_grad and walk.mask is not None else ()
    query, *of_mask = sums
    return list(simulation.per_rank(finish, (query, *home, *of_mask), (walk.query, *walk.shards, *masks)))


def _mask_sums(mask: torch.Tensor | None, dtype: torch.dtype) -> Pair:
    """Zeros for the gradient of a mask; of one that is the same for all keys, in the dtype of sums, as blocks add to it."""
    if mask is None:
        return ()
    return (mask.new_zeros(mask.shape, dtype=dtype if mask.shape[-1] == 1 else mask.dtype),)
