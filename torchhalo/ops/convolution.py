"""Convolution and transposed convolution, 1-d to 3-d, forward and backward.

Along each spatial dim two sides are related by ``dense = sparse * stride - padding + k * dilation``: a convolution reads the
dense side and writes the sparse one, a transposed convolution the reverse. Forward, the ranks exchange halos of the input;
backward, of ``grad_output``, and each rank takes the gradients of the (input, output) pairs whose input it owns. So every pair
is counted on one rank, the input's halo is sent once and never saved, and the same local call serves all four cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo import dispatch
from torchhalo.exchange import Exchange, Plan, anchor
from torchhalo.geometry import Box, Mirror, Span, Window
from torchhalo.layout import layout
from torchhalo.windowed import exchange_between, laid_out, memory_format, run, strides

aten = torch.ops.aten


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
    input: Sequence[Placement], weight: Sequence[Placement], mesh: DeviceMesh, config: _Convolution
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


class _Convolution(NamedTuple):
    """The arguments of a convolution that are not tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, ndim: int, args: Sequence[Any]) -> _Convolution:
        stride, padding, dilation, transposed, output_padding, groups = args

        def each(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values) if len(values) == ndim else tuple(values) * ndim

        return cls(each(stride), each(padding), each(dilation), transposed, each(output_padding), groups)

    def windows(self, kernel: Sequence[int], mirrored: bool) -> dict[int, Window | Mirror]:
        """The window of each spatial dim; its output is the sparse side, or the dense one if ``mirrored``."""
        parameters = zip(kernel, self.stride, self.padding, self.padding, self.dilation, strict=True)
        windows = (Window(*parameter) for parameter in parameters)
        return {dim: window.mirror if mirrored else window for dim, window in enumerate(windows, start=2)}

    @property
    def name(self) -> str:
        return f"conv{'_transpose' if self.transposed else ''}{len(self.stride)}d"

    def check_output_padding(self) -> None:
        """Let the smallest plain convolution object to an output padding that torch checks in its kernels only."""
        if any(extra >= max(s, d) for extra, s, d in zip(self.output_padding, self.stride, self.dilation, strict=True)):
            one = torch.ones([1] * (len(self.stride) + 2))
            aten.convolution(one, one, None, *self._replace(padding=(0,) * len(self.stride), groups=1).spread())

    def spread(self) -> tuple[Any, ...]:
        """As the aten ops take them."""
        return tuple(list(value) if isinstance(value, tuple) else value for value in self)


