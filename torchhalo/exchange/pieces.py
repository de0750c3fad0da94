"""Local kernels of ops that move elements: flips, rolls, padding modes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torchhalo.exchange.task import Task
from torchhalo.geometry import Pieces


def gather_pieces(region: torch.Tensor, task: Task, relations: Mapping[int, Pieces]) -> torch.Tensor:
    """The rank's outputs, cut from the region piece by piece along each dim: a kernel for `forward`, best with `exact`.

    Args:
        region: As the kernel gets it.
        relations: As `forward` got them; the pieces cover all outputs. Dims that are not sharded are cut too.

    Example:
        Roll by two along dim 3 (below autograd, in a handler)::

            ring = {3: Pieces((Piece(Span(0, 2), first=size - 2), Piece(Span(2, size), first=0)))}
            (y,) = forward(lambda r, task: gather_pieces(r, task, ring), x, ring, [result], region=exact)
            x_grad = adjoint(lambda g, task: scatter_pieces(g, task, ring), y_grad, ring, source, region=exact)
    """
    for dim, relation in relations.items():
        parts = []
        for piece in relation.pieces:
            mine = piece.outputs & task.outputs.spans[dim]
            if mine.size:
                part = region[_along(dim, task.where(dim, piece.image(mine)))]
                if piece.sign == 0:
                    part = part.expand([mine.size if d == dim else -1 for d in range(part.ndim)])
                parts.append(part.flip(dim) if piece.sign == -1 else part)
        region = torch.cat(parts, dim) if len(parts) > 1 else parts[0] if parts else region.narrow(dim, 0, 0)
    return region


def scatter_pieces(grad: torch.Tensor, task: Task, relations: Mapping[int, Pieces]) -> torch.Tensor:
    """The adjoint of `gather_pieces`: each output's gradient is added where it was read. A kernel for `adjoint`."""
    for dim, relation in relations.items():
        parts = []
        for piece in relation.pieces:
            mine = piece.outputs & task.outputs.spans[dim]
            if mine.size:
                part = grad[_along(dim, mine.within(task.outputs.spans[dim].start))]
                part = part.sum(dim, keepdim=True) if piece.sign == 0 else part
                parts.append((task.where(dim, piece.image(mine)), part.flip(dim) if piece.sign == -1 else part))
        shape = list(grad.shape)
        shape[dim] = task.region.shape[task.dims.index(dim)] if dim in task.dims else task.owned.spans[dim].size
        # The largest piece often covers all there is: then it need not be added to zeros.
        parts.sort(key=lambda part: part[1].shape[dim], reverse=True)
        whole = bool(parts) and parts[0][1].shape[dim] == shape[dim]
        if whole and len(parts) == 1:
            grad = parts[0][1]
            continue
        grad = parts[0][1].clone() if whole else grad.new_zeros(shape)
        for cut, part in parts[whole:]:
            grad[_along(dim, cut)].add_(part)
    return grad


def _along(dim: int, cut: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, cut)
