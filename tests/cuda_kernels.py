"""The fused attention kernels of CUDA on a CPU, by plain formulas and with the habits of each, to test what calls them.

flash: knows no mask; a causal one lets the last query see the last key. efficient: adds a bias and gives its gradient, fills
its logsumexp up to a multiple of 32, and gives one only if asked. cudnn: adds a bias, and its logsumexp has one dim more.
A query that sees no key gives not-a-number, in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from harness import DEVICE

Tensor = torch.Tensor
aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, late: Tensor | None, scale: float | None) -> Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        assert bias.shape == scores.shape, "kernels of CUDA broadcast nothing"
        scores = scores + bias
    return scores if late is None else scores.masked_fill(late, -math.inf)


def _late(query: Tensor, key: Tensor, causal: bool, from_end: bool) -> Tensor | None:
    if not causal:
        return None
    queries, keys = query.shape[2], key.shape[2]
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + (keys - queries if from_end else 0))


def _forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, late: Tensor | None, scale: float | None) -> tuple:
    scores = _scores(query, key, bias, late, scale)
    sums = scores.logsumexp(-1)
    out = (scores - sums.unsqueeze(-1)).exp() @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return out.transpose(1, 2).contiguous().transpose(1, 2), sums.masked_fill(sums == -math.inf, math.nan)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    late: Tensor | None,
    out: Tensor,
    sums: Tensor,
    scale: float | None,
) -> list[Tensor]:
    weights = (_scores(query, key, bias, late, scale) - sums.unsqueeze(-1)).exp()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    shared = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(shared, 1) for t in (key, value))
    of_scores = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True))
    of_key, of_value = of_scores.mT @ query * scale, weights.mT @ grad
    return [of_scores @ key * scale, *(t.unflatten(1, (-1, shared)).sum(2) for t in (of_key, of_value)), of_scores]


def flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    assert not dropout_p
    out, sums = _forward(query, key, value, None, _late(query, key, is_causal, True), scale)
    rng = torch.zeros(2, dtype=torch.uint64)
    return out, sums, None, None, query.shape[2], key.shape[2], rng, torch.zeros((), dtype=torch.uint64), out.new_empty(0)


def flash_backward(grad, query, key, value, out, sums, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, a, b, *, scale=None):
    assert (max_q, max_k) == (query.shape[2], key.shape[2]) and sums.shape == query.shape[:3]
    return tuple(_backward(grad, query, key, value, None, _late(query, key, is_causal, True), out, sums, scale)[:3])


def efficient(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    assert not dropout_p and query.shape[1] == key.shape[1]
    out, sums = _forward(query, key, value, attn_bias, _late(query, key, is_causal, False), scale)
    filled = torch.constant_pad_nd(sums, [0, -sums.shape[2] % 32], math.inf) if compute_log_sumexp else sums[..., :0]
    return out, filled, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def efficient_backward(
    grad, query, key, value, attn_bias, out, sums, seed, offset, dropout_p, grad_input_mask, is_causal=False, *, scale=None
):
    assert sums.shape[2] == query.shape[2] + -query.shape[2] % 32
    sums, late = sums[..., : query.shape[2]], _late(query, key, is_causal, False)
    found = _backward(grad, query, key, value, attn_bias, late, out, sums, scale)
    return tuple(each if wanted else None for each, wanted in zip(found, grad_input_mask, strict=True))


def cudnn(query, key, value, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    assert not dropout_p and compute_log_sumexp
    out, sums = _forward(query, key, value, bias, _late(query, key, is_causal, False), scale)
    seed, offset = (torch.zeros((), dtype=torch.int64) for _ in range(2))
    return out, sums.unsqueeze(-1), None, None, query.shape[2], key.shape[2], seed, offset, out.new_empty(0)


def cudnn_backward(
    grad, query, key, value, out, sums, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale=None
):
    assert (max_q, max_k) == (query.shape[2], key.shape[2]) and sums.shape == (*query.shape[:3], 1)
    late = _late(query, key, is_causal, False)
    return tuple(_backward(grad, query, key, value, bias, late, out, sums.squeeze(-1), scale)[:3])


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, the ops of CUDA's kernels run on CPU tensors."""
    if DEVICE != "cpu":
        pytest.skip("formulas stand for the kernels of CUDA on a CPU alone")
    library = torch.library.Library("aten", "IMPL")
    for kernel in (flash, efficient, cudnn, flash_backward, efficient_backward, cudnn_backward):
        kind, _, backward = kernel.__name__.partition("_")
        library.impl(f"_scaled_dot_product_{kind}_attention{'_' + backward if backward else ''}", kernel, "CPU")
    try:
        yield
    finally:
        library._destroy()
