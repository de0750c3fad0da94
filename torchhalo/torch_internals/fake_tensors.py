"""What plain torch would return for the whole tensors, found on fake tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from torchhalo.torch_internals import caching
from torchhalo.torch_internals.calls import Op
from torchhalo.torch_internals.dtensors import Meta, Signature, device_type, meta
from torchhalo.torch_internals.transforms import with_kernel_strides

R = TypeVar("R")

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
                out = with_kernel_strides(op, fakes, op(*fakes, **named))
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if len(_results) >= caching.CACHE_SIZE:
            _results.clear()
        _results[key] = tuple(meta(t) if isinstance(t, torch.Tensor) else t for t in outs)
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
        return tuple(map(int, arg.shape)), tuple(map(int, arg.stride())), arg.dtype, device_type(arg)
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


@contextmanager
def fake_tensor_mode() -> Iterator[None]:
    """A context in which tensors have shapes and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), _rules_apart():
        yield


@contextmanager
def _rules_apart() -> Iterator[None]:
    """Let DTensor work out its rules on whole tensors of its own, which are none of this rank's, outside of all modes.

    It does so where its caches do not know a rule, or no longer. Rules from what an op is made of fail on fake tensors; torch
    2.11 has none.
    """
    owners: list[tuple[Any, str]] = [(ShardingPropagator, "_propagate_tensor_meta_non_cached")]
    try:
        from torch.distributed.tensor._decompositions import DecompShardingStrategy
    except ImportError:
        pass
    else:
        owners.append((DecompShardingStrategy, "propagate_strategy"))
    with ExitStack() as scope:
        for owner, name in owners:
            scope.enter_context(mock.patch.object(owner, name, _apart(getattr(owner, name))))
        yield


def _apart(function: Callable[..., R]) -> Callable[..., R]:
    def outside(*args: Any, **kwargs: Any) -> R:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside


def without_fakes(function: Callable[[], R]) -> R:
    """Call ``function`` outside of all modes, so that the tensors that it makes have memory."""
    with _disable_current_modes():
        return function()
