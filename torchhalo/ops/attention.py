"""Attention over sharded tokens: queries stay where they are, keys and values travel.

Each rank computes the outputs of its own queries, so it needs every key and value, and nothing else. Where they are many they
go from rank to rank in a ring; where they are few they are gathered for the kernel. They are not kept for the backward pass
but travel again, and their gradients are added up on the ranks that own them.
Cut batches and heads are no one else's business: there nothing travels.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate

from torchhalo.exchange.gather_dim import gather_dim, padded, scatter_dim
from torchhalo.exchange.memory import strides
from torchhalo.exchange.relayout import with_placements
from torchhalo.ops import randomness, ring_attention
from torchhalo.ops.attention_kernels import TOKENS, Inputs, Kernel, Saved, call, part_of
from torchhalo.ops.attention_work import SEEDS, Attention
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, simulation
from torchhalo.torch_internals.tracing import depend_on

aten = torch.ops.aten

LIMITS = (
    "causal attention gives the ranks of the first tokens less to do; dropout, and in a parallelized model what torch has no "
    "kernel for, are written out, block by block"
)


FUSED = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
FUSED_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
)


@handlers.register(
    *FUSED,
    traffic="keys and values, in a ring if they are many, else filled up to shards of one size",
    limits=LIMITS,
)
def attention(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of the fused kernels of `F.scaled_dot_product_attention`."""
    if _stock_draws(op, args, kwargs):
        return handlers.stock(op, args, kwargs)
    this = Attention(op, args, kwargs)
    metas = list(call(op, this.given, partial(fake_tensors.plain_result, op)))
    # torch 2.11's fake tensors have another dtype here than the kernels
    metas[1] = metas[1]._replace(dtype=torch.promote_types(this.query.dtype, torch.float32))
    tokens = int(this.query.shape[TOKENS])
    if metas[1].shape[TOKENS] > tokens:  # this kernel fills up its logsumexp, and does so on each rank
        shape = (*metas[1].shape[:TOKENS], tokens)
        metas[1] = dtensors.Meta(shape, strides(shape, torch.contiguous_format), metas[1].dtype)
    kept = [index for index, meta in enumerate(metas) if isinstance(meta, dtensors.Meta)]  # others are numbers, or nothing
    names = [result.name for result in op._schema.returns]
    kernel, extra = this.kernel()
    if not this.has_kernel:  # torch writes it out in products
        metas[0] = metas[0]._replace(stride=strides(metas[0].shape, torch.contiguous_format))

    def finish(out: torch.Tensor, sums: torch.Tensor, extra: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if not metas[1].shape[TOKENS]:  # nobody asked for it
            sums = sums.narrow(TOKENS, 0, 0)
        seeds = [extra[0] if this.drops and names[index] in SEEDS else None for index in kept[2:]]
        rest = (_number(seed, metas[index], out) for seed, index in zip(seeds, kept[2:], strict=True))
        return out, sums.view(*sums.shape, *metas[1].shape[3:]), *rest

    if not this.takes_part:
        found = (dtensors.local(this.query).new_empty(0),) * len(kept)
    else:
        run = ring_attention.forward if this.in_ring else _gathered
        found = simulation.per_rank(finish, *run(this, kernel, extra), extra)
    for index, shard in zip(kept, found, strict=True):
        placements = this.roles if index < 2 else [Replicate()] * this.mesh.ndim
        metas[index] = dtensors.wrap(shard, this.mesh, placements, metas[index])
    return tuple(metas)


def _stock_draws(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether random numbers are left to stock DTensor, and this call draws some."""
    return randomness.torch_stream() and bool(handlers.named(op, args, kwargs)["dropout_p"])


def _number(seed: torch.Tensor | None, meta: dtensors.Meta, like: torch.Tensor) -> torch.Tensor:
    """What the op returns besides: the seed as the integers that hold the one of its kernel, or what nobody reads."""
    if seed is None:
        return like.new_empty(meta.shape, dtype=meta.dtype)
    return seed.reshape(1).expand(prod(meta.shape)).clone().view(meta.dtype).view(meta.shape)


def _gathered(this: Attention, kernel: Kernel, extra: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's output and logsumexp (batch, heads, queries), with all keys at once."""
    key, value = gather_dim((this.key, this.value), TOKENS)
    mask = None if this.mask is None else dtensors.local(this.mask)

    def on_rank(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        extra: tuple[torch.Tensor, ...],
        *coordinate: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part = part_of(this.rows(coordinate), this.keys, this.causal)
        near = [t.narrow(TOKENS, 0, part.keys.size) for t in (key, value)]
        if query.numel() and near[0].numel():
            out, sums = kernel.forward(part, Inputs(query, near[0], near[1], mask, extra))
            return out.to(query.dtype), sums
        shape = query.shape[:3]
        out = query.new_zeros([*shape, value.shape[3]])
        return depend_on(out, key), query.new_zeros(shape, dtype=torch.promote_types(query.dtype, torch.float32))

    coordinate = process_groups.coordinate(this.mesh)
    assert coordinate is not None
    return simulation.per_rank(on_rank, dtensors.local(this.query), key, value, mask, extra, *coordinate)


@handlers.register(
    *FUSED_BACKWARD,
    traffic="keys and values again, and their gradients, each once in a ring, else filled up to shards of one size",
    limits=LIMITS,
)
def attention_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of their gradients."""
    if _stock_draws(op, args, kwargs):
        return handlers.stock(op, args, kwargs)
    this = Attention(op, args, kwargs)
    grad_name = next(iter(this.given))
    saved = tuple(dtensors.local(with_placements(this.given[name], this.roles)) for name in (grad_name, "out", "logsumexp"))
    wanted = [*this.given.get("grad_input_mask", [True] * 3)]
    biased = wanted[3:] == [True] and this.mask is not None
    tensors = [t for t in (this.query, this.key, this.value, this.mask) if t is not None][: 3 + biased]
    kernel, extra = this.kernel()
    if not this.takes_part:
        found = [dtensors.local(this.query).new_empty(0)] * len(tensors)
    elif this.in_ring:
        found = ring_attention.backward(this, kernel, extra, saved, biased)
    else:
        found = _gathered_backward(this, kernel, extra, saved, biased)
    grads: list[DTensor | None] = []
    for shard, tensor in zip(found, tensors, strict=True):
        shape = tuple(tensor.shape)
        # where the tensor is whole and the queries are not, each rank has a summand
        placements = [
            Partial() if p == Replicate() != role else p for p, role in zip(tensor.placements, this.roles, strict=True)
        ]
        meta = dtensors.Meta(shape, strides(shape, torch.contiguous_format), tensor.dtype)
        grads.append(dtensors.wrap(shard, this.mesh, placements, meta))
    grads += [None] * (len(wanted) - len(grads))
    return tuple(grad if want else None for grad, want in zip(grads, wanted, strict=True))


def _gathered_backward(
    this: Attention, kernel: Kernel, extra: tuple[torch.Tensor, ...], saved: tuple[torch.Tensor, ...], biased: bool
) -> list[torch.Tensor]:
    """This rank's gradients of query, key, value and, where wanted, mask, with all keys at once."""
    # Else a compiler would keep the keys of the forward pass: it gathers the same.
    key, value = gather_dim((this.key, this.value), TOKENS, saved[0])
    mask = None if this.mask is None else dtensors.local(this.mask)
    every = int(this.key.shape[TOKENS])

    def on_rank(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        saved: tuple[torch.Tensor, ...],
        extra: tuple[torch.Tensor, ...],
        *coordinate: int,
    ) -> tuple[torch.Tensor, ...]:
        part = part_of(this.rows(coordinate), this.keys, this.causal)
        near = [t.narrow(TOKENS, 0, part.keys.size) for t in (key, value)]
        if query.numel() and near[0].numel():
            grads = kernel.backward(part, Inputs(query, near[0], near[1], mask, extra), Saved(*saved), biased)
            if biased and mask is not None and mask.shape[-1] > 1:
                grads[3] = padded(grads[3], mask.ndim - 1, every)
        else:
            grads = [
                depend_on(torch.zeros_like(t), key) for t in (query, key, value, *([mask] if biased else [])) if t is not None
            ]
        grads[1:3] = (padded(grad, TOKENS, every) for grad in grads[1:3])
        return tuple(grads)

    coordinate = process_groups.coordinate(this.mesh)
    assert coordinate is not None
    found = simulation.per_rank(on_rank, dtensors.local(this.query), key, value, mask, saved, extra, *coordinate)
    query, key, value, *of_mask = found
    key, value = scatter_dim((key, value), (this.key, this.value), TOKENS)
    return [query, key, value, *of_mask]


handlers.register_composites(
    __name__,
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_attention_math.default,
    traffic="that of the kernel, or of the products, that it is made of",
)


@handlers.register(aten._native_multi_head_attention.default, traffic="that of the attention", limits=LIMITS)
def multi_head_attention(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Handler of what `torch.nn.MultiheadAttention` calls when it has no gradient to give: the same step by step."""
    query, key, value, size, heads, weight, bias, out_weight, out_bias, mask, wanted, mean, kind = handlers.bind(
        op, args, kwargs
    )
    if mask is not None and kind == 2:  # for every head of every sample
        mask = mask.flatten(0, 1)
    out, weights = F.multi_head_attention_forward(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        embed_dim_to_check=size,
        num_heads=heads,
        in_proj_weight=weight,
        in_proj_bias=bias,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=out_weight,
        out_proj_bias=out_bias,
        training=False,
        key_padding_mask=mask if kind == 1 else None,
        need_weights=wanted,
        attn_mask=None if kind == 1 else mask,
        average_attn_weights=mean,
    )
    return out.transpose(0, 1), weights


@handlers.register(aten._transformer_encoder_layer_fwd.default, traffic="that of the attention", limits=LIMITS)
def encoder_layer(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of what `torch.nn.TransformerEncoderLayer` calls when it has no gradient to give: the same step by step."""
    source, size, heads, *attention, gelu, norm_first, eps = handlers.bind(op, args, kwargs)[:10]
    scale_1, shift_1, scale_2, shift_2, up, up_bias, down, down_bias, mask, kind = handlers.bind(op, args, kwargs)[10:]

    def mix(x: torch.Tensor) -> torch.Tensor:
        return aten._native_multi_head_attention.default(x, x, x, size, heads, *attention, mask, False, True, kind)[0]

    def feed(x: torch.Tensor) -> torch.Tensor:
        return F.linear((F.gelu if gelu else F.relu)(F.linear(x, up, up_bias)), down, down_bias)

    steps = (mix, (scale_1, shift_1)), (feed, (scale_2, shift_2))
    for step, norm in steps:
        if norm_first:
            source = source + step(F.layer_norm(source, (size,), *norm, eps))
        else:
            source = F.layer_norm(source + step(source), (size,), *norm, eps)
    return source
