"""Attention over sharded tokens: queries stay where they are, keys and values travel.

Each rank computes the outputs of its own queries, so it needs every key and value, and nothing else: they are gathered for the
kernel, are not kept for the backward pass but gathered again, and their gradients are added up on the ranks that own them.
Cut batches and heads are no one else's business: there nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.gather_dim import gather_dim, padded, scatter_dim
from torchhalo.exchange.layout import layout
from torchhalo.exchange.memory import strides
from torchhalo.exchange.relayout import with_placements
from torchhalo.geometry import Span
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution, simulation
from torchhalo.torch_internals.tracing import depend_on

aten = torch.ops.aten

BATCH, HEADS, TOKENS = 0, 1, 2
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
LIMITS = "keys and values are whole on every rank while it computes; dropout of sharded tokens raises"


def _roles(query: DTensor, key: DTensor, value: DTensor) -> list[Placement]:
    """For each axis, what it cuts: batch, heads or queries; nothing, if none of the three tensors is cut along such a dim."""
    tensors = (query, key, value)
    roles: list[Placement] = []
    for placements in zip(*(t.placements for t in tensors), strict=True):
        cut = (p for p in placements if isinstance(p, Shard) and p.dim in (BATCH, HEADS, TOKENS))
        roles.append(next(cut, Replicate()))
    parts = prod(query.device_mesh.size(axis) for axis, role in enumerate(roles) if role == Shard(HEADS))
    if query.shape[HEADS] != key.shape[HEADS] and any(t.shape[HEADS] % parts for t in tensors):
        # heads that share a key would be on two ranks
        roles = [Replicate() if role == Shard(HEADS) else role for role in roles]
    return roles


class _Attention:
    """An attention op and its arguments, put where each rank can compute its part."""

    def __init__(self, op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]):
        names = [argument.name for argument in op._schema.arguments]
        self.given = dict(zip(names, handlers.bind(op, args, kwargs), strict=True))
        self.masked = next((name for name in ("attn_mask", "attn_bias") if name in self.given), None)
        given = {name: self.given[name] for name in ("query", "key", "value")}
        if self.masked and self.given[self.masked] is not None:
            given[self.masked] = self.given[self.masked]
        found = dict(zip(given, dtensors.as_dtensors("scaled_dot_product_attention", **given), strict=True))
        self.given |= found
        query, key, value = found["query"], found["key"], found["value"]
        self.mesh = query.device_mesh
        self.takes_part = process_groups.coordinate(self.mesh) is not None
        self.roles = _roles(query, key, value)
        self._check_dropout()
        self.query = with_placements(query, self.roles)
        # Along these axes the keys are gathered; where the queries are cut and the keys are not, there is nothing to gather.
        self.axes = [
            axis
            for axis, role in enumerate(self.roles)
            if role == Shard(TOKENS) and any(isinstance(t.placements[axis], Shard) for t in (key, value))
        ]
        placements = [
            Replicate() if role == Shard(TOKENS) and axis not in self.axes else role for axis, role in enumerate(self.roles)
        ]
        self.key, self.value = with_placements(key, placements), with_placements(value, placements)
        self.mask = self._cut_mask(found.get(self.masked or ""))
        self.owned = layout(query.shape, self.mesh, self.roles)

    def _check_dropout(self) -> None:
        if self.given["dropout_p"] and any(isinstance(role, Shard) for role in self.roles):
            raise NotImplementedError(
                f"scaled_dot_product_attention: dropout_p (={self.given['dropout_p']}) must be 0 for sharded tensors, since "
                "each rank would drop others: set it to 0, or use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            )

    def _cut_mask(self, mask: DTensor | None) -> DTensor | None:
        if mask is None:
            return None
        dims = [role.dim + mask.ndim - 4 if isinstance(role, Shard) else -1 for role in self.roles]
        return with_placements(mask, [Shard(dim) if dim >= 0 and mask.shape[dim] > 1 else Replicate() for dim in dims])

    @property
    def causal(self) -> bool:
        """Whether each rank must be told how far its queries look."""
        return bool(self.given["is_causal"]) and Shard(TOKENS) in self.roles

    def run(self, kernel: Any, *others: torch.Tensor) -> Any:
        """Call ``kernel`` on each rank with its span of queries, the local arguments by name, and ``others``."""
        key, value = gather_dim((self.key, self.value), TOKENS, self.axes)
        mask = None if self.mask is None else dtensors.local(self.mask)

        def on_rank(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: torch.Tensor | None,
            others: Sequence[torch.Tensor],
            coordinate: tuple[int, ...],
        ) -> Any:
            mine = self.owned.owned(coordinate).spans[TOKENS]
            query, key, value, *dense = (_with_dense_rows(tensor) for tensor in (query, key, value, *others))
            local = dict(self.given, query=query, key=key, value=value)
            if self.masked:
                local[self.masked] = None if mask is None else _aligned(_with_dense_rows(mask))
            if self.causal:
                local |= self._look_back(mine, query, key, value)
            return kernel(mine, local, *dense)

        return simulation.per_rank(
            on_rank, dtensors.local(self.query), key, value, mask, others, process_groups.coordinate(self.mesh)
        )

    def _look_back(self, mine: Span, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
        """The arguments with which queries ``mine`` of a causal attention see the keys up to their own place and no others."""
        seen = min(mine.stop, key.shape[TOKENS])
        near = {"key": key.narrow(TOKENS, 0, seen), "value": value.narrow(TOKENS, 0, seen)}
        if self.masked is None:
            if mine.size and seen != mine.stop:
                raise NotImplementedError("scaled_dot_product_attention: causal attention with more queries than keys")
            return near  # this kernel lets the last query see the last key
        late = torch.arange(seen, device=query.device) > torch.arange(mine.start, mine.stop, device=query.device)[:, None]
        bias = _aligned(query.new_zeros(mine.size, seen).masked_fill_(late, float("-inf")))
        return {**near, "is_causal": False, self.masked: bias.expand(*query.shape[:2], -1, -1)}


def _with_dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as the kernels read it: they step by one along the last dim, and torch asks that of the whole tensor alone."""
    return tensor if tensor.shape[-1] == 1 or tensor.stride(-1) == 1 else tensor.contiguous()


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """``mask`` with rows that begin where the kernels of CUDA want them to."""
    if mask.device.type == "cpu" or (mask.stride(-1) == 1 and not any(step % 16 for step in mask.stride()[:-1])):
        return mask
    return torch.constant_pad_nd(mask, [0, -mask.shape[-1] % 16])[..., : mask.shape[-1]]


