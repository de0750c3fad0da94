"""Handlers of ops in DTensor's dispatcher: the table of ours, and the way back to DTensor's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor

from torchhalo.torch_internals.calls import Handler, Op, track_call

F = TypeVar("F", bound=Callable[..., Any])


class Entry(NamedTuple):
    """A handled op as the docs list it: its family is the file in ``ops/`` that handles it."""

    op: Op
    family: str
    traffic: str
    limits: str


handled: dict[Op, Handler] = {}


_entries: dict[Op, Entry] = {}


installed: dict[Op, Handler | None] = {}


_wrappers: dict[Op, list[Callable[[Handler], Handler]]] = {}


_argument_adapters: list[Callable[[Op, Handler], Handler]] = []


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
        _enter(op, decompose, module, traffic, limits)


def decompose(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Handler of an op that is made of others."""
    return op.decompose(*args, **kwargs)


def _enter(op: Op, handler: Handler, module: str, traffic: str, limits: str) -> None:
    if op in handled:
        raise ValueError(f"{op} has a handler in {_entries[op].family} already, {module} gives it another")
    table.cache_clear()
    handled[op] = handler
    _entries[op] = Entry(op, module.rpartition(".")[2], traffic, limits)


def wrap_handler(*ops: Op) -> Callable[[F], F]:
    """Make the decorated function, from a handler to a handler, wrap whatever handles ``ops``: torchhalo or DTensor itself."""

    def keep(wrapper: F) -> F:
        for op in ops:
            _wrappers.setdefault(op, []).append(wrapper)
        table.cache_clear()
        return wrapper

    return keep


def adapt_arguments(adapter: Callable[[Op, Handler], Handler]) -> Callable[[Op, Handler], Handler]:
    """Make the decorated function, from an op and its handler to a handler, stand between every handler and its wrappers."""
    _argument_adapters.append(adapter)
    table.cache_clear()
    return adapter


def _adapted(op: Op, handler: Handler) -> Handler:
    for adapter in _argument_adapters:
        handler = adapter(op, handler)
    return handler


@lru_cache(maxsize=1)
def table() -> dict[Op, Handler]:
    """The handlers inside their wrappers. An op that has wrappers and no handler here gets DTensor's own inside them."""
    found = {op: _adapted(op, handler) for op, handler in {**handled, **_out_handlers()}.items()}
    for op, wrappers in _wrappers.items():
        for wrapper in wrappers:
            found[op] = wrapper(found[op] if op in found else _adapted(op, stock))
    return {op: track_call(handler) for op, handler in found.items()}


def bind(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of ``op`` in the order of its schema, defaults filled in."""
    names, defaults = _parameters(op)
    given = len(args)
    if given == len(names):
        return list(args)
    return [*args, *(kwargs.get(name, default) for name, default in zip(names[given:], defaults[given:], strict=True))]


def named(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of ``op`` by name, defaults filled in."""
    return dict(zip(_parameters(op)[0], bind(op, args, kwargs), strict=True))


@lru_cache(maxsize=4096)
def _parameters(op: Op) -> tuple[list[str], list[Any]]:
    """The names of an op's arguments, and their defaults; a schema makes them anew each time."""
    arguments = op._schema.arguments
    return [arg.name for arg in arguments], [arg.default_value for arg in arguments]


def mutated_arguments(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """The DTensors among the arguments that ``op`` writes to."""
    positions, names = _writes(op)
    written = [args[i] for i in positions if i < len(args)] + [kwargs[name] for name in names if name in kwargs]
    return list(dtensors_in(written))


def dtensors_in(values: Sequence[Any]) -> Iterator[DTensor]:
    """The DTensors in a list, and in lists in it, in order."""
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from dtensors_in(value)


@lru_cache(maxsize=4096)
def _writes(op: Op) -> tuple[list[int], list[str]]:
    arguments = list(enumerate(op._schema.arguments))
    written = [(i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]
    return [i for i, _ in written], [name for _, name in written]


@lru_cache(maxsize=4096)
def functional_variant(op: Op) -> Op | None:
    """The op that returns what ``op`` writes to its one target, such as ``relu`` for ``relu_``, or None if there is none."""
    name = op._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    if packet is None or torch.Tag.inplace_view in op.tags or len(_writes(op)[0]) != 1:
        return None
    wanted = [(arg.name, str(arg.type), arg.default_value) for arg in op._schema.arguments]
    for variant in (getattr(packet, overload) for overload in packet.overloads()):
        if [(arg.name, str(arg.type), arg.default_value) for arg in variant._schema.arguments] == wanted:
            return variant
    return None


@lru_cache(maxsize=4096)
def has_rule(op: Op) -> bool:
    """Whether ``op`` has a handler, or a rule that DTensor was given, and has not to work out from what the op is made of."""
    known = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    return op in handled or any(op in getattr(known, table, ()) for table in tables)


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


def _out_handlers() -> dict[Op, Handler]:
    """Handlers of the ``out=`` variants of the handled ops."""
    found: dict[Op, Handler] = {}
    for op in handled:
        names = [(arg.name, str(arg.type)) for arg in op._schema.arguments]
        for overload in (getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads()):
            rest = [(arg.name, str(arg.type)) for arg in overload._schema.arguments if not arg.is_out]
            if overload not in handled and len(rest) < len(overload._schema.arguments) and rest == names:
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


def stock(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """What DTensor makes of ``op`` without torchhalo; for a handler that has nothing to say about its arguments."""
    handlers: dict[Op, Any] = DTensor._op_dispatcher._custom_op_handlers
    ours, theirs = handlers.pop(op), installed[op]
    if theirs is not None:
        handlers[op] = theirs
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = ours
