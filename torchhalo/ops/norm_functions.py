"""Group and instance norm as a model calls them, on a GPU.

There torch's functions, and torch's formula of their gradient, copy what is channels-last to contiguous memory and return it
so; instance norm is made of a batch norm of one sample, whose kernels leave most of a large GPU idle. The kernels here want
none of that: so in models that are parallelized these two functions meet their ops at once. Under autocast the result is
float32 as torch's, but no input is copied to that.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from torchhalo.exchange.memory import memory_format
from torchhalo.kernels import group_norm
from torchhalo.torch_internals import autograd, dtensors, handlers, overrides

FORWARD = torch.ops.aten.native_group_norm.default
BACKWARD = torch.ops.aten.native_group_norm_backward.default


@overrides.replace(F.group_norm)
def _group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    device, dtype = input.device.type, input.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.promote_types(dtype, torch.float32)
    copied = dtype != input.dtype or memory_format(input.shape, input.stride()) != torch.contiguous_format
    if not copied or not _direct(input, num_groups, weight, bias):
        return F.group_norm(input, num_groups, weight, bias, eps)
    with torch.autocast(device, enabled=False):
        return _applied(F.group_norm, input, weight, bias, num_groups, eps, dtype)


@overrides.replace(F.instance_norm)
def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    tracked = running_mean is not None or running_var is not None
    groups = input.shape[1] if input.ndim > 2 else 0
    if tracked or not use_input_stats or not _direct(input, groups, weight, bias):
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return _applied(F.instance_norm, input, weight, bias, groups, eps, input.dtype)


def _direct(input: torch.Tensor, groups: int, *parameters: torch.Tensor | None) -> bool:
    """Whether the kernels serve these tensors; what torch would refuse, torch is to refuse."""
    return (
        isinstance(input, DTensor)
        and input.ndim > 2
        and input.is_floating_point()
        and groups > 0
        and input.shape[1] % groups == 0
        and prod(input.shape[1:]) > groups
        and all(each is None or each.shape == input.shape[1:2] for each in parameters)
        and not autograd.forward_mode()
        and group_norm.usable(dtensors.local(input))
    )


def _applied(*args: Any) -> torch.Tensor:
    out: torch.Tensor = _GroupNorm.apply(*args)
    return out


class _GroupNorm(torch.autograd.Function):
    """The ops, called as the dispatcher calls them, but for the dtype of the result, which they cannot be told."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., torch.Tensor],
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        groups: int,
        eps: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.function, ctx.eps, ctx.dtype = function, eps, dtype
        ctx.sizes = *input.shape[:2], prod(input.shape[2:]), groups
        out, mean, rstd = _called(FORWARD, input, weight, bias, *ctx.sizes, eps, dtype=dtype)
        ctx.save_for_backward(input, weight, bias, mean, rstd)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        input, weight, bias, mean, rstd = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:4]
        if not torch.is_grad_enabled():
            return None, *_called(BACKWARD, grad, input, mean, rstd, weight, *ctx.sizes, list(wanted)), None, None, None
        # A gradient of the gradient is wanted: torch's own function has one, if any.
        options = {"num_groups": ctx.sizes[-1]} if ctx.function is F.group_norm else {}
        out = ctx.function(input.to(ctx.dtype), weight=weight, bias=bias, eps=ctx.eps, **options)
        leaves = [tensor for tensor, each in zip((input, weight, bias), wanted, strict=True) if each]
        found = iter(torch.autograd.grad(out, leaves, grad, create_graph=True))
        return None, *(next(found) if each else None for each in wanted), None, None, None


def _called(op: handlers.Op, *args: Any, **kwargs: Any) -> Any:
    return handlers.table()[op](op, args, kwargs)
