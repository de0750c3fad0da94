"""What one rank computes of an attention: its own queries over one block of keys, by torch's fused kernel or written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from torchhalo.exchange.ring import visible
from torchhalo.geometry import Box, Span
from torchhalo.kernels import attention, draws, random_numbers
from torchhalo.torch_internals import handlers

aten = torch.ops.aten

BATCH, HEADS, TOKENS = 0, 1, 2
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default


class Part(NamedTuple):
    """Queries of one rank and a block of keys: where they are in the whole tensors.

    Attributes:
        rows: The spans of batch, heads and queries.
        keys: That of the keys which any of the queries sees.
        causal: Whether a query sees only the keys up to its own place.
    """

    rows: Box
    keys: Span
    causal: bool

    @property
    def queries(self) -> Span:
        return self.rows.spans[TOKENS]

    @property
    def all_visible(self) -> bool:
        """Whether every query sees every key."""
        return not self.causal or self.keys.stop <= self.queries.start + 1

    @property
    def square(self) -> bool:
        """Whether the queries are those of the same tokens as the keys, so that a kernel knows by itself what is visible."""
        return self.queries == self.keys

    def hidden(self, device: torch.device, start: int, stop: int) -> torch.Tensor:
        """Which keys the queries from ``start`` to ``stop``, counted from the rank's first, do not see."""
        keys = torch.arange(self.keys.start, self.keys.stop, device=device)
        return keys > torch.arange(self.queries.start + start, self.queries.start + stop, device=device).unsqueeze(-1)


def part_of(rows: Box, block: Span, causal: bool) -> Part:
    """The part that the queries ``rows`` see of a block."""
    return Part(rows, Span(block.start, block.start + visible(rows.spans[TOKENS], block, causal)), causal)


def cut(mask: torch.Tensor | None, keys: Span) -> torch.Tensor | None:
    """The columns of a mask, which has them all, for a block of keys."""
    return mask if mask is None or mask.shape[-1] == 1 else mask.narrow(-1, keys.start, keys.size)


def count_visible(part: Part, mask: torch.Tensor | None, sums: torch.Tensor) -> torch.Tensor:
    """How many keys of the block each query sees; of the shape of ``sums``, the logsumexp."""
    columns = cut(mask, part.keys)
    seen = torch.ones(1, dtype=torch.bool, device=sums.device) if columns is None else columns > -math.inf
    if not part.all_visible:
        seen = seen & ~part.hidden(sums.device, 0, part.queries.size)
    seen = seen.expand(*seen.shape[:-1], part.keys.size)
    return seen.sum(-1, dtype=sums.dtype).expand(sums.shape)


def has_kernel(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, drops: bool) -> bool:
    """Whether torch has a fused kernel for such tensors; what it has none for is written out.

    That of a CPU drops nothing. Those of CUDA take no float64 and want rows of a multiple of 16 bytes; the one without a mask
    fills up half types itself.
    """
    if query.device.type == "cpu":
        return not drops
    whole_rows = not any(t.shape[3] * t.dtype.itemsize % 16 for t in (query, value))
    return query.dtype != torch.float64 and (whole_rows or (mask is None and query.dtype != torch.float32))


class Inputs(NamedTuple):
    """The tensors of one rank and a block of keys.

    Attributes:
        mask: Of the rank's queries and all keys.
        extra: Other tensors of the call.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    extra: tuple[torch.Tensor, ...]


class Saved(NamedTuple):
    """The gradient of the output, and output and logsumexp over all keys."""

    grad: torch.Tensor
    out: torch.Tensor
    sums: torch.Tensor


class Kernel(Protocol):
    """The local part of an attention."""

    def forward(self, part: Part, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and logsumexp (batch, heads, queries)."""

    def backward(self, part: Part, inputs: Inputs, saved: Saved, mask_grad: bool) -> list[torch.Tensor]:
        """The gradients of query, key, value and, where wanted, the mask's columns for the block."""


