"""Writing in place to a piece of a sharded tensor: the piece is written back to where it was cut from.

A piece along a cut dim is a copy, so plain DTensor loses what is written to it. Here it knows its base: after any op that
writes to it, or to a view of it, the values travel back, up to the tensor that the first piece was cut from. The gradient needs
nothing of its own, since autograd takes the piece's part of the gradient by the same slices and writes.

The other way round, a piece that was cut before its base was written to would show what was there before. No op can cut it
again behind the back of the others, since that communicates; so it raises when it is used.

Partial sums stay partial sums, as other tensors may share their memory: what an op writes to them is computed apart, and
written as summands that add up to it. So is what an op writes whose rule DTensor works out from others: with fewer rows than
ranks that rule may cut another dim, and the tensor that is written to would not follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchhalo.exchange.assembly import assemble, recipe
from torchhalo.exchange.layout import has_layout, layout
from torchhalo.exchange.plan import exchange_between
from torchhalo.exchange.relayout import relayout
from torchhalo.exchange.transfer import group_places, received, start
from torchhalo.geometry import Span, Window
from torchhalo.torch_internals import dtensors, handlers, process_groups, redistribution, simulation, stale_views, tracing
from torchhalo.torch_internals.tracing import depend_on

aten = torch.ops.aten

LATER = "a piece that was cut before its base was written to raises when it is used"
STALE = (
    "this tensor is a slice, selection or view along a sharded dim, and so a copy; the tensor that it was taken from was "
    "written to in place since: take it again after the write"
)


@dataclass
class View(stale_views.Origin):
    """Where a tensor comes from that shares the memory of its base's shard."""

    base: DTensor


@dataclass
class Cut(View):
    """Where a piece comes from: ``base[start : start + size * step : step]`` along ``dim``, or ``base[start]``."""

    dim: int
    start: int
    step: int
    size: int
    selected: bool

    @property
    def elements(self) -> range:
        """Which elements of ``dim`` these are."""
        return range(self.start, self.start + self.size * self.step, self.step)


@dataclass
class Copied(View):
    """Where a tensor comes from that is a view of its base in plain torch, and here a copy."""

    def write(self, value: DTensor) -> None:
        """Write what ``value`` shows over the base."""
        raise NotImplementedError


@dataclass
class Moved(Copied):
    """Where a view comes from for which elements changed owner: ``base.view(shape)``."""

    shape: tuple[int, ...]

    def write(self, value: DTensor) -> None:
        """Write ``value`` over the base."""
        base = self.base
        value = redistribution.reduce_partial(value)
        whole = dtensors.Meta(tuple(base.shape), base.stride(), value.dtype)
        kept = redistribution.reduced_placements(base.placements)
        back = redistribution.redistribute(relayout(value, whole, kept), base.placements)
        dtensors.local(base).copy_(dtensors.local(back))


def _same(piece: DTensor, other: DTensor) -> bool:
    """Whether two tensors are the same piece of the same tensor."""
    a, b = stale_views.get_origin(piece), stale_views.get_origin(other)
    if not isinstance(a, Cut) or not isinstance(b, Cut) or a.base is not b.base:
        return False
    return (a.dim, a.start, a.step, a.size, a.selected) == (b.dim, b.start, b.step, b.size, b.selected)


WRITERS, VIEWS = handlers.aliasing_ops()
_BANDS = {aten.tril_.default, aten.triu_.default}  # whose rule, on torch 2.15, refuses tensors that are cut
_overwriting = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}


