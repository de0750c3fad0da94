"""What torch calls first for every function of a DTensor in eager code."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodWrapperType
from typing import Any, TypeVar

import torch
from torch import _guards
from torch.distributed.tensor import DTensor

Override = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

#: A context in which functions of DTensors are not overridden.
not_overridden = torch._C.DisableTorchFunctionSubclass

#: What is called in place of a function; it may call that.
_replaced: dict[Callable[..., Any], Callable[..., Any]] = {}

F = TypeVar("F", bound=Callable[..., Any])

_none = torch._C._disabled_torch_function_impl


class _Override:
    """The attribute ``__torch_function__`` of DTensor.

    While torch.compile traces, DTensor has no override, as in stock torch: Dynamo has rules of its own for DTensor, and they
    do not apply to a class with an override.
    """

    def __init__(self, function: Override):
        def call(func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            with not_overridden():
                # An attribute, such as the `grad` of each parameter, which an optimizer asks for several times a step.
                if type(func) is MethodWrapperType and func.__name__ == "__get__":
                    return func(*args)
                return function(func, args, kwargs or {})

        self._call = call

    def __get__(self, instance: object, owner: type) -> Any:
        return self._call if getattr(_guards._TLS, "compile_context", None) is None else _none


def override_functions(function: Override | None) -> None:
    """Have ``function(func, args, kwargs)`` called for every torch function of a DTensor, or nothing.

    It may call ``func``, which then is not overridden again.
    """
    setattr(DTensor, "__torch_function__", _none if function is None else _Override(function))  # noqa: B010


def replace(func: Callable[..., Any]) -> Callable[[F], F]:
    """Have the decorated function called in place of ``func`` by `call`."""

    def keep(other: F) -> F:
        _replaced[func] = other
        return other

    return keep


def call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``, or what `replace` has put in its place."""
    return _replaced.get(func, func)(*args, **kwargs)


def undressed(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without a subclass that only adds Python attributes, such as MONAI's MetaTensor."""
    if type(tensor) is torch.Tensor or type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return tensor
    return tensor if isinstance(tensor, torch.nn.Parameter) else tensor.as_subclass(torch.Tensor)
