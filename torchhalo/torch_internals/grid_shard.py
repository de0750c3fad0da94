"""`GridShard`: the placement of a dim that was flattened from several of which one is cut, and how DTensor's own ops meet it.

The tokens of an image that is cut along its width are a grid: some columns of every row. `Shard` cannot say so. DTensor's rules
look at which dim is cut, not at which elements of it a rank has; for ops that treat all elements of a dim alike, such as
additions and matrix products, they hold for a grid as well, and are asked with a `Shard` in its place. For other ops the tensor
is moved to `Shard` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed.checkpoint.planner_helpers as planner_helpers
import torch.distributed.tensor._api as api
import torch.distributed.tensor._dispatch as dispatch
import torch.distributed.tensor._redistribute as redistribution
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_leaves, tree_map_only

from torchhalo.torch_internals.calls import Op
from torchhalo.torch_internals.dtensors import bare

aten = torch.ops.aten


class GridShard(Placement):
    """Dim ``dim`` was flattened from dims of ``sizes``, and this axis of the mesh cuts the one at ``part``.

    All axes that cut the dim have the same sizes. That one of ``sizes`` is cut as `Shard` would cut it; or, if it counts
    windows of ``window`` elements of a dim that was cut as `Shard` does it, each window is where most of it was.

    Example:
        The tokens of an image of 6 x 8, cut along its width over two ranks; a rank has half of every row:

        >>> GridShard(1, sizes=(6, 8), part=1)
        GridShard(dim=1, sizes=(6, 8), part=1)
    """

    dim: int

    #: Whether there has been any: until then nobody need look for them.
    met = False

    def __init__(self, dim: int, sizes: Sequence[int], part: int, window: int = 1):
        super().__init__()
        self.dim, self.sizes, self.part, self.window = dim, tuple(sizes), part, window
        GridShard.met = True

    def at(self, dim: int) -> GridShard:
        """The same grid along another dim."""
        return GridShard(dim, self.sizes, self.part, self.window)

    def along(self, other: GridShard) -> bool:
        """Whether the two may cut the same dim, along two axes."""
        return self.sizes == other.sizes and (self.part != other.part or self.window == other.window)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GridShard) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        window = "" if self.window == 1 else f", window={self.window}"
        return f"GridShard(dim={self.dim}, sizes={self.sizes}, part={self.part}{window})"

    def __reduce__(self) -> Any:
        return GridShard, self._key

    @property
    def _key(self) -> tuple[int, tuple[int, ...], int, int]:
        return self.dim, self.sizes, self.part, self.window


class WindowShard(GridShard):
    """A grid of one dim: ``size`` windows, each where most of it was. A rank owns a box, but not the one that `Shard` gives it.

    Example:
        A dim of 70 elements, cut over four ranks into 18, 18, 18 and 16, split into windows of seven: of the ten windows they
        get 3, 2, 3 and 2.

        >>> WindowShard(3, size=10, window=7)
        WindowShard(dim=3, size=10, window=7)
    """

    def __init__(self, dim: int, size: int, window: int):
        super().__init__(dim, (size,), 0, window)

    def at(self, dim: int) -> WindowShard:
        return WindowShard(dim, self.sizes[0], self.window)

    def __repr__(self) -> str:
        return f"WindowShard(dim={self.dim}, size={self.sizes[0]}, window={self.window})"

    def __reduce__(self) -> Any:
        return WindowShard, (self.dim, self.sizes[0], self.window)


#: The placements that give each rank a box of its own.
BOXES = (Shard, WindowShard)

Mover = Callable[[DTensor, Sequence[Placement]], DTensor]
Chunker = Callable[[tuple[int, ...], tuple[Placement, ...], tuple[int, ...], tuple[int, ...]], Sequence[Placement]]

_movers: list[tuple[Mover, Chunker]] = []


def move_grids_by(mover: Mover, chunker: Chunker) -> None:
    """Who knows layouts tells how a tensor gets other placements, and what a grid becomes where only a `Shard` will do.

    Args:
        mover: Called with a tensor and its new placements.
        chunker: Called with shape, placements, shape of the mesh, and the shape again.
    """
    _movers[:] = [(mover, chunker)]


def has_grid(placements: Sequence[Placement]) -> bool:
    """Whether any of ``placements`` is a `GridShard`."""
    return GridShard.met and any(isinstance(p, GridShard) for p in placements)


def has_folded(placements: Sequence[Placement]) -> bool:
    """Whether any of ``placements`` is a grid of several dims, so that a rank does not own a box."""
    return GridShard.met and any(isinstance(p, GridShard) and not isinstance(p, WindowShard) for p in placements)


def cuts(placement: Placement, dim: int) -> bool:
    """Whether ``placement`` cuts ``dim``, as a whole or as a grid."""
    return isinstance(placement, (Shard, GridShard)) and placement.dim == dim


def at(placement: Placement, dim: int) -> Placement:
    """The same cut of another dim."""
    return placement.at(dim) if isinstance(placement, GridShard) else Shard(dim)


def is_grid(value: object) -> bool:
    """Whether ``value`` is a DTensor with a `GridShard`."""
    return isinstance(value, DTensor) and has_grid(value._spec.placements)


#: Ops that treat all elements of a dim alike, unless it is one of those that they are told to work along; pointwise ones too.
_BLIND: set[Op] = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.linalg_vector_norm.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.lift_fresh.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.zero_.default,
}


def is_blind(op: Op) -> bool:
    """Whether DTensor's own rule for ``op`` holds for a grid: the op does not mind which elements of a dim a rank has."""
    return op in _BLIND or torch.Tag.pointwise in op.tags