@handlers.register(aten.detach.default, traffic="nothing")
def detach(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Handler of ``aten.detach``, which autograd calls for all that it saves: hundreds of times a step."""
    return dtensors.detached(args[0])


@handlers.wrap_handler(*VIEWS)
def track_views(handler: handlers.Handler) -> handlers.Handler:
    """A view of a piece, or of a view of one, knows it.

    In inference mode a view of a tensor from outside is one that autograd counts the versions of, which DTensor forgets.
    """

    def wrapper(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        base = args[0] if args else None
        counted = torch.is_inference_mode_enabled() and isinstance(base, DTensor) and not base.is_inference()
        if counted:
            with stale_views.version_counters():
                out = handler(op, args, kwargs)
        else:
            out = handler(op, args, kwargs)
        if isinstance(base, DTensor) and stale_views.get_origin(base) is not None:
            for tensor in out if isinstance(out, (list, tuple)) else (out,):
                if isinstance(tensor, DTensor) and tensor is not base and stale_views.get_origin(tensor) is None:
                    stale_views.set_origin(tensor, View(base), base)
        return out

    return wrapper


@handlers.wrap_handler(*WRITERS)
def write_through(handler: handlers.Handler) -> handlers.Handler:
    """What is written to a piece, or to a view of one, is written to its base too."""
    stock = getattr(handler, "__wrapped__", handler) is handlers.stock

    def wrapper(op: handlers.Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if stock and _alike(op, args, kwargs):
            op(*map(_shards, args), **kwargs)
            for tensor in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                follow(tensor, op, args)
            return args[0] if op._schema.returns else None
        targets = handlers.mutated_arguments(op, args, kwargs)
        if op not in _overwriting and (
            any(map(redistribution.is_partial, targets)) or (len(targets) == 1 and (op in _BANDS or not handlers.has_rule(op)))
        ):
            variant = handlers.functional_variant(op)
            if variant is not None:
                _write_summands(op, targets, variant(*args, **kwargs))
                return args[0] if op._schema.returns else None
        if op in _overwriting and targets:
            stale_views.clear_stale(targets[0])
        if op is aten.copy_.default and _same(*args[:2]):  # `y[a:b] += v` ends so
            return args[0]
        if _pointwise(op) and any(isinstance(arg, DTensor) for arg in args[1:]) and isinstance(args[0], DTensor):
            args = (args[0], *(_beside(arg, args[0]) for arg in args[1:]))
        out = handler(op, args, kwargs)
        for tensor in targets:
            follow(tensor, op, args)
        return out

    def follow(tensor: DTensor, op: handlers.Op, args: tuple[Any, ...]) -> None:
        if stale_views.get_origin(tensor) is not None:
            _write_back(tensor, known_everywhere(op, args))
        _mark_views_stale(tensor)

    return wrapper


def _write_summands(op: handlers.Op, targets: Sequence[DTensor], results: Any) -> None:
    """Write to partial sums what an op that writes nothing made of them."""
    for target, result in zip(targets, results if isinstance(results, (list, tuple)) else (results,), strict=True):
        if result.shape != target.shape or not torch.can_cast(result.dtype, target.dtype):
            raise RuntimeError(
                f"{op.overloadpacket.__name__}: a result of shape {tuple(result.shape)} and {result.dtype} can't be written to "
                f"a tensor of shape {tuple(target.shape)} and {target.dtype}"
            )
        aten.copy_(target, result)


@lru_cache(maxsize=4096)
def _pointwise(op: handlers.Op) -> bool:
    first = op._schema.arguments[0].alias_info
    return torch.Tag.pointwise in op.tags and first is not None and first.is_write


def _alike(op: handlers.Op, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an op may write to the shards as it would to the whole tensors, without asking DTensor for a rule.

    That is so for the foreach ops of optimizers too, of which each writes to hundreds of parameters.
    """
    if not _elementwise(op) or any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return False
    lists = [arg if isinstance(arg, (list, tuple)) else (arg,) for arg in args]
    if not all(isinstance(target, DTensor) for target in lists[0]):
        return False
    layouts = [(t.device_mesh, t.placements, t.shape) for t in lists[0]]
    if not all(isinstance(p, (Shard, Replicate)) for placements in {each[1] for each in layouts} for p in placements):
        return False
    return all(
        not isinstance(arg, torch.Tensor) or (isinstance(arg, DTensor) and (arg.device_mesh, arg.placements, arg.shape) == each)
        for others in lists[1:]
        for arg, each in zip(others, layouts, strict=False)
    )


def _shards(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_shards(each) for each in arg]
    return dtensors.local(arg) if isinstance(arg, DTensor) else arg


@lru_cache(maxsize=4096)
def _elementwise(op: handlers.Op) -> bool:
    """Whether an op writes to each element of its first argument, or of each tensor in it, what depends on those beside it."""
    if op._schema.name.startswith("aten::_foreach_"):
        return op._schema.name.endswith("_")
    return _pointwise(op) and torch.Tag.nondeterministic_seeded not in op.tags


def _beside(arg: Any, target: DTensor) -> Any:
    """An operand of a pointwise op, with the placements of the tensor that is written to.

    DTensor would choose the placements itself, and refuse or lose the write where they are not the target's.
    """
    if (
        not isinstance(arg, DTensor)
        or arg.ndim > target.ndim
        or not has_layout(arg)
        or not has_layout(target)
        or redistribution.is_partial(target)
    ):
        return arg
    more, placements = target.ndim - arg.ndim, list(target.placements)
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            alone = p.dim < more or (arg.shape[p.dim - more] == 1 and target.shape[p.dim] > 1)
            placements[axis] = Replicate() if alone else Shard(p.dim - more)
    return redistribution.redistribute(arg, placements)


def _lineage(tensor: DTensor) -> list[DTensor]:
    """The tensor, what it comes from, and so on."""
    origin = stale_views.get_origin(tensor)
    return [tensor] if origin is None else [tensor, *_lineage(origin.base)]


def _mark_views_stale(tensor: DTensor) -> None:
    """Mark stale the pieces that may hold what was in ``tensor`` before the write; not those known to be disjoint."""
    line = _lineage(tensor)
    for other in stale_views.living_views(line[-1]):
        if not any(other is each for each in line) and not _apart(_lineage(other), line):
            stale_views.mark_stale(other, STALE)


def _apart(line: list[DTensor], other: list[DTensor]) -> bool:
    """Whether two tensors were cut from one, along one dim, at different places."""
    cuts, others = ([o for o in map(stale_views.get_origin, each) if isinstance(o, Cut)] for each in (line, other))
    return any(a.base is b.base and a.dim == b.dim and _disjoint(a.elements, b.elements) for a in cuts for b in others)


def _disjoint(a: range, b: range) -> bool:
    if not a or not b or a[-1] < b[0] or b[-1] < a[0]:
        return True
    return a.step * b.step > 1 and not set(a).intersection(b)


def known_everywhere(op: handlers.Op, args: Sequence[Any]) -> DTensor | None:
    """What every rank knows to be in a piece after ``op``, or None if it must be told."""
    if op not in _overwriting:
        return None
    piece, value = args[0], args[1] if len(args) > 1 else 0
    if not isinstance(value, torch.Tensor):
        value = dtensors.local(piece).new_full((), value)
    value = dtensors.replicated(value, piece.device_mesh)
    if any(p != Replicate() for p in value.placements):
        return None
    shape = tuple(piece.shape)
    expanded = dtensors.Meta(shape, (0,) * len(shape), value.dtype)
    return dtensors.wrap(dtensors.local(value).expand(shape), value.device_mesh, value.placements, expanded)


def _write_back(tensor: DTensor, value: DTensor | None = None) -> None:
    """Write ``tensor``, or what is known to be in it, to its base, and that to its own."""
    origin = stale_views.get_origin(tensor)
    if isinstance(origin, Cut):
        write(origin, tensor if value is None else value)
    elif isinstance(origin, Copied):
        origin.write(tensor if value is None else value)
    if stale_views.get_origin(origin.base) is not None:
        _write_back(origin.base)


def write(cut: Cut, value: DTensor) -> None:
    """Write ``value`` over a piece of ``cut.base``; along the cut dim, nothing travels if every rank has all of it."""
    base, dim, mesh = cut.base, cut.dim, cut.base.device_mesh
    if process_groups.coordinate(mesh) is None:
        return
    value = aten.unsqueeze(value, dim) if cut.selected else value
    along = [p == Shard(dim) for p in base.placements]
    told = cut.selected or not any(p == Shard(dim) for p, a in zip(value.placements, along, strict=True) if a)
    value = redistribution.redistribute(
        value, [Replicate() if a and told else p for p, a in zip(base.placements, along, strict=True)]
    )
    target = layout(base.shape, mesh, base.placements)
    window = Window(1, stride=cut.step, before=-cut.start)
    exchange = exchange_between(layout(value.shape, mesh, value.placements), target, {dim: window.mirror})
    places, halo = group_places(exchange, mesh), start(dtensors.local(value), exchange, mesh)
    everything = Span(cut.start, cut.start + max(0, cut.size - 1) * cut.step + 1 if cut.size else cut.start, cut.step)

    def kernel(into: torch.Tensor, shard: torch.Tensor, halo: torch.Tensor | None, coordinate: tuple[int, ...]) -> torch.Tensor:
        plan = exchange.plan(coordinate, places)
        pieces = received(halo, shard, exchange, plan)
        own = target.owned(coordinate).spans[dim]
        mine = everything & own
        part = assemble(shard, pieces, exchange.dims, recipe(exchange, plan, plan.exact))
        if not exchange.dims:
            part = part.narrow(dim, (mine.start - cut.start) // cut.step if mine.size else 0, mine.size)
        into[(*[slice(None)] * dim, mine.within(own.start))].copy_(part)
        if halo is not None and not halo.numel() and tracing.is_tracing():
            into.copy_(depend_on(into, halo))
        return into

    simulation.per_rank(kernel, dtensors.local(base), dtensors.local(value), halo, process_groups.coordinate(mesh))
