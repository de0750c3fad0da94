"""Complex numbers: views as pairs of real ones, conjugates, and pointwise ops with a complex number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.layout import has_layout, is_cut
from torchhalo.ops.inplace import Copied
from torchhalo.ops.pointwise import pointwise
from torchhalo.ops.slicing import local_view
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, stale_views

aten = torch.ops.aten


@handlers.register(
    aten.view_as_real.default,
    aten.view_as_complex.default,
    traffic="nothing",
    limits="raises where real and imaginary parts are on different ranks",
)
def view_as(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten.view_as_real`` and ``aten.view_as_complex``: a view of each shard."""
    (input,) = args
    if not has_layout(input):
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input)
    if op is aten.view_as_complex.default and is_cut(input.device_mesh, input.placements, input.ndim - 1):
        raise NotImplementedError(
            f"view_as_complex: the last dim must be whole on every rank, the input of shape {tuple(input.shape)} has the "
            f"placements {input.placements}: shard another dim"
        )
    return local_view(input, op, (), result, input.placements)


@dataclass
class Opposite(Copied):
    """Where a tensor comes from that is the conjugate or the negative of its base."""

    op: handlers.Op

    def write(self, value: DTensor) -> None:
        aten.copy_(self.base, self.op(value))


@handlers.register(aten._conj.default, aten._neg_view.default, traffic="nothing")
def opposite(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of ``aten._conj`` and ``aten._neg_view``, in plain torch views that are computed when they are read.

    Collectives do not read them so, hence each shard is computed at once.
    """
    (input,) = args
    if not has_layout(input):
        return handlers.stock(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input)
    shard = op(dtensors.local(input)).clone()
    return stale_views.set_origin(dtensors.wrap(shard, input.device_mesh, input.placements, result), Opposite(input, op), input)


handlers.register_composites(
    __name__,
    aten.conj.default,
    aten.imag.default,
    aten.real.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    traffic="nothing",
)


@handlers.wrap_handler(
    aten.add.Scalar,
    aten.div.Scalar,
    aten.mul.Scalar,
    aten.pow.Scalar,
    aten.pow.Tensor_Scalar,
    aten.rsub.Scalar,
    aten.sub.Scalar,
)
def with_complex_number(handler: handlers.Handler) -> handlers.Handler:
    """A complex number beside a tensor, which DTensor cannot look up its rules with."""

    def wrapper(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if any(isinstance(arg, complex) for arg in args):
            return pointwise(op, args, kwargs)
        return handler(op, args, kwargs)

    return wrapper
