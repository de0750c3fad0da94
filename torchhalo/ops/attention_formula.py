"""Attention of sharded tokens for which torch has no fused kernel: the formula, block by block, over keys that travel alike.

Torch itself writes it out in products of whole matrices, with a plain mask if it is causal, which DTensor refuses.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from torchhalo.ops import randomness
from torchhalo.ops.attention_kernels import has_kernel

#: The op in whose name the formula is computed: it takes a bias and gives its gradient, and it has a place for a seed.
_OP = torch.ops.aten._scaled_dot_product_efficient_attention.default


def dot_product(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **rest: Any,
) -> Any:
    """`F.scaled_dot_product_attention`, by the formula where torch has no fused kernel for sharded tensors."""
    tensors = (query, key, value)
    if all(isinstance(t, DTensor) and t.ndim == 3 for t in tensors):  # without heads
        mask = attn_mask.unsqueeze(1) if isinstance(attn_mask, torch.Tensor) and attn_mask.ndim == 3 else attn_mask
        query, key, value = (t.unsqueeze(1) for t in tensors)
        return dot_product(query, key, value, mask, dropout_p, is_causal, **rest).squeeze(1)
    query, key, value, attn_mask = map(_autocast, (*tensors, attn_mask))
    tensors = (query, key, value)
    if not _lacks_kernel(*tensors, attn_mask, dropout_p, is_causal):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **rest)
    given = [t for t in (*tensors, attn_mask) if t is not None]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
    sums = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return _OP(query, key, value, attn_mask, sums, dropout_p, is_causal, scale=rest.get("scale"))[0]


def _autocast(tensor: Any) -> Any:
    """As autocast has the tensors of attention."""
    if not isinstance(tensor, DTensor) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def _lacks_kernel(query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool) -> bool:
    """Whether torch would write out a call that it finds right: of a wrong one it is to complain itself."""
    tensors = (query, key, value)
    if any(not isinstance(t, DTensor) or t.ndim != 4 or t.dtype != query.dtype for t in tensors):
        return False
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        return False
    if not key.shape[1] or query.shape[1] % key.shape[1] or (mask is not None and causal):
        return False
    if dropout and randomness.torch_stream():
        return False
    return not has_kernel(query, value, mask, dropout > 0)
