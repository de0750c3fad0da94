"""Where torchhalo meets torch: the only file that touches private torch APIs.

Everything that a torch release may move is imported or called here and nowhere else, and ``tests/test_dispatch.py`` fails
loudly when one of them is gone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch._dispatch.python import no_python_dispatcher
from torch.distributed import _functional_collectives as funcol
from torch.distributed._local_tensor import local_tensor_mode, maybe_run_for_local_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
    redistribute_local_tensor,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from torchhalo import gathers

__all__ = [
    "Aside",
    "Collective",
    "Meta",
    "Origin",
    "Signature",
    "TorchDispatchMode",
    "Watcher",
    "after_backward",
    "aliasing_ops",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "around",
    "as_dtensors",
    "backward_number",
    "backward_step",
    "bound",
    "concrete",
    "coordinate",
    "counting",
    "disable",
    "enable",
    "enabled",
    "fiber_group",
    "forget_stock",
    "imagined",
    "key_value_store",
    "leaves",
    "local",
    "members",
    "mend",
    "mutated",
    "once",
    "origin",
    "outside",
    "per_rank",
    "plain_result",
    "plain_view",
    "prepared",
    "redistribute",
    "reduce_scatter",
    "reduced",
    "register",
    "register_composites",
    "registry",
    "relatives",
    "remember",
    "replicate_implicitly",
    "replicated",
    "running",
    "shapes_only",
    "signature",
    "simulated",
    "spoil",
    "start_all_reduce",
    "stock",
    "timeout",
    "traced",
    "tracing",
    "wait",
    "watched_by",
    "without_advice",
    "without_partial",
    "wrap",
]

SUPPORTED = (2, 11), (2, 16)

#: How many things are kept, of each kind, to be found again; then all are let go.
KEPT = 4096

Op = torch._ops.OpOverload
Handler = Callable[[Op, tuple[Any, ...], dict[str, Any]], object]
F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")


class Entry(NamedTuple):
    """A handled op as the docs list it: its family is the file in ``ops/`` that handles it."""

    op: Op
    family: str
    traffic: str
    limits: str


_handlers: dict[Op, Handler] = {}
_entries: dict[Op, Entry] = {}
_replaced: dict[Op, Handler | None] = {}
_around: dict[Op, list[Callable[[Handler], Handler]]] = {}


# Switching on and off.


def register(*ops: Op, traffic: str, limits: str = "") -> Callable[[F], F]:
    """Make the decorated function the handler of ``ops``: called as ``handler(op, args, kwargs)`` while enabled.

    Args:
        traffic: What travels between the ranks, for the docs; a phrase such as "the halo of the input".
        limits: What the op refuses or does worse than it could, for the docs; nothing if it has no such limits.
    """

    def keep(handler: F) -> F:
        for op in ops:
            _enter(op, handler, handler.__module__, traffic, limits)
        return handler

    return keep


def register_composites(module: str, *ops: Op, traffic: str, limits: str = "") -> None:
    """Take ``ops``, which `torch.inference_mode` leaves undecomposed, apart as autograd would.

    Args:
        module: The ``__name__`` of the file that handles what they are made of.
    """
    for op in ops:
        _enter(op, _decompose, module, traffic, limits)


def _decompose(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    return op.decompose(*args, **kwargs)


def _enter(op: Op, handler: Handler, module: str, traffic: str, limits: str) -> None:
    if op in _handlers:
        raise ValueError(f"{op} has a handler in {_entries[op].family} already, {module} gives it another")
    _table.cache_clear()
    _handlers[op] = handler
    _entries[op] = Entry(op, module.rpartition(".")[2], traffic, limits)


def around(*ops: Op) -> Callable[[F], F]:
    """Make the decorated function, from a handler to a handler, wrap whatever handles ``ops``: torchhalo or DTensor itself."""

    def keep(wrapper: F) -> F:
        for op in ops:
            _around.setdefault(op, []).append(wrapper)
        _table.cache_clear()
        return wrapper

    return keep


@lru_cache(maxsize=1)
def _table() -> dict[Op, Handler]:
    """The handlers with what is `around` them, and those of other ops that something is around."""
    found = {**_handlers, **_out_handlers()}
    for op, wrappers in _around.items():
        for wrapper in wrappers:
            found[op] = wrapper(found.get(op, stock))
    return {op: _noted(handler) for op, handler in found.items()}


class Call(NamedTuple):
    """An op and what it is called with."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.op.overloadpacket.__name__


_running: list[tuple[Op, tuple[Any, ...], dict[str, Any]]] = []


