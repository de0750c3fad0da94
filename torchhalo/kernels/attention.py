"""Attention on one rank: parts over blocks of keys merged into one, and attention written out, for want of a kernel.

Shapes: queries are (batch, heads, queries, size), keys and values (batch, heads or fewer, keys, size).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

# Scores that are computed at a time; a few such tensors live at once.
SLICE = 1 << 24

State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Rows = Callable[[int, int], torch.Tensor]  # for the queries from one on up to another


def merged(before: State, part: State) -> State:
    """The attention over two sets of keys, of that over each.

    Args:
        before: Output, logsumexp, and how many keys each query sees, the last empty where all see all. The output is
            overwritten.
        part: The same of the other keys.
    """
    (out, sums, seen), (other, other_sums, others) = before, part
    weight, total = torch.sigmoid(other_sums - sums), torch.logaddexp(sums, other_sums)
    if not seen.numel():
        weight = weight.unsqueeze(-1)
        # Not a `lerp_`, which wants the other output in the dtype of sums: a copy of twice its size.
        return out.mul_(1 - weight).addcmul_(other, weight), total, seen
    # A mask so low that it swallows the scores also swallows the logarithm of the number of keys.
    tied = (sums == other_sums) & (sums < -1 / torch.finfo(sums.dtype).eps)
    weight = torch.where(tied, others / (seen + others), weight)
    both = out.lerp(other.to(out.dtype), weight.unsqueeze(-1))
    # Of a query that sees no key anywhere, what the kernel makes of it stays, zero or not a number, and not what a rank without
    # keys of its own began with: backward, the kernel wants its own logsumexp.
    first, second = seen == 0, others == 0
    out = torch.where(first.unsqueeze(-1), other.to(out.dtype), torch.where(second.unsqueeze(-1), out, both))
    return out, torch.where(first, other_sums, torch.where(second, sums, total)), seen + others


def _slices(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[int, int]]:
    queries = query.shape[2]
    step = max(1, SLICE // max(1, query.shape[0] * query.shape[1] * key.shape[2]))
    return ((start, min(start + step, queries)) for start in range(0, queries, step))


def _wide(query: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors in the dtype of sums, with as many heads as the query has."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    return [t.to(dtype).repeat_interleave(query.shape[1] // t.shape[1], 1) for t in tensors]


def _along(mask: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return mask[..., start:stop, :] if mask.shape[-2] > 1 else mask


def _scores(
    query: torch.Tensor, key: torch.Tensor, scale: float, mask: torch.Tensor | None, hidden: Rows | None, start: int, stop: int
) -> torch.Tensor:
    scores = (query[:, :, start:stop] @ key.mT).mul_(scale)
    if mask is not None:
        scores = scores + _along(mask, start, stop)
    return scores if hidden is None else scores.masked_fill_(hidden(start, stop), -math.inf)


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    hidden: Rows | None,
    kept: Rows | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp, in the dtype of sums.

    Args:
        mask: What is added to the scores.
        hidden: Which keys a query does not see.
        kept: By what each weight is multiplied: zero, or more than one. None to drop nothing.
    """
    query, key, value = _wide(query, query, key, value)
    outs, sums = [], []
    for start, stop in _slices(query, key):
        scores = _scores(query, key, scale, mask, hidden, start, stop)
        # Not by their logsumexp: a mask so low that it swallows the scores also swallows the logarithm of the number of keys.
        highest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        weights = scores.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
        out = (weights if kept is None else weights.mul_(kept(start, stop))) @ value
        outs.append(out.div_(total.clamp(min=1)))  # of a query that sees a key, the highest score alone weighs one
        sums.append(total.log_().add_(highest).squeeze(-1))
    return torch.cat(outs, 2), torch.cat(sums, 2)


def written_out_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    hidden: Rows | None,
    kept: Rows | None,
    mask_grad: bool,
    every_key: bool,
) -> list[torch.Tensor]:
    """The gradients of query, key, value and, where wanted, mask, in the dtype of sums.

    Args:
        out, sums: Those of the attention over all keys, of which ``key`` may be a part.
        every_key: Whether ``key`` has all keys that a query sees. Then weights sum to one, however low the mask is.
    """
    heads = key.shape[1]
    query, key, value, grad, out = _wide(query, query, key, value, grad, out)
    inner = (grad * out).sum(-1, keepdim=True)
    sums = sums.clamp(min=torch.finfo(sums.dtype).min).unsqueeze(-1)
    of_query, of_key, of_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    of_mask = [torch.zeros_like(mask, dtype=query.dtype)] if mask is not None and mask_grad else []
    for start, stop in _slices(query, key):
        scores = _scores(query, key, scale, mask, hidden, start, stop)
        weights, above = scores.sub_(sums[:, :, start:stop]).exp_(), grad[:, :, start:stop]
        near, inside = query[:, :, start:stop], inner[:, :, start:stop]
        if every_key:  # what multiplies the weights of a query is divided by their sum, as it is smaller than they are
            total = weights.sum(-1, keepdim=True)
            total.masked_fill_(total == 0, 1)
            above, inside = above / total, inside / total
        multiplier = 1 if kept is None else kept(start, stop)
        of_value += (weights * multiplier).mT @ above
        of_scores = (above @ value.mT).mul_(multiplier).sub_(inside).mul_(weights)
        for each in of_mask:
            part = _along(each, start, stop)
            part += of_scores.sum_to_size(part.shape)
        of_query[:, :, start:stop] = (of_scores @ key).mul_(scale)
        of_key += (of_scores.mT @ near).mul_(scale)
    shared = [t.unflatten(1, (heads, -1)).sum(2) for t in (of_key, of_value)]
    return [of_query, *shared, *of_mask]