def _fit(window: Window, needs: Span, own: Span, grow_sparse: bool) -> tuple[Span, int, int]:
    """Grow ``needs`` until the kernel's own padding can stand for what is missing at both ends.

    The kernel pads (a transposed one crops) both ends of the dense side alike, and tolerates less than a stride too much at
    the end: ``0 <= before - after < stride`` must hold. What is grown is filled with zeros when it is assembled, which is
    cheaper than to pad or crop the other side, a whole shard.

    Returns:
        The grown span, the kernel's padding, and what that is too much at the end, a transposed kernel's output padding.
    """
    if not needs.size or not own.size:
        return needs, 0, 0
    stride = window.stride
    sparse, dense = (needs, own) if grow_sparse else (own, needs)
    reach = window.reach(sparse)
    before, after = dense.start - reach.start, reach.stop - dense.stop
    if grow_sparse:
        first = max(0, -(-max(-before, after - before) // stride))
        before += first * stride
        last = max(0, (before - after) // stride)
        after += last * stride
    else:
        last = max(0, after - before)
        after -= last
        first = max(0, before - after - stride + 1)
        before -= first
    return Span(needs.start - first, needs.stop + last), before, before - after


def _fitter(config: _Convolution, exchange: Exchange, grow_sparse: bool) -> Callable[..., tuple[Box, _Convolution]]:
    """What a rank must assemble of the exchange's source, and the local convolution that then gives just its target."""

    def fit(plan: Plan, coordinate: tuple[int, ...]) -> tuple[Box, _Convolution]:
        padding, output_padding, region = list(config.padding), list(config.output_padding), []
        own = exchange.target.owned(coordinate)
        for dim, window, needs in zip(exchange.dims, exchange.windows, plan.needs.spans, strict=True):
            window = window.window if isinstance(window, Mirror) else window
            assert isinstance(window, Window)
            span, padding[dim - 2], surplus = _fit(window, needs, own.spans[dim], grow_sparse)
            output_padding[dim - 2] = surplus if config.transposed else 0
            region.append(span)
        return Box(tuple(region)), config._replace(padding=tuple(padding), output_padding=tuple(output_padding))

    return fit


@dispatch.register(
    aten.convolution.default,
    traffic="the halo of the input",
    limits="groups that do not divide among the ranks that share the channels gather the channels",
)
def convolution(op: dispatch.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.convolution``."""
    config = _Convolution.of(args[1].ndim - 2, args[3:])
    input, weight, bias = dispatch.as_dtensors(config.name, input=args[0], weight=args[1], bias=args[2])
    config.check_output_padding()
    (result,) = dispatch.plain_result(op, input, weight, bias, *config.spread())
    mesh = input.device_mesh
    roles, groups = _roles(input.placements, weight.placements, mesh, config)
    placements = [role.output for role in roles]
    if done := dispatch.outside(input, [result], [placements]):
        return done[0]
    input = dispatch.redistribute(input, [role.input for role in roles], op)
    weight = dispatch.redistribute(weight, [role.weight for role in roles])
    bias = bias if bias is None else dispatch.redistribute(bias, [role.bias for role in roles])
    summed = [axis for axis, role in enumerate(roles) if isinstance(role.output, Partial)]

    target = layout(result.shape, mesh, placements)
    exchange = exchange_between(
        layout(input.shape, mesh, input.placements), target, config.windows(weight.shape[2:], mirrored=config.transposed)
    )

    def kernel(
        region: torch.Tensor,
        here: _Convolution,
        coordinate: tuple[int, ...],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        bias = None if any(coordinate[axis] for axis in summed) else bias
        shape = target.owned(coordinate).shape
        if region.numel() and weight.numel() and 0 not in shape:
            return aten.convolution(region, weight, bias, *here.spread())
        out = anchor(region.new_zeros(shape), region)
        return out if bias is None else out + bias.view(-1, *[1] * (out.ndim - 2))

    shard = laid_out(dispatch.local(input), input)
    fit = _fitter(config._replace(groups=groups), exchange, grow_sparse=config.transposed)
    out = run(kernel, shard, exchange, mesh, fit, dispatch.local(weight), None if bias is None else dispatch.local(bias))
    return dispatch.wrap(laid_out(out, result), mesh, placements, result)


@dispatch.register(aten.convolution_backward.default, traffic="the halo of the gradient of the output")
def convolution_backward(op: dispatch.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor | None, ...]:
    """Handler of ``aten.convolution_backward``."""
    bias_sizes, *parameters, mask = args[3:]
    config = _Convolution.of(args[2].ndim - 2, parameters)
    grad, input, weight = dispatch.as_dtensors(f"{config.name} backward", grad_output=args[0], input=args[1], weight=args[2])
    # Fake tensors do not know the gradients' memory format in every release; the kernels give them the output's.
    (output,) = dispatch.plain_result(aten.convolution.default, input, weight, None, *config.spread())
    format = memory_format(output.shape, output.stride)
    shapes = tuple(input.shape), tuple(weight.shape), tuple(bias_sizes or ())
    formats = format, format, torch.contiguous_format
    results = [dispatch.Meta(shape, strides(shape, f), input.dtype) for shape, f in zip(shapes, formats, strict=True)]
    mesh = input.device_mesh
    roles, groups = _roles(input.placements, weight.placements, mesh, config)
    placements = [
        [role.grad_input for role in roles],
        [role.grad_weight for role in roles],
        [role.grad_bias for role in roles],
    ]
    if dispatch.coordinate(mesh) is None:
        nothing = dispatch.local(input).new_empty(0)
        grads: list[torch.Tensor | None] = [nothing if wanted else None for wanted in mask]
    else:
        grad = dispatch.redistribute(grad, [role.grad_output for role in roles])
        grads = _local_gradients(config._replace(groups=groups), roles, grad, input, weight, mask)
    wrapped = [
        None if shard is None else dispatch.wrap(laid_out(shard, result), mesh, placement, result)
        for shard, placement, result in zip(grads, placements, results, strict=True)
    ]
    if wrapped[1] is not None:
        wrapped[1] = dispatch.redistribute(
            wrapped[1], [_returned(*pair) for pair in zip(placements[1], weight.placements, strict=True)]
        )
    return tuple(wrapped)


def _local_gradients(
    config: _Convolution, roles: list[Role], grad: DTensor, input: DTensor, weight: DTensor, mask: Sequence[bool]
) -> list[torch.Tensor | None]:
    mesh = input.device_mesh
    input = dispatch.redistribute(input, [role.input for role in roles])
    weight = dispatch.redistribute(weight, [role.weight for role in roles])
    exchange = exchange_between(
        layout(grad.shape, mesh, grad.placements),
        layout(input.shape, mesh, input.placements),
        config.windows(weight.shape[2:], mirrored=not config.transposed),
    )

    def kernel(
        region: torch.Tensor, here: _Convolution, coordinate: tuple[int, ...], input: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if region.numel() and input.numel() and weight.numel():
            wanted = [mask[0], mask[1], False]
            found = aten.convolution_backward(region, input, weight, None, *here.spread(), wanted)[:2]
        else:
            found = anchor(torch.zeros_like(input), region), anchor(torch.zeros_like(weight), region)
        return tuple(tensor for tensor, wanted in zip(found, mask, strict=False) if wanted)

    found: list[torch.Tensor] = []
    shard = laid_out(dispatch.local(grad), grad)
    if mask[0] or mask[1]:
        fit = _fitter(config, exchange, grow_sparse=not config.transposed)
        found += run(kernel, shard, exchange, mesh, fit, laid_out(dispatch.local(input), input), dispatch.local(weight))
    if mask[2]:
        found.append(shard.sum([0, *range(2, shard.ndim)]))
    grads = iter(found)
    return [next(grads) if wanted else None for wanted in mask]


def _returned(computed: Placement, owner: Placement) -> Placement:
    """The placement in which a weight gets its gradient: its own, or, if it is not sharded, one that saves a collective."""
    if isinstance(owner, Shard):
        return owner
    return Replicate() if isinstance(computed, Shard) else computed


dispatch.register_composites(
    __name__,
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    traffic="the halo of the input",
)