def _noted(handler: Handler) -> Handler:
    """``handler``, and while it runs, `running` tells of it."""

    def run(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        _running.append((op, args, kwargs))
        try:
            return handler(op, args, kwargs)
        finally:
            _running.pop()

    return run


def running() -> Call | None:
    """The op whose handler runs; the outermost one, where a handler calls other ops."""
    return Call(*_running[0]) if _running else None


def bound(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of ``op`` in the order of its schema, defaults filled in."""
    rest = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(arg.name, arg.default_value) for arg in rest)]


def mutated(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """The DTensors among the arguments that ``op`` writes to."""
    positions, names = _writes(op)
    written = [args[i] for i in positions if i < len(args)] + [kwargs[name] for name in names if name in kwargs]
    tensors = (t for arg in written for t in (arg if isinstance(arg, (list, tuple)) else (arg,)))
    return [t for t in tensors if isinstance(t, DTensor)]


@lru_cache(maxsize=4096)
def _writes(op: Op) -> tuple[list[int], list[str]]:
    arguments = list(enumerate(op._schema.arguments))
    written = [(i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]
    return [i for i, _ in written], [name for _, name in written]


def aliasing_ops() -> tuple[list[Op], list[Op]]:
    """The aten ops that write to a tensor, and those whose result is a view of one."""
    writers: list[Op] = []
    views: list[Op] = []
    for schema in torch._C._jit_get_all_schemas():
        tensors = [arg for arg in (*schema.arguments, *schema.returns) if "Tensor" in str(arg.type)]
        if not schema.name.startswith("aten::") or "Dict" in str(schema) or "t(a" in str(schema):
            continue
        marks = [arg.alias_info.is_write for arg in tensors if arg.alias_info is not None]
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
        if marks:
            (writers if any(marks) else views).append(getattr(packet, schema.overload_name or "default"))
    return writers, views


def registry() -> list[Entry]:
    """Every op that torchhalo handles, in the order of registration."""
    return list(_entries.values())


def _stock_handlers() -> dict[Op, Handler]:
    """DTensor's table of per-op handlers, after checking that this torch is one that torchhalo knows."""
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    needed = f"torchhalo needs torch>={low},<{high}"
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None or not SUPPORTED[0] <= (int(found[1]), int(found[2])) < SUPPORTED[1]:
        raise RuntimeError(f"{needed}, this is torch {torch.__version__}: install a torch in that range")
    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if not isinstance(handlers, dict):
        raise RuntimeError(
            f"{needed}; this torch {torch.__version__} is in the range, but its DTensor has no "
            "`_op_dispatcher._custom_op_handlers` to add ops to: it is not a release build that torchhalo was tested with"
        )
    return handlers


# torch.compile keeps what it compiled on disk, where the ranks of a host find it, under a key that knows neither these
# handlers nor, for a DTensor, more than its global shape. Without both in the key a rank would load what was compiled for
# another rank's shard and halos, or by other code.
_stock_hash: Callable[[DTensor], str] | None = getattr(DTensor, "_stable_hash_for_caching", None)


def _hash_of_this_rank(tensor: DTensor) -> str:
    assert _stock_hash is not None
    return f"{_stock_hash(tensor)}-{_process_rank()}"


@lru_cache(maxsize=1)
def _cache_tag() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    tag = f"torchhalo-{digest.hexdigest()[:16]}"
    if _stock_hash is None:  # torch 2.11: DTensor has no say in the key
        tag += f"-{dist.get_rank() if dist.is_initialized() else os.environ.get('RANK', '')}"
    return tag


def _tag_compiled_code(on: bool) -> None:
    config = torch.compiler.config
    config.cache_key_tag = config.cache_key_tag.replace(_cache_tag(), "") + (_cache_tag() if on else "")
    if _stock_hash is not None:
        setattr(DTensor, "_stable_hash_for_caching", _hash_of_this_rank if on else _stock_hash)  # noqa: B010


# The partitioner of torch.compile keeps a copy in the backward graph of each collective of the forward one that it could
# compute there, also where nothing needs it. Which these are depends on the sizes of tensors, which differ between shards: then
# one rank would wait for another forever.
def _send_once(on: bool) -> None:
    global _stock_extract
    if on == (_stock_extract is not None):
        return
    from torch._functorch import partitioners  # takes 0.4 s

    stock = _stock_extract
    _stock_extract = partitioners._extract_fwd_bwd_modules if on else None
    setattr(partitioners, "_extract_fwd_bwd_modules", _extracted if on else stock)  # noqa: B010


_stock_extract: Callable[..., Any] | None = None


def _extracted(*args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The forward and the backward graph, the latter without what is left over in it of the former's collectives."""
    assert _stock_extract is not None
    forward, backward = _stock_extract(*args, **kwargs)
    sent = {node.name for node in forward.graph.nodes if _is_collective(node)}
    for node in reversed(backward.graph.nodes):
        repeated = _is_collective(node) and node.name in sent
        if node.op == "call_function" and not node.users and (repeated or not node.is_impure()):
            backward.graph.erase_node(node)
    backward.recompile()
    return forward, backward


def _is_collective(node: torch.fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def _out_handlers() -> dict[Op, Handler]:
    """Handlers of the ``out=`` variants of the handled ops."""
    found: dict[Op, Handler] = {}
    for op in _handlers:
        names = [(arg.name, str(arg.type)) for arg in op._schema.arguments]
        for overload in (getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads()):
            rest = [(arg.name, str(arg.type)) for arg in overload._schema.arguments if not arg.is_out]
            if overload not in _handlers and len(rest) < len(overload._schema.arguments) and rest == names:
                found[overload] = _into_out(op)
    return found


def _into_out(op: Op) -> Handler:
    """The handler that computes ``op`` and writes its results into those that were given."""

    def handler(variant: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        names = [arg.name for arg in variant._schema.arguments if arg.is_out]
        outs = [kwargs[name] for name in names]
        results = op(*args, **{key: value for key, value in kwargs.items() if key not in names})
        for out, result in zip(outs, results if isinstance(results, tuple) else (results,), strict=True):
            if not isinstance(out, DTensor) or out.shape != result.shape or out.dtype != result.dtype:
                raise RuntimeError(
                    f"{op.overloadpacket.__name__}: `out` must be a DTensor of shape {tuple(result.shape)} and {result.dtype}, "
                    f"got a {type(out).__name__} of shape {tuple(out.shape)} and {out.dtype}"
                )
            out.copy_(result)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return handler


def _watch_redistribution(on: bool) -> None:
    """Let `gathers` know what stock ops redistribute."""
    dispatcher = DTensor._op_dispatcher
    dispatcher.__dict__.pop("redistribute_local_args", None)
    if on:
        stock = dispatcher.redistribute_local_args
        setattr(dispatcher, "redistribute_local_args", partial(_redistribute_local_args, stock))  # noqa: B010
    else:
        gathers.forget()


def _redistribute_local_args(stock: Callable[..., None], op_info: Any, schema: Any, use_values: bool) -> None:
    wanted = schema.args_schema if op_info.args_tree_spec is None else tree_leaves(schema.args_schema)
    for spec, other in zip(op_info.flat_args_schema, wanted, strict=False):
        if isinstance(spec, DTensorSpec) and spec != other and isinstance(other, DTensorSpec):
            assert spec.tensor_meta is not None
            shape, _, dtype = spec.tensor_meta
            each = gathers.Redistribution(schema.op, shape, dtype, spec.mesh, spec.placements, other.placements)
            gathers.notice(each)
            for watcher in _watchers:
                watcher.redistribution(each)
    stock(op_info, schema, use_values)


_stock_sync_batch_norm = torch.nn.SyncBatchNorm.forward


def _swap_sync_batch_norm(on: bool) -> None:
    """Let `torch.nn.SyncBatchNorm`, which has collectives of its own, treat a DTensor as batch norm does: as one tensor."""
    setattr(torch.nn.SyncBatchNorm, "forward", _sync_batch_norm if on else _stock_sync_batch_norm)  # noqa: B010


def _sync_batch_norm(module: torch.nn.SyncBatchNorm, input: torch.Tensor) -> torch.Tensor:
    if not isinstance(input, DTensor):
        return _stock_sync_batch_norm(module, input)
    if module.training and not torch.compiler.is_compiling():
        _check_sync_group(module, input.device_mesh)
    return torch.nn.modules.batchnorm._BatchNorm.forward(module, input)


def _check_sync_group(module: torch.nn.SyncBatchNorm, mesh: DeviceMesh) -> None:
    with _disable_current_modes():
        inside = mesh.mesh.flatten().tolist()
    group = dist.get_process_group_ranks(module.process_group or dist.group.WORLD)
    others = sorted(set(group) - set(inside))
    if others:
        raise RuntimeError(
            f"SyncBatchNorm: its process group must lie in the device mesh of its input, a DTensor; ranks {others} of the "
            f"group are not in {mesh}. Make the module with process_group=mesh.get_group() for statistics over the mesh, or "
            "shard the batch over a mesh that holds all ranks for statistics over all of them"
        )


def _hush_wrong_calls(on: bool) -> None:
    """Let a wrong call on DTensors show its error alone: fake tensors, which find it out, log their stack as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    (log.addFilter if on else log.removeFilter)(_not_of_dtensors)


def _not_of_dtensors(record: logging.LogRecord) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.tensor.") or frame.f_code is plain_result.__code__:
            return False
        frame = frame.f_back
    return True


# While torch.compile traces, torch takes some ops apart in Python before autograd sees them, into indices that are plain
# tensors; a DTensor must get past that to its handler.
_decompositions: dict[Op, dict[Any, Callable[..., Any]]] = {}


def _keep_whole(on: bool) -> None:
    """Let the handled ops reach DTensor whole, also where torch has a Python decomposition above autograd."""
    keys = torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd
    for op in list(_handlers) if on else list(_decompositions):
        found = {key: op.py_kernels[key] for key in keys if key in op.py_kernels} if on else _decompositions.pop(op)
        if on and found:
            _decompositions[op] = found
        op.py_kernels.update({key: _whole(op, kernel) if on else kernel for key, kernel in found.items()})
        if found:
            op._dispatch_cache.clear()


def _whole(op: Op, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    handing_over = False

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal handing_over
        # a handler that takes the op apart comes back here
        if handing_over or not any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return decomposition(*args, **kwargs)
        handing_over = True
        try:
            with no_python_dispatcher():
                return op(*args, **kwargs)
        finally:
            handing_over = False

    return kernel


class _Enabled:
    """What `enable` returns: leaving it as a context restores what was in force before the call."""

    def __init__(self, was_enabled: bool):
        self._was_enabled = was_enabled

    def __enter__(self) -> _Enabled:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._was_enabled:
            disable()


def enable() -> _Enabled:
    """Make DTensor's spatial ops right: install torchhalo's handlers in DTensor's dispatcher.

    Calling it again changes nothing. It is also a context manager, which on leaving restores what was in force before.

    Example:
        >>> import torchhalo
        >>> with torchhalo.enable():
        ...     pass  # here F.conv2d on a spatially sharded DTensor gives the numbers of one device

    Raises:
        RuntimeError: This torch is outside the supported range, or its DTensor lacks what torchhalo needs.
    """
    handlers = _stock_handlers()
    was_enabled = enabled()
    if not was_enabled:
        ours = _table()
        _replaced.update({op: handlers.get(op) for op in ours})
        handlers.update(ours)
        _tag_compiled_code(True)
        _send_once(True)
        _watch_redistribution(True)
        _keep_whole(True)
        _swap_sync_batch_norm(True)
        _hush_wrong_calls(True)
    return _Enabled(was_enabled)


def disable() -> None:
    """Give DTensor back its own handlers. Calling it again changes nothing.

    Example:
        >>> import torchhalo
        >>> torchhalo.disable()
    """
    handlers = _stock_handlers()
    _tag_compiled_code(False)
    _send_once(False)
    _watch_redistribution(False)
    _keep_whole(False)
    _swap_sync_batch_norm(False)
    _hush_wrong_calls(False)
    for op, handler in _replaced.items():
        if handler is None:
            handlers.pop(op, None)
        else:
            handlers[op] = handler
    _replaced.clear()


def enabled() -> bool:
    """Whether torchhalo's handlers are installed.

    Example:
        >>> import torchhalo
        >>> with torchhalo.enable():
        ...     torchhalo.enabled()
        True
    """
    return bool(_replaced)


def stock(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """What DTensor makes of ``op`` without torchhalo; for a handler that has nothing to say about its arguments."""
    handlers: dict[Op, Any] = DTensor._op_dispatcher._custom_op_handlers
    ours, theirs = handlers.pop(op), _replaced[op]
    if theirs is not None:
        handlers[op] = theirs
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = ours


# DTensors, below autograd.


class Meta(NamedTuple):
    """Global shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def local(tensor: DTensor) -> torch.Tensor:
    """This rank's shard, without a step in the autograd graph."""
    return tensor._local_tensor


def wrap(shard: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], meta: Meta) -> DTensor:
    """The DTensor with global ``meta`` of which this rank holds ``shard``."""
    key = _spec, tuple(placements), meta
    spec = _spec(mesh, *key[1:]) if traced(shard) else prepared(mesh, *key)
    return DTensor(_bare(shard), spec, requires_grad=False)


def _spec(mesh: DeviceMesh, placements: tuple[Placement, ...], meta: Meta) -> DTensorSpec:
    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(meta.shape), meta.stride, meta.dtype))


class Signature(NamedTuple):
    """All of a DTensor that is not data, but for its mesh."""

    placements: tuple[Placement, ...]
    meta: Meta
    device: str


def signature(tensor: DTensor) -> Signature:
    """What `prepared` may depend on."""
    spec = tensor._spec
    assert spec.tensor_meta is not None
    shape, stride, dtype = spec.tensor_meta
    if traced(tensor._local_tensor):
        shape, stride = torch.Size(map(int, shape)), tuple(map(int, stride))
    return Signature(spec.placements, Meta(tuple(shape), stride, dtype), tensor._local_tensor.device.type)


def prepared(mesh: DeviceMesh, make: Callable[..., R], *key: Any) -> R:
    """``make(mesh, *key)``, worked out once for each key.

    It is kept with the mesh, not by what the mesh is equal to: an equal one may have other process groups.
    """
    kept: dict[Any, R] = mesh.__dict__.setdefault("_torchhalo", _Kept())
    known = make, *key
    if known not in kept:
        if len(kept) >= KEPT:
            kept.clear()
        kept[known] = make(mesh, *key)
        _note_new()
    return kept[known]


class _Met(threading.local):
    new = 0


_met = _Met()


def _note_new() -> None:
    """Let stock's caches go now and then. DTensor has one for each thread, so each thread counts what it prepares."""
    _met.new += 1
    if _met.new % KEPT == 0:
        forget_stock()


def forget_stock() -> None:
    """Empty the caches of DTensor and of fake tensors, which never let go of a shape that they have met."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    FakeTensorMode.cache_clear()


class _Kept(dict[Any, Any]):
    """What was prepared for a mesh; a copy of the mesh, or one that is loaded from a file, starts anew."""

    def __reduce__(self) -> Any:
        return _Kept, ()


def _bare(shard: torch.Tensor) -> torch.Tensor:
    """Without the mark that `DTensor.from_local` leaves on the shard of a tensor that requires a gradient."""
    return shard.detach() if shard.requires_grad else shard


class Origin:
    """Where a tensor comes from; a copy of the tensor, or one that is loaded from a file, comes from nowhere."""

    def __reduce__(self) -> Any:
        return type(None), ()


class _Relatives(list[Any], Origin):
    """Weak references to the tensors that remember a tensor, or a view of it, as their origin."""


def outside(like: DTensor, results: Sequence[Meta], placements: Sequence[Sequence[Placement]]) -> tuple[DTensor, ...] | None:
    """What a rank outside the mesh of ``like`` returns, results with no elements here; None on a rank inside."""
    mesh = like.device_mesh
    if coordinate(mesh) is not None:
        return None
    pairs = zip(results, placements, strict=True)
    return tuple(wrap(like._local_tensor.new_empty(0, dtype=r.dtype), mesh, p, r) for r, p in pairs)


def remember(tensor: DTensor, origin: Origin, base: DTensor) -> DTensor:
    """``tensor``, which from now on knows that it comes from ``base``, and how."""
    setattr(tensor, "_torchhalo_origin", origin)  # noqa: B010
    root = _root(base)
    known = [ref for ref in getattr(root, "_torchhalo_relatives", None) or () if ref() is not None]
    setattr(root, "_torchhalo_relatives", _Relatives([*known, TensorWeakRef(tensor)]))  # noqa: B010
    return tensor


def origin(tensor: torch.Tensor) -> Any:
    """What was given to `remember`, or None."""
    return getattr(tensor, "_torchhalo_origin", None)


def relatives(tensor: DTensor) -> list[DTensor]:
    """The living tensors that remember this one as their base, or one that it shares memory with."""
    found = getattr(_root(tensor), "_torchhalo_relatives", None)
    return [other for ref in found if (other := ref()) is not None] if found else []


def _root(tensor: DTensor) -> torch.Tensor:
    base = tensor._base
    return tensor if base is None else base


class _Spoiled:
    """In the place of a tensor's spec, which every op asks: an error for all but what is written over the whole tensor."""

    def __init__(self, spec: DTensorSpec, reason: str):
        self.kept, self.reason = spec, reason

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self.reason)


def spoil(tensor: DTensor, reason: str) -> None:
    """Make every op on ``tensor`` raise ``reason``."""
    if not isinstance(tensor._spec, _Spoiled):
        setattr(tensor, "_spec", _Spoiled(tensor._spec, reason))  # noqa: B010


def mend(tensor: DTensor) -> None:
    """Undo `spoil`."""
    spec: Any = tensor._spec
    if isinstance(spec, _Spoiled):
        tensor._spec = spec.kept


@contextmanager
def counting() -> Iterator[None]:
    """Inside, new tensors are ones whose versions are counted, also in inference mode; still below autograd."""
    with torch.inference_mode(False), torch._C._AutoDispatchBelowADInplaceOrView(), torch.no_grad():
        yield


def redistribute(tensor: DTensor, placements: Sequence[Placement], op: Op | None = None) -> DTensor:
    """``tensor`` with other placements, by DTensor's own collectives; the same object if it has them already.

    Args:
        op: For an activation, the op that wants it so, which is named if that gathers it.
    """
    if tensor._spec.placements == tuple(placements):
        return tensor
    if op is not None:
        mesh, before = tensor.device_mesh, tensor.placements
        gathers.notice(gathers.Redistribution(op, tensor.shape, tensor.dtype, mesh, before, placements))
    reduced = [Replicate() if p.is_partial() and p != q else p for p, q in zip(tensor.placements, placements, strict=True)]
    for step in (reduced, placements):
        spec = tensor._spec
        if tuple(step) != spec.placements:
            target = DTensorSpec(spec.mesh, tuple(step), spec.tensor_meta)
            for watcher in _watchers:
                watcher.redistribution(gathers.Redistribution(op, tensor.shape, tensor.dtype, spec.mesh, spec.placements, step))
            shard = redistribute_local_tensor(tensor._local_tensor, spec, target)
            tensor = DTensor(_bare(shard), target, requires_grad=False)
    return tensor


def reduced(tensor: DTensor) -> DTensor:
    """``tensor`` with its partial sums added up, sharded as it was."""
    return redistribute(tensor, without_partial(tensor.placements))


def without_partial(placements: Sequence[Placement]) -> list[Placement]:
    """The placements of a tensor after its partial sums are added up, which are those of what is computed from it."""
    return [Replicate() if p.is_partial() else p for p in placements]


def without_advice() -> None:
    """Let DTensor put Partial tensors together in this process without a word: on several axes it suggests flatter meshes."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def as_dtensors(name: str, **tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The tensor arguments of the op ``name``, all DTensors on one mesh, or an error that says how to get there."""
    if len({id(t._spec.mesh) if isinstance(t, DTensor) else 0 for t in tensors.values() if t is not None}) == 1:
        return tuple(tensors.values())
    meshes = {key: t.device_mesh for key, t in tensors.items() if isinstance(t, DTensor)}
    first, mesh = next(iter(meshes.items()))
    for key, other in meshes.items():
        if other != mesh:
            raise RuntimeError(f"{name}: all tensors must be on one device mesh, `{first}` is on {mesh} and `{key}` on {other}")
    return tuple(
        tensor if tensor is None or isinstance(tensor, DTensor) else _replicated(name, key, tensor, first, mesh)
        for key, tensor in tensors.items()
    )


def replicate_implicitly(on: bool) -> bool:
    """Let DTensor take plain tensors as replicated, or not; what it did before."""
    dispatcher = DTensor._op_dispatcher
    before = bool(dispatcher._allow_implicit_replication)
    dispatcher._allow_implicit_replication = on
    return before


def _replicated(name: str, key: str, tensor: torch.Tensor, other: str, mesh: DeviceMesh) -> DTensor:
    if not DTensor._op_dispatcher._allow_implicit_replication:
        raise RuntimeError(
            f"{name}: got mixed torch.Tensor and DTensor: `{other}` is a DTensor, `{key}` (shape={tuple(tensor.shape)}) "
            "is a plain tensor. Put the module on the mesh with torch.distributed.tensor.distribute_module(module, mesh), or "
            "the tensor with distribute_tensor(tensor, mesh)"
        )
    return replicated(tensor, mesh)


def replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor, the same on every rank, as a DTensor; one that is a DTensor already as it is."""
    if isinstance(tensor, DTensor):
        return tensor
    return wrap(tensor, mesh, (Replicate(),) * mesh.ndim, Meta(tuple(tensor.shape), tensor.stride(), tensor.dtype))


_results: dict[object, tuple[Meta | None, ...]] = {}


def plain_result(op: Op, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What plain torch returns for ``op`` on the whole tensors: a `Meta` or None per result, or the error that it raises.

    Runs on fake tensors, so nothing is computed or sent, and every rank gets the same answer.
    """
    key = (op, *(_signature(arg) for arg in args), *((name, _signature(arg)) for name, arg in sorted(kwargs.items())))
    if key not in _results:
        with _disable_current_modes(), torch.no_grad():
            mode = _fake_mode()
            fakes, named = [_fake(arg, mode) for arg in args], {name: _fake(arg, mode) for name, arg in kwargs.items()}
            with mode:
                out = op(*fakes, **named)
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if len(_results) >= KEPT:
            _results.clear()
        _results[key] = tuple(Meta(tuple(t.shape), t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t for t in outs)
    return _results[key]


def plain_view(op: Op, input: DTensor, *args: Any) -> Meta:
    """As `plain_result`, for an op that makes a view of ``input``: fake tensors have other strides and errors than torch."""
    shape, stride, *rest = (_signature(arg) for arg in (tuple(input.shape), input.stride(), *args))
    return _plain_view(op, shape, stride, input.dtype, *rest)


@lru_cache(maxsize=4096)
def _plain_view(op: Op, shape: Any, stride: Any, dtype: torch.dtype, *args: Any) -> Meta:
    with _disable_current_modes(), torch.no_grad():
        view = op(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), *args)
    return Meta(tuple(view.shape), view.stride(), dtype)


_modes = threading.local()  # one for each thread: inside an op a mode has state of its own


def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not hasattr(_modes, "fake"):
        _modes.fake = FakeTensorMode()
        _modes.fake.cache_enabled = False  # it never lets go of a shape, and what is found here is kept already
    return _modes.fake


def _signature(arg: Any) -> Any:
    if isinstance(arg, Signature):
        return *arg.meta, arg.device
    if isinstance(arg, DTensor):
        return tuple(map(int, arg.shape)), tuple(map(int, arg.stride())), arg.dtype, arg.device.type
    if isinstance(arg, (list, tuple)):
        return tuple(_signature(item) for item in arg)
    return int(arg) if isinstance(arg, torch.SymInt) else arg


def _fake(arg: Any, mode: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(arg, (list, tuple)) and not isinstance(arg, Signature):
        return [_fake(item, mode) for item in arg]
    if not isinstance(arg, (DTensor, Signature)):
        return arg
    shape, stride, dtype, device = _signature(arg)
    return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), torch.device(device))


