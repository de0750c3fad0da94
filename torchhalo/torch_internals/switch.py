"""`enable` and `disable`: everything that torchhalo changes in torch is changed and restored here."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from torchhalo.torch_internals.compilation import bypass_decompositions, pin_collectives, tag_compiled_code
from torchhalo.torch_internals.copying import copy_at_offsets
from torchhalo.torch_internals.grid_shard import know_grids
from torchhalo.torch_internals.handlers import Handler, Op, installed, table
from torchhalo.torch_internals.logs import silence_fake_tensor_log
from torchhalo.torch_internals.redistribution import watch_redistribution
from torchhalo.torch_internals.sync_batch_norm import swap_sync_batch_norm

#: Called by `disable`, last.
when_disabled: list[Callable[[], None]] = []

SUPPORTED = (2, 11), (2, 16)


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
        ours = table()
        installed.update({op: handlers.get(op) for op in ours})
        handlers.update(ours)
        tag_compiled_code(True)
        pin_collectives(True)
        watch_redistribution(True)
        know_grids(True)
        bypass_decompositions(True)
        swap_sync_batch_norm(True)
        silence_fake_tensor_log(True)
        copy_at_offsets(True)
    return _Enabled(was_enabled)


def disable() -> None:
    """Give DTensor back its own handlers. Calling it again changes nothing.

    Example:
        >>> import torchhalo
        >>> torchhalo.disable()
    """
    handlers = _stock_handlers()
    tag_compiled_code(False)
    pin_collectives(False)
    watch_redistribution(False)
    know_grids(False)
    bypass_decompositions(False)
    swap_sync_batch_norm(False)
    silence_fake_tensor_log(False)
    copy_at_offsets(False)
    for op, handler in installed.items():
        if handler is None:
            handlers.pop(op, None)
        else:
            handlers[op] = handler
    installed.clear()
    for callback in when_disabled:
        callback()


def enabled() -> bool:
    """Whether torchhalo's handlers are installed.

    Example:
        >>> import torchhalo
        >>> with torchhalo.enable():
        ...     torchhalo.enabled()
        True
    """
    return bool(installed)