def _call(op: handlers.Op, given: dict[str, Any], function: Callable[..., Any] | None = None) -> Any:
    """``op``, or a function with its schema, with arguments by name, some of which the schema wants by place."""
    named = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    by_place = (value for name, value in given.items() if name not in named)
    return (function or op)(*by_place, **{name: given[name] for name in named})


@handlers.register(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    traffic="keys and values, filled up to shards of one size",
    limits=LIMITS,
)
def attention(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Handler of the fused kernels of `F.scaled_dot_product_attention`."""
    this = _Attention(op, args, kwargs)
    metas = list(_call(op, this.given, partial(fake_tensors.plain_result, op)))
    # torch 2.11's fake tensors have another dtype here than the kernels
    metas[1] = metas[1]._replace(dtype=torch.promote_types(this.query.dtype, torch.float32))
    tokens = int(this.query.shape[TOKENS])
    if metas[1].shape[TOKENS] > tokens:  # this kernel fills up its logsumexp, and does so on each rank
        shape = (*metas[1].shape[:TOKENS], tokens)
        metas[1] = dtensors.Meta(shape, strides(shape, torch.contiguous_format), metas[1].dtype)
    kept = [index for index, meta in enumerate(metas) if isinstance(meta, dtensors.Meta)]  # others are numbers, or nothing

    def kernel(mine: Span, local: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        query, key, value = (local[name] for name in ("query", "key", "value"))
        if query.numel() and key.numel():
            found = _call(op, local)
            sums = found[1].narrow(TOKENS, 0, min(found[1].shape[TOKENS], mine.size))
        else:
            shapes = [*query.shape[:3], value.shape[3]], [*query.shape[:3], *metas[1].shape[3:]]
            out, sums = (query.new_zeros(shape, dtype=meta.dtype) for shape, meta in zip(shapes, metas, strict=False))
            found = [depend_on(out, key), *[None] * (len(metas) - 1)]
            sums = sums if metas[1].shape[TOKENS] else sums.narrow(TOKENS, 0, 0)
        rest = (query.new_zeros(metas[i].shape, dtype=metas[i].dtype) if found[i] is None else found[i] for i in kept[2:])
        return found[0], sums, *rest

    found = this.run(kernel) if this.takes_part else [dtensors.local(this.query).new_empty(0)] * len(kept)
    for index, shard in zip(kept, found, strict=True):
        placements = this.roles if index < 2 else [Replicate()] * this.mesh.ndim
        metas[index] = dtensors.wrap(shard, this.mesh, placements, metas[index])
    return tuple(metas)


@handlers.register(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
    traffic="keys and values again, and their gradients, filled up to shards of one size",
    limits=LIMITS,
)
def attention_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Handler of their gradients."""
    this = _Attention(op, args, kwargs)
    grad_name = next(iter(this.given))
    saved = {name: with_placements(this.given[name], this.roles) for name in (grad_name, "out", "logsumexp")}
    wanted = [*this.given.get("grad_input_mask", [True] * 3)]
    biased = wanted[3:] == [True] and this.mask is not None

    def kernel(mine: Span, local: dict[str, Any], *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        local |= dict(zip(saved, shards, strict=True))
        local = {name: dtensors.local(v) if isinstance(v, DTensor) else v for name, v in local.items()}
        query, key, value = (local[name] for name in ("query", "key", "value"))
        sums = local["logsumexp"]
        if op is EFFICIENT_BACKWARD:  # as its forward kernel fills it up
            local["logsumexp"] = torch.constant_pad_nd(sums, [0, -sums.shape[TOKENS] % 32], float("inf"))
        if "max_q" in local:
            local |= {"max_q": query.shape[TOKENS], "max_k": key.shape[TOKENS]}
        if "grad_input_mask" in local:
            local["grad_input_mask"] = [True, True, True, biased]
        if query.numel() and key.numel():
            grads = list(_call(op, local))
        else:
            mask = [local["attn_bias"]] if biased else []
            grads = [depend_on(torch.zeros_like(t), key) for t in (query, key, value, *mask)]
        every = this.key.shape[TOKENS]
        grads[1:3] = (padded(grad, TOKENS, every) for grad in grads[1:3])
        return tuple(grads[: 3 + biased])

    tensors = [t for t in (this.query, this.key, this.value, this.mask) if t is not None][: 3 + biased]
    if this.takes_part:
        query, key, value, *mask = this.run(kernel, *(dtensors.local(t) for t in saved.values()))
        key, value = scatter_dim((key, value), (this.key, this.value), TOKENS, this.axes)
        found = [query, key, value, *mask]
    else:
        found = [dtensors.local(this.query).new_empty(0)] * len(tensors)
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


handlers.register_composites(
    __name__,
    aten.scaled_dot_product_attention.default,
    aten._scaled_dot_product_attention_math.default,
    aten.matmul.default,
    aten.einsum.default,
    traffic="that of the kernel, or of the products and views, that it is made of",
)


@handlers.register(
    aten.bmm.default,
    aten.baddbmm.default,
    traffic="nothing, but the second factor where both are cut and the first along its rows, and partial sums that meet a "
    "factor that is cut",
    limits="other placements that do not fit are DTensor's own affair",
)
def bmm(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.bmm``: rows stay, as those of the queries of an attention that is written out."""
    *rest, first, second = args
    if isinstance(first, DTensor) and isinstance(second, DTensor) and first.device_mesh == second.device_mesh:
        # DTensor may gather the other factor instead, where that is small.
        first, second = _added_up(first, second), _added_up(second, first)
        for dim in (1, 2):
            cut = [axis for axis, p in enumerate(second.placements) if p == Shard(dim)]
            if cut and all(first.placements[axis] == Shard(1) for axis in cut):
                second = _made_whole(second, dim, cut)
    return handlers.stock(op, (*rest, first, second), kwargs)


def _added_up(tensor: DTensor, other: DTensor) -> DTensor:
    """``tensor`` without partial sums, if ``other`` is cut: such as keys times values of a linear attention, which are few."""
    return redistribution.reduce_partial(tensor) if any(isinstance(p, Shard) for p in other.placements) else tensor


def _made_whole(tensor: DTensor, dim: int, axes: Sequence[int]) -> DTensor:
    placements = [Replicate() if axis in axes else p for axis, p in enumerate(tensor.placements)]
    takes_part = process_groups.coordinate(tensor.device_mesh) is not None
    shard = gather_dim((tensor,), dim, axes)[0] if takes_part else dtensors.local(tensor)
    meta = dtensors.meta(tensor)
    return dtensors.wrap(shard, tensor.device_mesh, placements, meta)


@handlers.register(
    aten.linear.default,
    traffic="nothing if the weight is whole",
    limits="arrives in inference mode only: elsewhere it is a matrix product between two views, and these move tokens that are "
    "cut inside a batch of more than one",
)
def linear(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.linear``: every token is on its own."""
    given = dict(zip(("input", "weight", "bias"), handlers.bind(op, args, kwargs), strict=True))
    input, weight, bias = dtensors.as_dtensors("linear", **given)
    (result,) = fake_tensors.plain_result(op, input, weight, bias)
    parameters = [t for t in (weight, bias) if t is not None]
    if any(p != Replicate() for t in parameters for p in t.placements) or any(
        p.is_partial() or p == Shard(input.ndim - 1) for p in input.placements
    ):
        return op.decompose(*args, **kwargs)
    out = op(dtensors.local(input), dtensors.local(weight), None if bias is None else dtensors.local(bias))
    return dtensors.wrap(out, input.device_mesh, input.placements, result)


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
