"""All of a convolution that is not data, worked out once for each signature: placements, exchange, and each rank's work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.layout import layout
from torchhalo.exchange.memory import croppable, memory_format, strides
from torchhalo.exchange.parts import forced_parts, worthwhile
from torchhalo.exchange.plan import Plan, exchange_between
from torchhalo.geometry import Box
from torchhalo.ops.convolution_work import Convolution, Local, Work
from torchhalo.torch_internals import caching, dtensors, fake_tensors

aten = torch.ops.aten

#: How many times the weight must fit into a shard for another one of it in memory not to matter.
LIGHT = 64
#: From how many bytes on gradients of channels-last images are computed in parts on a CPU, sooner than all else: with its halo
#: joined a shard takes one core 1.6 to 3 times as long as plain (2.96 for 128 channels on 42x170), in parts 1.2 to 1.6 (1.17).
LAST = 2**19


class Role(NamedTuple):
    """What one mesh axis does in a convolution: the placement along it of every tensor involved."""

    input: Placement
    weight: Placement
    bias: Placement
    output: Placement
    grad_output: Placement
    grad_input: Placement
    grad_weight: Placement
    grad_bias: Placement


def _roles(
    input: Sequence[Placement], weight: Sequence[Placement], mesh: DeviceMesh, config: Convolution
) -> tuple[list[Role], int]:
    """What each axis does, with as little moved as its placements allow, and how many groups are left to each rank."""
    r, s, p = Replicate(), Shard, Partial()
    from_channels, to_channels = (0, 1) if config.transposed else (1, 0)
    groups = config.groups
    whole = Role(r, r, r, r, r, r, r, r)
    by_input = Role(s(1), s(from_channels), r, p, r, s(1), s(from_channels), r)
    by_output = Role(r, s(to_channels), s(0), s(1), s(1), p, s(to_channels), s(0))
    by_group = Role(s(1), s(0), s(0), s(1), s(1), s(1), s(0), s(0))
    roles = []
    for axis, (x, w) in enumerate(zip(input, weight, strict=True)):
        if isinstance(x, Shard) and x.dim != 1:
            role = Role(x, r, r, x, x, x, p, p)
        elif groups > 1:
            divisible = groups % mesh.size(axis) == 0
            role = by_group if divisible and (x == s(1) or w == s(0)) else whole
        elif x == s(1) or w == s(from_channels):
            role = by_input
        else:
            role = by_output if w == s(to_channels) else whole
        if role is by_group:
            groups //= mesh.size(axis)
        roles.append(role)
    return roles, groups


class Program:
    """All of a convolution, forward or backward, that is not data: worked out once for each signature."""

    def __init__(
        self,
        mesh: DeviceMesh,
        backward: bool,
        in_parts: bool | None,
        input: dtensors.Signature,
        weight: dtensors.Signature,
        bias: dtensors.Signature | None,
        *arguments: Any,
    ) -> None:
        config = Convolution.of(len(weight.meta.shape) - 2, arguments)
        config.check_output_padding()
        (self.output,) = fake_tensors.plain_result(aten.convolution.default, input, weight, bias, *config.spread())
        # Fake tensors do not know the gradients' memory format in every release; the kernels give them the output's.
        format = memory_format(self.output.shape, self.output.stride)
        roles, groups = _roles(input.placements, weight.placements, mesh, config)
        self.input, self.weight, self.bias, self.placements, self.grad_output, *self.grads = zip(*roles, strict=True)
        self.summed = [axis for axis, role in enumerate(roles) if isinstance(role.output, Partial)]
        self.config = config._replace(groups=groups)
        read = layout(input.meta.shape, mesh, self.input)
        written = layout(self.output.shape, mesh, self.grad_output if backward else self.placements)
        source, target = (written, read) if backward else (read, written)
        mirrored = config.transposed != backward
        self.exchange = exchange_between(source, target, config.windows(weight.meta.shape[2:], mirrored))
        self.sparse = mirrored
        self.source_format = memory_format(*((self.output if backward else input.meta)[:2]))
        self.input_format = memory_format(*input.meta[:2])
        self._in_parts, self._backward = in_parts, backward
        self._kernel, self._weights = weight.meta.shape[2:], prod(weight.meta.shape)
        self._simple = config.groups == 1 or weight.meta.shape[:2] == (config.groups, 1)
        self._device, self._itemsize = input.device, input.meta.dtype.itemsize
        shapes = (input.meta.shape, format), (weight.meta.shape, format), (self.output.shape[1:2], torch.contiguous_format)
        metas = [dtensors.Meta(shape, strides(shape, each), input.meta.dtype) for shape, each in shapes]
        self.result = dtensors.Result(mesh, self.placements, self.output)
        self.gradients = [dtensors.Result(mesh, *pair) for pair in zip(self.grads, metas, strict=True)]
        self._work: dict[tuple[int, ...], Work] = {}

    def work(self, coordinate: tuple[int, ...], plan: Plan) -> Work:
        """What the rank at ``coordinate`` computes."""
        if coordinate not in self._work:
            self._work[coordinate] = self._worked_out(coordinate, plan)
        return self._work[coordinate]

    def _worked_out(self, coordinate: tuple[int, ...], plan: Plan) -> Work:
        dims = self.exchange.dims
        owned, target = self.exchange.source.owned(coordinate).shape, self.exchange.target.owned(coordinate)
        rest = [size for dim, size in enumerate(owned) if dim not in dims]
        if 0 in (plan.needs.size, target.size, *rest):
            return Work()
        # Beside a large target the copy of a small source shows too: a stem that reads 6 MiB and writes 32 takes an H200 1.05
        # of the plain time in parts and 1.08 with the copy, and 1.00 and 1.13 of its memory.
        larger = max(prod(owned), target.size) * self._itemsize
        slow = self._backward and self._device == "cpu" and self.source_format == torch.channels_last
        enough = larger >= LAST if slow and self.config.groups == 1 else worthwhile(larger, self._device)
        in_parts = enough if self._in_parts is None else self._in_parts
        own = Box(tuple(target.spans[dim] for dim in dims))
        local = Local(self.config, self.exchange, self.sparse, plan, own)
        work = local.work(in_parts, croppable(owned, self.source_format))
        if work.bulk is None or (self._backward and not work.bulk.recipe.untouched):
            return work
        # On a GPU the strips run beside the bulk, and products after it: 2% to 5% of the time of 64 and 128 channels.
        heavy = self._device == "cpu" or self._weights * LIGHT > prod(owned)
        if heavy and self._backward and owned[0] == self.config.groups == 1:
            work = work._replace(products=local.products(self._kernel))
        if self._simple and work.strips:
            work = work._replace(edge=local.edge(self._kernel, chain.from_iterable(work.strips)))
        return work


def program_of(backward: bool, input: DTensor, weight: DTensor, bias: DTensor | None, *rest: Any) -> Program:
    signatures = (None if tensor is None else dtensors.signature(tensor) for tensor in (input, weight, bias))
    arguments = (tuple(map(int, value)) if isinstance(value, (list, tuple)) else value for value in rest)
    return caching.cached_on_mesh(input.device_mesh, Program, backward, forced_parts(), *signatures, *arguments)