def _specs(*schemas: Any) -> Iterator[DTensorSpec]:
    return (leaf for leaf in tree_leaves(schemas, is_leaf=_is_spec) if isinstance(leaf, DTensorSpec))


def _is_spec(value: object) -> bool:
    return isinstance(value, DTensorSpec)


def _with(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    return DTensorSpec(spec.mesh, tuple(placements), spec.tensor_meta)


def _mapped(schema: OpSchema, change: Callable[[DTensorSpec], DTensorSpec]) -> OpSchema:
    args, kwargs = (
        tree_map_only(DTensorSpec, change, part, is_leaf=_is_spec) for part in (schema.args_schema, schema.kwargs_schema)
    )
    return OpSchema(schema.op, args, kwargs, schema_info=schema.schema_info)


def _without_grids(spec: DTensorSpec) -> DTensorSpec:
    if not has_grid(spec.placements):
        return spec
    shape = tuple(map(int, spec.shape))
    return _with(spec, _movers[0][1](shape, tuple(spec.placements), spec.mesh.shape, shape))


class _NotBlind(Exception):
    """DTensor's rule wants a grid to be anything but what it is."""


def propagate_grids(stock: Callable[[OpSchema], OutputSharding], schema: OpSchema) -> OutputSharding:
    """What ``stock`` makes of ``schema``, in which there may be grids."""
    if not any(has_grid(spec.placements) for spec in _specs(schema.args_schema, schema.kwargs_schema)):
        return stock(schema)
    if is_blind(schema.op):
        try:
            return _blindly(stock, schema)
        except _NotBlind:
            pass
    plain = _mapped(schema, _without_grids)
    found = stock(plain)
    if writes(schema.op) and has_grid(next(_specs(schema.args_schema)).placements):
        raise NotImplementedError(f"{schema.op} writes to a tensor whose tokens are a grid: {schema}")
    if found.redistribute_schema is None:
        found.redistribute_schema = plain
    found.needs_redistribute = True
    return found


def _blindly(stock: Callable[[OpSchema], OutputSharding], schema: OpSchema) -> OutputSharding:
    """What ``stock`` makes of ``schema`` with a `Shard` for each grid, and of the result the other way round."""
    given = list(_specs(schema.args_schema, schema.kwargs_schema))
    leading = given[:1] if writes(schema.op) else sorted(given, key=lambda spec: prod(spec.shape))
    grids: dict[int, GridShard] = {}
    for spec in leading:  # what is written to, or else the largest, keeps its grid
        grids |= {axis: p for axis, p in enumerate(spec.placements) if isinstance(p, GridShard)}
    mixed = any(isinstance(spec.placements[axis], Shard) for spec in given for axis in grids)
    if not grids or (mixed and not writes(schema.op) and not any(grid.part for grid in grids.values())):
        raise _NotBlind  # a rank has a run of elements, and next to none need move to make that a `Shard`

    def disguised(spec: DTensorSpec) -> DTensorSpec:
        return _with(spec, [Shard(p.dim) if isinstance(p, GridShard) else p for p in spec.placements])

    def found_out(spec: DTensorSpec) -> DTensorSpec:
        placements = [
            grids[axis].at(p.dim) if axis in grids and isinstance(p, Shard) else p for axis, p in enumerate(spec.placements)
        ]
        for p in placements:
            if isinstance(p, GridShard):
                along = (q for q in placements if getattr(q, "dim", None) == p.dim)
                if spec.shape[p.dim] != prod(p.sizes) or any(not isinstance(q, GridShard) or not q.along(p) for q in along):
                    raise _NotBlind
        return _with(spec, placements)

    plain = _mapped(schema, disguised)
    found = stock(plain)
    wanted = _mapped(found.redistribute_schema or plain, found_out)
    pairs = zip(given, _specs(wanted.args_schema, wanted.kwargs_schema), strict=True)
    changed = [old.placements != new.placements for old, new in pairs]
    if any(changed):
        if changed[0] and writes(schema.op):
            raise _NotBlind
        found.redistribute_schema, found.needs_redistribute = wanted, True
    else:
        found.redistribute_schema, found.needs_redistribute = None, False
    if found.output_spec is not None:
        found.output_spec = tree_map_only(DTensorSpec, found_out, found.output_spec, is_leaf=_is_spec)
    return found


def writes(op: Op) -> bool:
    """Whether ``op`` writes to one of its arguments."""
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in op._schema.arguments)


