"""Sampling at the points of a grid: an output reads what its point says, so an input that is cut in space is made whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.memory import laid_out
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution, simulation
from torchhalo.torch_internals.tracing import depend_on

aten = torch.ops.aten

LIMITS = "an input that is sharded in space is gathered, as what it reads is known only from the values of the grid"


class Role(NamedTuple):
    """What one mesh axis does in a sampling: the placement along it of every tensor involved."""

    input: Placement
    grid: Placement
    output: Placement
    grad_input: Placement
    grad_grid: Placement


def _roles(input: DTensor, grid: DTensor) -> list[Role]:
    """What each axis does. The output is cut as the grid is, and as the input is where the grid is whole."""
    r, s, p = Replicate(), Shard, Partial()
    roles = []
    for x, g in zip(input.placements, grid.placements, strict=True):
        if isinstance(g, Shard) and 0 < g.dim < grid.ndim - 1 and x not in (s(0), s(1)):
            roles.append(Role(r, g, s(g.dim + 1), p, g))
        elif isinstance(x, Shard) and x.dim > 1:
            roles.append(Role(r, s(x.dim - 1), x, p, s(x.dim - 1)))
        elif x == s(1):
            roles.append(Role(x, r, x, x, p))
        elif x == s(0) or g == s(0):
            roles.append(Role(s(0), s(0), s(0), s(0), s(0)))
        else:
            roles.append(Role(r, r, r, r, r))
    return roles


def _column(roles: Sequence[Role], name: str) -> list[Placement]:
    return [getattr(role, name) for role in roles]


@handlers.register(
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
    aten.cudnn_grid_sampler.default,
    traffic="the input, where it is sharded in space",
    limits=LIMITS,
)
def grid_sampler(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.grid_sampler_2d`` and its kin."""
    first, second, *rest = handlers.bind(op, args, kwargs)
    input, grid = dtensors.as_dtensors("grid_sample", input=first, grid=second)
    (result,) = fake_tensors.plain_result(op, input, grid, *rest)
    mesh, roles = input.device_mesh, _roles(input, grid)
    placements = _column(roles, "output")
    if done := dtensors.non_member_result(input, [result], [placements]):
        return done[0]
    input = redistribution.redistribute(input, _column(roles, "input"), op=op)
    grid = redistribution.redistribute(grid, _column(roles, "grid"))

    def on_rank(input: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        shape = *input.shape[:2], *grid.shape[1:-1]
        return op(input, grid, *rest) if 0 not in shape else depend_on(input.new_zeros(shape), input)

    out = simulation.per_rank(on_rank, dtensors.local(input), dtensors.local(grid))
    return dtensors.wrap(laid_out(out, result), mesh, placements, result)


@handlers.register(
    aten.grid_sampler_2d_backward.default,
    aten.grid_sampler_3d_backward.default,
    aten.cudnn_grid_sampler_backward.default,
    traffic="the input and its gradient, where it is sharded in space",
    limits=LIMITS,
)
def grid_sampler_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor | None, ...]:
    """Handler of ``aten.grid_sampler_2d_backward`` and its kin."""
    first, second, third, *rest = handlers.bind(op, args, kwargs)
    last = op is aten.cudnn_grid_sampler_backward.default  # there the gradient comes last
    tensors = (third, first, second) if last else (first, second, third)
    grad, input, grid = dtensors.as_dtensors("grid_sample backward", grad_output=tensors[0], input=tensors[1], grid=tensors[2])
    results = fake_tensors.plain_result(op, *((input, grid, grad) if last else (grad, input, grid)), *rest)
    mesh, roles = input.device_mesh, _roles(input, grid)
    homes = [input.placements, grid.placements]
    found = [_column(roles, "grad_input"), _column(roles, "grad_grid")]
    if process_groups.coordinate(mesh) is None:
        nothing = dtensors.local(input).new_empty(0)
        return tuple(
            None if meta is None else dtensors.wrap(nothing, mesh, redistribution.reduced_placements(home), meta)
            for meta, home in zip(results, homes, strict=True)
        )
    grad = redistribution.redistribute(grad, _column(roles, "output"))
    input = redistribution.redistribute(input, _column(roles, "input"), op=op)
    grid = redistribution.redistribute(grid, _column(roles, "grid"))

    def on_rank(grad: torch.Tensor, input: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not grad.numel() or not input.numel():
            empty = depend_on(torch.zeros_like(input), grad), depend_on(torch.zeros_like(grid), grad)
            return tuple(t for t, meta in zip(empty, results, strict=True) if meta is not None)
        grads = op(*((input, grid, grad) if last else (grad, input, grid)), *rest)
        return tuple(t for t, meta in zip(grads, results, strict=True) if meta is not None)

    shards = iter(simulation.per_rank(on_rank, dtensors.local(grad), dtensors.local(input), dtensors.local(grid)))
    out: list[DTensor | None] = []
    for meta, placements, home in zip(results, found, homes, strict=True):
        if meta is None:
            out.append(None)
            continue
        wrapped = dtensors.wrap(laid_out(next(shards), meta), mesh, placements, meta)
        out.append(redistribution.redistribute(wrapped, redistribution.reduced_placements(home)))
    return tuple(out)


handlers.register_composites(
    __name__, aten.grid_sampler.default, traffic="the input, where it is sharded in space", limits=LIMITS
)


@handlers.register(
    aten.affine_grid_generator.default,
    traffic="nothing",
    limits="the grid is sharded along the batch or not at all; torch makes the gradient of theta from plain tensors, which "
    "wants torch.distributed.tensor.experimental.implicit_replication",
)
def affine_grid_generator(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.affine_grid_generator``."""
    theta, size, corners = handlers.bind(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, theta, size, corners)
    theta = redistribution.redistribute(theta, [p if p == Shard(0) else Replicate() for p in theta.placements])

    def on_rank(theta: torch.Tensor) -> torch.Tensor:
        if not theta.numel():
            return theta.new_empty(0, *result.shape[1:])
        return op(theta, [theta.shape[0], *size[1:]], corners)

    out = simulation.per_rank(on_rank, dtensors.local(theta))
    return dtensors.wrap(out, theta.device_mesh, theta.placements, result)
