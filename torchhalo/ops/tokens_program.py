"""What only shapes tell of an op's call with tokens: the arguments that it has with the dims of the grids apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchhalo.exchange.grids import unfolded
from torchhalo.torch_internals import dtensors, handlers
from torchhalo.torch_internals.grid_shard import GridShard, WindowShard, has_grid, is_blind


class Named(NamedTuple):
    """Which arguments of an op are dims, or sizes, of a tensor argument.

    Attributes:
        dims: One dim, or several.
        sizes: All sizes of a tensor with as many dims.
        inserts: The dim is one that the tensors do not have, and these sizes do.
        tensors: Those that are tokens, by name, where others are not of their shape.
        kept: So many dims, the first, are what they are by their number, as that of the channels.
    """

    dims: str | None = None
    sizes: str | None = None
    inserts: bool = False
    tensors: tuple[str, ...] = ()
    kept: int = 0


class _Plain(NamedTuple):
    """What the shapes of a call depend on of a plain tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def described(value: Any) -> Any:
    """What the shapes of a call depend on of an argument; numbers with their types, as 1, 1.0 and True are equal."""
    if isinstance(value, DTensor):
        return dtensors.signature(value)
    if isinstance(value, torch.Tensor):
        return _Plain(tuple(map(int, value.shape)), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(described, value))
    if isinstance(value, torch.SymInt):
        value = int(value)
    return None if isinstance(value, torch.Generator) else (type(value), value) if isinstance(value, (int, float)) else value


class Program:
    """A call with the dims of the grids apart, as far as shapes tell it.

    Attributes:
        fits: Whether there is one: the op works along no dim that is several then, and along none of windows.
        windows: Whether there is a dim of windows, which no more than `WindowShard` tells where it is cut.
        tensors: Place and name of arguments, and their shapes apart: one, or one for each in a list; None for what stays.
        values: Place and name of other arguments that change, and what they become.
        metas: Of the results with the dims joined, once they are known.
    """

    def __init__(self, mesh: DeviceMesh, op: handlers.Op, given: tuple[Any, ...], about: Named | None) -> None:
        self.tensors: list[tuple[int, str, Any]] = []
        self.values: list[tuple[int, str, Any]] = []
        self.metas: tuple[Any, ...] | None = None
        self.windows = False
        self.fits = self._fit(op, handlers.named(op, given, {}), about)

    def _fit(self, op: handlers.Op, named: dict[str, Any], about: Named | None) -> bool:
        every = [each for value in named.values() for each in (value if _is_list(value) else (value,))]
        grids = [each for each in every if isinstance(each, dtensors.Signature) and has_grid(each.placements)]
        widest = max(grids, key=lambda each: prod(each.meta.shape))
        shape, placements, dims = unfolded(widest.meta.shape, widest.placements)
        of_windows = {p.dim for p in placements if isinstance(p, WindowShard)}
        self.windows = any(isinstance(p, GridShard) and p.window > 1 for each in grids for p in each.placements)
        several = [len(group) > 1 for group in dims]
        places = {name: place for place, name in enumerate(named)}
        if about is not None:
            if any(several[: about.kept]):
                return False
            groups = _inserted(dims, _bare(named[about.dims])) if about.inserts and about.dims else dims
            grids_apart = [shape[group.start : group.stop] for group in dims if len(group) > 1]
            for name, renumber in ((about.dims, _renumbered), (about.sizes, partial(_resized, apart=grids_apart))):
                if name is not None:
                    value = renumber(_bare(named[name]), groups)
                    if value is None:
                        return False
                    self.values.append((places[name], name, value))
            if about.dims and not about.inserts and not is_blind(op):
                along = self.values[0][2]
                if of_windows & set([along] if isinstance(along, int) else along or ()):
                    return False
        normalized = named.get("normalized_shape")
        if normalized is not None and (
            any(several[-len(normalized) :]) or of_windows & set(chain.from_iterable(dims[-len(normalized) :]))
        ):
            return False
        for name, value in named.items():
            parts = value if _is_list(value) else (value,)
            if not any(isinstance(part, (dtensors.Signature, _Plain)) for part in parts):
                continue
            if about is not None and about.tensors and name not in about.tensors:
                continue
            shapes = []
            for part in parts:
                shapes.append(_apart(part, widest.meta.shape, dims, shape))
                if shapes[-1] == ():
                    return False
            if any(shapes):
                self.tensors.append((places[name], name, tuple(shapes) if _is_list(value) else shapes[0]))
        return True


def _is_list(value: Any) -> bool:
    return type(value) is tuple and not (len(value) == 2 and isinstance(value[0], type))


def _bare(value: Any) -> Any:
    """A number, or several, without their types."""
    return [_bare(each) for each in value] if _is_list(value) else value[1] if type(value) is tuple else value


def _inserted(groups: Sequence[range], dim: int) -> list[range]:
    """The dims of the unfolded tensor for each of the folded one, both with one more at ``dim`` of the latter."""
    dim %= len(groups) + 1
    at = groups[dim].start if dim < len(groups) else groups[-1].stop
    return [*groups[:dim], range(at, at + 1), *(range(group.start + 1, group.stop + 1) for group in groups[dim:])]


def _resized(sizes: Sequence[int], groups: Sequence[range], apart: Sequence[Sequence[int]]) -> list[int] | None:
    """Sizes of a folded tensor as those of the unfolded one; None if they are not those of its grids, which are ``apart``."""
    if len(sizes) != len(groups):
        return None
    grids = iter(apart)
    found: list[int] = []
    for group, size in zip(groups, sizes, strict=True):
        parts = (size,) if len(group) == 1 else next(grids)
        if size not in (prod(parts), -1):
            return None
        found += parts
    return found


def _renumbered(dims: Any, groups: Sequence[range]) -> Any:
    """One dim, or several, of the folded tensor as those of the unfolded one; None if one dim would be several."""
    if isinstance(dims, int):
        group = groups[dims]
        return group.start if len(group) == 1 else None
    return dims and [dim for each in dims for dim in groups[each]]


def _apart(tensor: Any, widest: Sequence[int], groups: Sequence[range], shape: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of a tensor, which broadcasts to the shape ``widest``, with the dims of the grids apart.

    None if that is the shape that it has, or it is no tensor; empty if the tensor does not broadcast so.
    """
    if not isinstance(tensor, (dtensors.Signature, _Plain)):
        return None
    own = tensor.shape if isinstance(tensor, _Plain) else tensor.meta.shape
    more = len(widest) - len(own)
    if more < 0:
        return ()
    sizes: list[int] = []
    for dim, group in list(enumerate(groups))[more:]:
        size = own[dim - more]
        if len(group) > 1 and size not in (1, widest[dim]):
            return ()
        sizes += [size] if len(group) == 1 else [1] * len(group) if size == 1 else shape[group.start : group.stop]
    if isinstance(tensor, dtensors.Signature) and has_grid(tensor.placements):
        return tuple(sizes) if unfolded(own, tensor.placements).shape == tuple(sizes) else ()
    return None if len(sizes) == len(own) else tuple(sizes)