# Ranks and communication.


def coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """This rank's place in ``mesh``, or None outside it. In LocalTensor mode symbolic: pass it to a `per_rank` function."""
    found = mesh.get_coordinate()
    return None if found is None else tuple(found)


def per_rank(function: Callable[..., R], *args: object) -> R:
    """Call ``function`` with the plain tensors and integers of one rank; in LocalTensor mode, once for each of the ranks.

    The function may not communicate. It returns a tensor, or a flat tuple of tensors and integers.
    """
    return maybe_run_for_local_tensor(function)(*args) if local_tensor_mode() else function(*args)


def once(function: Callable[[], R]) -> R:
    """Call ``function`` on plain tensors, once for all simulated ranks; under torch.compile it is recorded as any other."""
    if tracing():
        return function()
    with _disable_current_modes():
        return function()


def concrete(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has values now, as opposed to while something is traced."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not tracing() and not isinstance(tensor, FakeTensor)


def tracing() -> bool:
    """Whether torch.compile is recording the ops."""
    return funcol._are_we_tracing()


def traced(tensor: torch.Tensor) -> bool:
    """Whether torch.compile is recording what happens to ``tensor``; sooner answered than `tracing`."""
    return not actual(tensor) and tracing()


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def actual(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but memory, so that a kernel unknown to torch may read and write it."""
    return type(tensor) in _PLAIN


def unwatched() -> bool:
    """Whether no dispatch mode sees what is called: one that counts work or memory knows torch's usual ops and tensors."""
    return torch._C._len_torch_dispatch_stack() == 0


def all_to_all(
    tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup, about: object = None
) -> torch.Tensor:
    """Send ``sent[i]`` elements of the flat ``tensor`` to member ``i`` of ``group``, and get ``received[i]`` from it.

    Args:
        about: What watchers are told besides.

    Returns:
        A buffer for `wait`; what comes between overlaps with the communication.
    """
    for watcher in _watchers:
        watcher.collective(Collective("all_to_all", tensor, group, sent, received, about))
    if traced(tensor) or local_tensor_mode():
        return funcol.all_to_all_single(tensor, list(received), list(sent), group)
    # funcol resolves the group anew and wraps the result in a tensor that waits for itself: more time than all the rest here.
    return torch.ops._c10d_functional.all_to_all_single(tensor, received, sent, group.group_name)


class Aside:
    """Work that needs nothing of what is queued on the device meanwhile: it may run beside it.

    What is inside starts after all that was queued when this object was made, and what comes after it waits for both. Only on a
    CUDA device does it make a difference; elsewhere the work runs in its turn.

    Example:
        >>> aside = Aside(torch.ones(3))
        >>> longer = torch.ones(10_000).sum()
        >>> with aside:
        ...     short = torch.ones(3).sum()
    """

    _made = threading.local()  # two threads, such as autograd's, must not record the same event

    def __init__(self, like: torch.Tensor) -> None:
        self._here: torch.cuda.Stream | None = None
        if like.is_cuda and actual(like):
            self._here = torch.cuda.current_stream(like.device)
            made = self._made.__dict__.setdefault("by_device", {})
            if like.device not in made:
                # First in line: the blocks of a long kernel that waits for its turn would keep the short ones out to its end.
                made[like.device] = torch.cuda.Stream(like.device, priority=-1), torch.cuda.Event(), torch.cuda.Event()
            self._there, self._start, self._end = made[like.device]
            self._start.record(self._here)

    def __enter__(self) -> None:
        if self._here is not None:
            self._there.wait_event(self._start)
            torch.cuda.set_stream(self._there)

    def __exit__(self, *exc: object) -> None:
        if self._here is not None:
            self._end.record(self._there)
            torch.cuda.set_stream(self._here)
            self._here.wait_event(self._end)


def all_reduce(tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], reduction: str = "sum") -> torch.Tensor:
    """``tensor`` reduced over the ranks along ``axes`` by one collective, whatever their number; as it is if there are none."""
    return wait(start_all_reduce(tensor, mesh, axes, reduction))


def start_all_reduce(tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], reduction: str = "sum") -> torch.Tensor:
    """As `all_reduce`, but the result is for `wait`; what comes between overlaps with the communication."""
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not axes:
        return tensor
    group = fiber_group(mesh, axes)[0]
    for watcher in _watchers:
        watcher.collective(Collective("all_reduce", tensor, group))
    return funcol.all_reduce(tensor, reduction, group)


