"""Ops that gather a sharded activation, or move it to another sharding: a warning, an error, or a note in a list."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import NamedTuple

from torch.distributed.tensor import Replicate, Shard

from torchhalo.torch_internals.grid_shard import GridShard
from torchhalo.torch_internals.switch import when_disabled
from torchhalo.torch_internals.watching import Redistribution, redistribution_listeners


class GatherWarning(UserWarning):
    """An op gathered a sharded activation: its result is right, its memory and traffic are those of the whole tensor."""


class GatherError(RuntimeError):
    """An op would have gathered a sharded activation inside `strict`."""


class Gather(NamedTuple):
    """An activation that an op makes whole along some mesh axes.

    Attributes:
        op: The name of the op.
        shape: The global shape of the tensor.
        dims: The dims that are gathered.
        bytes: What each rank receives for it, if shards are even.
    """

    op: str
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.op} gathers a tensor of shape {self.shape} along dim {', '.join(map(str, self.dims))}: " + (
            f"{self.bytes:,} bytes to every rank"
        )


class Move(NamedTuple):
    """An activation whose elements an op gives to other ranks, as it wants another sharding or a view has none that fits.

    Attributes:
        op: The name of the op.
        shape: The global shape of the tensor.
        bytes: What a rank receives for it, on average.
    """

    op: str
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.op} moves a tensor of shape {self.shape} to another sharding: {self.bytes:,} bytes to every rank"


Listener = Callable[[Gather], None]

_listeners: list[Listener] = []
_move_listeners: list[Callable[[Move], None]] = []
_warned: set[str] = set()


def notice(each: Redistribution) -> None:
    """Tell of a redistribution by an op.

    It is a gather of an activation if a tensor of three or more dims, sharded along another than the first, becomes whole.
    """
    op, shape, dtype, mesh, source, target = each
    if op is None or len(shape) < 3:
        return
    pairs = [(p, mesh.size(axis), q) for axis, (p, q) in enumerate(zip(source, target, strict=True)) if mesh.size(axis) > 1]
    if any(p != q and isinstance(p, Shard) and isinstance(q, Shard) for p, _, q in pairs):
        size = prod(map(int, shape)) * dtype.itemsize // prod(size for _, size, q in pairs if isinstance(q, Shard))
        notice_move(str(op), shape, lambda: size - size // max(size for p, size, q in pairs if p != q))
    gathered = [(p.dim, size) for p, size, q in pairs if isinstance(p, (Shard, GridShard)) and isinstance(q, Replicate)]
    if not any(dim for dim, _ in gathered):
        return
    whole = prod(map(int, shape)) * dtype.itemsize // prod(size for _, size, q in pairs if isinstance(q, (Shard, GridShard)))
    received = whole - whole // prod(size for _, size in gathered)
    gather = Gather(str(op), tuple(map(int, shape)), tuple(sorted({dim for dim, _ in gathered})), received)
    for listener in _listeners or [_warn]:
        listener(gather)


def notice_move(op: str, shape: Sequence[int], size: Callable[[], int]) -> None:
    """Tell of a move by an op, before anything is sent.

    Args:
        size: Counts the bytes; called only if anyone listens.
    """
    if _move_listeners:
        move = Move(op, tuple(map(int, shape)), size())
        for listener in _move_listeners:
            listener(move)


def _warn(gather: Gather) -> None:
    if gather.op not in _warned:
        _warned.add(gather.op)
        warnings.warn(f"{gather} (told once per op; torchhalo.strict() makes it an error)", GatherWarning, stacklevel=2)


def forget() -> None:
    """Warn again of ops that were warned of."""
    _warned.clear()


@contextmanager
def watch_moves(listener: Callable[[Move], None]) -> Iterator[None]:
    """Hand every `Move` to ``listener``."""
    _move_listeners.append(listener)
    try:
        yield
    finally:
        _move_listeners.remove(listener)


@contextmanager
def watch(listener: Listener) -> Iterator[None]:
    """Hand every `Gather` to ``listener`` instead of warning.

    Example:
        >>> found = []
        >>> with watch(found.append):
        ...     pass  # ops that gather are now listed in `found`
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _refuse(gather: Gather) -> None:
    raise GatherError(
        f"{gather}, which torchhalo.strict() forbids. Outside it the result is right, but every rank holds the whole tensor"
    )


def _refuse_move(move: Move) -> None:
    raise GatherError(f"{move}, which torchhalo.strict(moves=True) forbids. Outside it the result is right")


@contextmanager
def strict(moves: bool = False) -> Iterator[None]:
    """Inside it, an op that would gather a sharded activation raises; outside, such an op warns once.

    Every rank raises before anything is sent. What the user gathers, by ``full_tensor`` or ``redistribute``, is let through.

    Args:
        moves: Refuse ops, too, that would move an activation from one sharding to another.

    Example:
        >>> import torchhalo
        >>> with torchhalo.strict():
        ...     pass  # model(sharded_input) here either stays sharded or raises

    Raises:
        GatherError: With the op, the shape and the bytes.
    """
    with watch(_refuse), watch_moves(_refuse_move) if moves else nullcontext():
        yield


redistribution_listeners.append(notice)
when_disabled.append(forget)