class Fused(NamedTuple):
    """A fused kernel of torch.

    Attributes:
        op: That of the call, forward or backward.
        given: Its arguments by name.
        extra: The names of other tensors among them.
        masked: The name of the mask; None for a kernel that knows none.
        merges: Whether outputs are merged, for which logsumexps are needed even if the call asks for none.
    """

    op: handlers.Op
    given: dict[str, Any]
    extra: tuple[str, ...]
    masked: str | None
    merges: bool

    def forward(self, part: Part, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        local = self._local(part, inputs)
        if self.merges and "compute_log_sumexp" in local:
            local["compute_log_sumexp"] = True
        out, sums = call(self.op, local)[:2]
        sums = sums.squeeze(-1) if sums.ndim == 4 else sums
        sums = sums.to(torch.promote_types(inputs.query.dtype, torch.float32))  # some releases trace it with another dtype
        return out, sums.narrow(TOKENS, 0, min(sums.shape[TOKENS], part.queries.size))

    def backward(self, part: Part, inputs: Inputs, saved: Saved, mask_grad: bool) -> list[torch.Tensor]:
        local, (grad, out, sums) = self._local(part, inputs), saved
        if self.op is EFFICIENT_BACKWARD:  # as its forward kernel fills it up
            sums = torch.constant_pad_nd(sums, [0, -sums.shape[TOKENS] % 32], math.inf)
        local |= {next(iter(self.given)): _dense_rows(grad), "out": _dense_rows(out), "logsumexp": sums}
        if "max_q" in local:
            local |= {"max_q": inputs.query.shape[TOKENS], "max_k": inputs.key.shape[TOKENS]}
        if "grad_input_mask" in local:
            local["grad_input_mask"] = [True, True, True, mask_grad]
        found = list(call(self.op, local))[: 3 + mask_grad]
        columns = cut(inputs.mask, part.keys)
        if mask_grad and columns is not None:
            found[3] = found[3].sum_to_size(columns.shape)
        return found

    def _local(self, part: Part, inputs: Inputs) -> dict[str, Any]:
        query, key, value, mask, extra = inputs
        local: dict[str, Any] = {
            **self.given,
            "query": _dense_rows(query),
            "key": _dense_rows(key),
            "value": _dense_rows(value),
            **dict(zip(self.extra, extra, strict=True)),
        }
        columns = cut(mask, part.keys)
        if part.causal:
            # a kernel without a mask lets the last query see the last key
            local["is_causal"] = not part.all_visible and (self.masked is None or (part.square and columns is None))
            if not part.all_visible and self.masked is None and part.queries.stop != part.keys.stop:
                raise NotImplementedError("scaled_dot_product_attention: causal attention with more queries than keys")
            if not part.all_visible and not local["is_causal"]:
                late = part.hidden(query.device, 0, part.queries.size)
                bias = query.new_zeros(late.shape).masked_fill_(late, -math.inf)
                columns = _aligned(bias if columns is None else columns + bias).expand(*query.shape[:2], -1, -1)
        if self.masked is not None:
            local[self.masked] = None if columns is None else _aligned(_dense_rows(columns))
        return local


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as the kernels read it: they step by one along the last dim, and torch asks that of the whole tensor alone."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """``mask`` with rows that begin where the kernels of CUDA want them to."""
    steps = (*mask.stride()[:-1], mask.storage_offset())
    if mask.device.type == "cpu" or (mask.stride(-1) == 1 and not any(step % 16 for step in steps)):
        return mask
    return torch.constant_pad_nd(mask, [0, -mask.shape[-1] % 16 or 16])[..., : mask.shape[-1]]


def call(op: handlers.Op, given: dict[str, Any], function: Callable[..., Any] | None = None) -> Any:
    """``op``, or a function with its schema, with arguments by name, some of which the schema wants by place."""
    named = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    by_place = (value for name, value in given.items() if name not in named)
    return (function or op)(*by_place, **{name: given[name] for name in named})


class WrittenOut(NamedTuple):
    """Attention by its formula; with dropout the draws depend on where a weight is among all, not on how they are sharded.

    Attributes:
        shape: Of all weights: batch, heads, queries, keys.
        dropout: The share that is dropped; if it is 0 there is no seed.
        scale: Of the scores.
    """

    shape: tuple[int, ...]
    dropout: float
    scale: float

    def forward(self, part: Part, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, mask, extra = inputs
        hidden, kept = self._of(part, query, extra)
        return attention.written_out(query, key, value, self.scale, cut(mask, part.keys), hidden, kept)

    def backward(self, part: Part, inputs: Inputs, saved: Saved, mask_grad: bool) -> list[torch.Tensor]:
        query, key, value, mask, extra = inputs
        hidden, kept = self._of(part, query, extra)
        sums = saved.sums.reshape(query.shape[:3])
        every_key = part == part_of(part.rows, Span(0, self.shape[3]), part.causal)
        found = attention.written_out_backward(
            saved.grad, query, key, value, saved.out, sums, self.scale, cut(mask, part.keys), hidden, kept, mask_grad, every_key
        )
        likes = [query, key, value, *([mask] if mask is not None and mask_grad else [])]
        return [each.to(like.dtype) for each, like in zip(found, likes, strict=True)]

    def _of(
        self, part: Part, query: torch.Tensor, seeds: tuple[torch.Tensor, ...]
    ) -> tuple[attention.Rows | None, attention.Rows | None]:
        hidden = None if part.all_visible else partial(part.hidden, query.device)
        if not self.dropout:
            return hidden, None
        seed = seeds[0].flatten()[:1].view(torch.int64).squeeze(0)  # of the dtype and shape that the op's own kernel has for it

        def kept(start: int, stop: int) -> torch.Tensor:
            batch, heads, queries = part.rows.spans
            rows = Span(queries.start + start, queries.start + stop)
            box = Box((batch, heads, rows, part.keys))
            drawn = query.new_empty(box.shape, dtype=torch.promote_types(query.dtype, torch.float32))
            draws.fill(drawn, random_numbers.bernoulli, draws.Part(box, self.shape, seed), 1 - self.dropout)
            return drawn.mul_(1 / (1 - self.dropout)) if self.dropout < 1 else drawn

        return hidden, kept