def backward_number() -> int:
    """A number for the backward that runs in this thread, which no other has had."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` once when the backward that runs in this thread has ended, unless by an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def all_gather(tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """What the ranks along ``axes`` hold, stacked along a new first dim in row-major order of ``axes``, by one collective.

    For small tensors of one shape, such as statistics; not for activations.
    """
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not axes:
        return tensor.unsqueeze(0)
    group, places = fiber_group(mesh, axes)
    for watcher in _watchers:
        watcher.collective(Collective("all_gather", tensor, group))
    # torch 2.13 renamed it
    gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    found = wait(gather(tensor.contiguous().unsqueeze(0), 0, group))
    return found if places == tuple(range(len(places))) else torch.stack([found[place] for place in places])


def reduce_scatter(tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """The adjoint of `all_gather`: the ``i``-th rank along ``axes`` gets the sum over ranks of row ``i`` of ``tensor``."""
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not axes:
        return tensor.squeeze(0)
    group, places = fiber_group(mesh, axes)
    if places != tuple(range(len(places))):
        tensor = torch.stack([tensor[places.index(place)] for place in range(len(places))])
    for watcher in _watchers:
        watcher.collective(Collective("reduce_scatter", tensor, group))
    # torch 2.13 renamed it
    reduce = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    return wait(reduce(tensor.contiguous(), "sum", 0, group)).squeeze(0)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """What `all_to_all` received. To be called also where that is nothing, or torch keeps the call's state forever."""
    try:
        if isinstance(tensor, funcol.AsyncCollectiveTensor):
            return tensor.wait()
        return tensor if traced(tensor) else torch.ops._c10d_functional.wait_tensor(tensor)
    except RuntimeError as error:
        call = running()
        raise type(error)(
            f"{'a collective' if call is None else call.name}: this rank waits in vain for what another was to send: that one "
            "has died, is late, or is at another op or shape. TORCHHALO_DEBUG=1 in the environment of all ranks makes errors "
            f"name it. {error}"
        ) from error


