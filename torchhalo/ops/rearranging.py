"""What moves elements without changing them: flip, roll, repeat, unfold; and triangles."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchhalo.exchange.layout import is_cut
from torchhalo.exchange.pieces import gather_pieces
from torchhalo.exchange.task import Task
from torchhalo.exchange.windowed import adjoint, exact, fetch, forward, hull
from torchhalo.geometry import Piece, Pieces, Span, Window
from torchhalo.ops.slicing import STALE, local_view
from torchhalo.torch_internals import dtensors, fake_tensors, handlers, process_groups, redistribution, simulation

aten = torch.ops.aten


def _moved(input: DTensor, relations: dict[int, Pieces], result: dtensors.Meta) -> DTensor:
    (out,) = forward(lambda r, task: gather_pieces(r, task, relations), input, dict(relations), [result], region=exact)
    return out


@handlers.register(aten.flip.default, traffic="what changes owner")
def flip(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.flip``: ``1234 -> 4321``."""
    input, dims = args
    (result,) = fake_tensors.plain_result(op, input, dims)
    sizes = {dim % input.ndim: input.shape[dim] for dim in dims}
    relations = {dim: Pieces((Piece(Span(0, size), size - 1, -1),)) for dim, size in sizes.items()}
    return _moved(input, relations, result)


@handlers.register(aten.rot90.default, traffic="what changes owner")
def rot90(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.rot90``, by flips and a transposition."""
    input, times, (first, second) = handlers.bind(op, args, kwargs)
    fake_tensors.plain_result(op, input, times, [first, second])
    times %= 4
    if times in (0, 2):
        return aten.flip(input, [first, second]) if times else aten.clone(input)
    return aten.transpose(aten.flip(input, [second if times == 1 else first]), first, second)


@handlers.register(aten.roll.default, traffic="what changes owner")
def roll(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.roll``: ``1234 -> 3412`` with shift 2."""
    input, shifts, dims = handlers.bind(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input, shifts, dims)
    if not dims:
        return _rolled_flat(input, shifts[0] % max(1, input.numel()), input.ndim - 1)
    relations = {}
    for dim in {dim % input.ndim for dim in dims}:
        size = input.shape[dim]
        shift = sum(s for s, d in zip(shifts, dims, strict=True) if d % input.ndim == dim) % max(1, size)
        relations[dim] = Pieces((Piece(Span(0, shift), size - shift), Piece(Span(shift, size), 0)))
    return _moved(input, relations, result)


def _rolled_flat(input: DTensor, shift: int, dim: int) -> DTensor:
    """Roll the elements as if the dims up to ``dim`` were one: what leaves a row at its end enters the next one."""
    if not input.numel():
        return aten.clone(input)
    size = input.shape[dim]
    rows, shift = divmod(shift, size)
    if dim == 0:
        return aten.roll(input, [shift], [0])
    ahead = _rolled_flat(input, rows, dim - 1)
    if not shift:
        return ahead
    over = _rolled_flat(input, rows + 1, dim - 1)
    return aten.cat([over.narrow(dim, size - shift, shift), ahead.narrow(dim, 0, size - shift)], dim)


@handlers.register(aten.repeat.default, traffic="what a rank's part of the result reads and it does not own")
def repeat(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.repeat``: ``12 -> 121212``."""
    input, repeats = args
    (result,) = fake_tensors.plain_result(op, input, repeats)
    while input.ndim < len(repeats):
        input = input.unsqueeze(0)
    relations = {
        dim: Pieces(tuple(Piece(Span(k * size, (k + 1) * size), 0) for k in range(count)))
        for dim, (size, count) in enumerate(zip(input.shape, repeats, strict=True))
        if is_cut(input.device_mesh, input.placements, dim)
    }
    rest = [1 if dim in relations else count for dim, count in enumerate(repeats)]
    return forward(
        lambda r, task: gather_pieces(r, task, relations).repeat(rest), input, dict(relations), [result], region=exact
    )[0]


@handlers.register(aten.unfold.default, traffic="the halo of the input", limits=f"in place: not reached; {STALE}")
def unfold(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.unfold``, `Tensor.unfold`: ``1234 -> 12 23 34`` with size 2, step 1."""
    input, dim, size, step = args
    (result,) = fake_tensors.plain_result(op, *args)
    if not input.ndim or not is_cut(input.device_mesh, input.placements, dim % input.ndim):
        return local_view(input, op, args[1:], result, input.placements)
    dim, mesh = dim % input.ndim, input.device_mesh
    placements = redistribution.reduced_placements(input.placements)
    region = fetch(input, {dim: Window(size, step)}, result.shape, hull)

    def kernel(region: torch.Tensor) -> torch.Tensor:
        if region.shape[dim]:
            return region.unfold(dim, size, step)
        return region.unsqueeze(-1).expand(*region.shape, size)

    inside = process_groups.coordinate(mesh) is not None
    return dtensors.wrap(simulation.per_rank(kernel, region) if inside else region, mesh, placements, result)


@handlers.register(aten.unfold_backward.default, traffic="the halo of the gradient, on its way back")
def unfold_backward(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.unfold_backward``."""
    grad, sizes, dim, size, step = args
    (result,) = fake_tensors.plain_result(op, *args)
    dim %= max(1, len(sizes))
    last = Shard(len(sizes))
    placements = [Replicate() if p == last else p for p in redistribution.reduced_placements(grad.placements)]

    def kernel(shard: torch.Tensor, task: Task) -> torch.Tensor:
        shape = list(task.owned.shape)
        if dim in task.dims:
            shape[dim] = task.held(dim).size
        return aten.unfold_backward(shard, shape, dim, size, step) if shard.numel() else shard.new_zeros(shape)

    return adjoint(kernel, redistribution.redistribute(grad, placements, op), {dim: Window(size, step)}, result)


@handlers.register(aten.tril.default, aten.triu.default, traffic="nothing")
def triangle(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.tril`` and ``aten.triu``."""
    input, diagonal = handlers.bind(op, args, kwargs)
    (result,) = fake_tensors.plain_result(op, input, diagonal)

    def kernel(region: torch.Tensor, task: Task) -> torch.Tensor:
        rows, columns = task.owned.spans[-2:]
        return op(region, diagonal + rows.start - columns.start)

    return forward(kernel, input, {}, [result])[0]