def _redistribute(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def redistribute_local_tensor(
        shard: torch.Tensor, current: DTensorSpec, target: DTensorSpec, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not has_grid(current.placements) and not has_grid(target.placements):
            return stock(shard, current, target, *args, **kwargs)
        return _movers[0][0](DTensor(bare(shard), current, requires_grad=False), target.placements)._local_tensor

    return redistribute_local_tensor


_kept: list[Callable[[], None]] = []


def know_grids(on: bool) -> None:
    """Let DTensor's propagation and redistribution know grids, or no more."""
    while _kept:
        _kept.pop()()
    if not on:
        return
    propagator = DTensor._op_dispatcher.sharding_propagator
    stock = propagator.propagate_op_sharding_non_cached

    def propagate(schema: OpSchema) -> OutputSharding:
        return propagate_grids(stock, schema)

    _replace(propagator, "propagate_op_sharding_non_cached", propagate)
    _replace(propagator, "propagate_op_sharding", type(propagator.propagate_op_sharding)(propagate))
    for module in (api, dispatch, redistribution):
        _replace(module, "redistribute_local_tensor", _redistribute(module.redistribute_local_tensor))
    for module in (api, planner_helpers):
        name = "compute_local_shape_and_global_offset"
        _replace(module, name, _refuse_grids(getattr(module, name)))


def _refuse_grids(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Of new tensors and checkpoints, which would take a grid for the whole."""

    def compute_local_shape_and_global_offset(
        shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], *args: Any, **kwargs: Any
    ) -> Any:
        if has_grid(placements):
            raise NotImplementedError(
                f"a tensor cannot be made or saved with the placements {tuple(placements)} of tokens: call "
                "x.redistribute(placements=[Shard(dim)]) first, or name other placements"
            )
        return stock(shape, mesh, placements, *args, **kwargs)

    return compute_local_shape_and_global_offset


def _replace(owner: Any, name: str, value: object) -> None:
    before = getattr(owner, name)
    setattr(owner, name, value)
    _kept.append(lambda: setattr(owner, name, before))