class Collective(NamedTuple):
    """One that torchhalo is about to start.

    Attributes:
        sent, received: How many elements go to and come from each member of the group, where that differs.
        about: The exchange that it is for, where it is for one.
    """

    kind: str
    tensor: torch.Tensor
    group: dist.ProcessGroup
    sent: Sequence[int] = ()
    received: Sequence[int] = ()
    about: object = None


class Watcher:
    """Who is told of collectives before they start; it overrides what it wants to know."""

    def collective(self, each: Collective) -> None:
        """One of torchhalo's own."""

    def redistribution(self, each: gathers.Redistribution) -> None:
        """Those by which DTensor redistributes a tensor."""


_watchers: list[Watcher] = []


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Inside, ``watcher`` is told of every collective that an op starts."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def imagined(ranks: int, rank: int) -> Iterator[None]:
    """Inside, this process is one rank of a world in which nobody answers.

    Raises:
        RuntimeError: The process is in a real world already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group already; call it before `init_process_group`")
    # They know meshes by equality, and worlds before and after may have an equal one, seen from another rank.
    forget_stock()
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_stock()


def shapes_only() -> Any:
    """A context in which tensors have shapes and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def simulated() -> bool:
    """Whether there are no other ranks to talk to now: they are simulated here, or torch.compile is recording."""
    return tracing() or local_tensor_mode() is not None or dist.get_backend() == "fake"


def backward_step() -> Any:
    """The node of the autograd graph that runs in this thread, or None."""
    return torch._C._current_autograd_node()


def leaves(value: Any) -> list[Any]:
    """What nested tuples, lists and dicts hold."""
    return tree_leaves(value)


def key_value_store() -> dist.Store:
    """The store by which the ranks of this world found each other."""
    return dist.distributed_c10d._get_default_store()


def timeout(group: dist.ProcessGroup, device: str) -> timedelta:
    """For how long a collective of ``group`` waits for ranks that do not come."""
    return group._get_backend(torch.device(device)).options._timeout


def members(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[int, ...]:
    """The ranks that differ from this one along ``axes`` only, itself among them, in ascending order."""
    return prepared(mesh, _fiber, tuple(axes))[0]


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
_made: Counter[tuple[int, ...]] = Counter()


def fiber_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """The group of the ranks that differ from this one along ``axes`` only, and where in it each of them stands.

    The second result lists, for the flattened (row-major) index along ``axes``, the position in the group, which torch keeps
    in the order of global ranks whatever the order of the mesh.
    """
    return prepared(mesh, _fiber_group, axes)


def _fiber_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    members, places = prepared(mesh, _fiber, axes)
    return mesh.get_group(axes[0]) if len(axes) == 1 else _group_of(members), places


def fiber_places(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The second result of `fiber_group`, sooner."""
    return prepared(mesh, _fiber, axes)[1]


def _process_rank() -> int:
    """The rank of this process, also in LocalTensor mode, where `dist.get_rank` may stand for all ranks at once."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.rank()


def _fiber(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    with _disable_current_modes():
        ranks = mesh.mesh
        here = (ranks == _process_rank()).nonzero()[0].tolist()
        fiber = ranks[tuple(slice(None) if axis in axes else here[axis] for axis in range(mesh.ndim))].flatten().tolist()
    members = sorted(fiber)
    position = {rank: place for place, rank in enumerate(members)}
    return tuple(members), tuple(position[rank] for rank in fiber)


def _group_of(members: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is not None and list(members) == dist.get_process_group_ranks(world):
        return world
    try:
        dist.get_process_group_ranks(_groups[members])
    except (KeyError, ValueError):  # none yet, or destroyed with its world
        _groups[members] = _new_group(members)
    return _groups[members]


def _new_group(members: tuple[int, ...]) -> dist.ProcessGroup:
    """A group that only its members know of, so that ranks outside the mesh need not take part.

    torch names such a group after the number of groups that a rank is in, and ranks that are in different numbers of other
    groups would wait for each other under different names; so it gets a name that all members agree on.
    """
    _made[members] += 1
    name = "-".join(map(str, ("torchhalo", _made[members], *members)))
    with mock.patch.object(dist.distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: name):
        group = dist.new_group(list(members), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
