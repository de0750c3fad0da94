"""Plain tensors that shards were written to: the Python object stays, and stands for a DTensor from then on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

#: The kinds that have no memory of their own beside their storage.
_KINDS = torch.Tensor, FakeTensor


class StandIn(torch.Tensor):
    """What a plain tensor becomes, as it cannot become a DTensor, whose objects have another size.

    Functions of it are functions of the DTensor, and so are the attributes that a plain tensor lacks.
    """

    _value: DTensor

    @staticmethod
    def __new__(cls, value: DTensor) -> StandIn:
        """In the place of ``value``, which carries no gradient."""
        settings: dict[str, Any] = {"strides": value.stride(), "dtype": value.dtype, "device": value.device}
        stand_in: StandIn = torch.Tensor._make_wrapper_subclass(cls, value.shape, **settings)  # type: ignore[attr-defined]
        stand_in._value = value
        return stand_in

    def __getattr__(self, name: str) -> Any:
        return getattr(value_of(self), name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Of this rank's part, as DTensor's: only some ranks may print."""
        return repr(value_of(self))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_values(args), **_values(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Where code has switched off ``__torch_function__``."""
        return func(*_values(args), **_values(kwargs or {}))


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """The DTensor that ``tensor`` stands for; any other as it is."""
    if type(tensor) is not StandIn:
        return tensor
    value = vars(tensor)["_value"]
    if value.requires_grad:
        # An autograd.Function is not told of what a tensor stands for, and so would lose the gradient in silence.
        raise RuntimeError(
            f"a plain tensor of shape {tuple(value.shape)} that shards were written to can't carry a gradient: make it from a "
            "sharded one, as by `x.new_zeros` or `torch.zeros_like(x)`"
        )
    return value  # type: ignore[no-any-return]


def _values(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return value_of(argument)
    if isinstance(argument, dict):
        return {key: _values(each) for key, each in argument.items()}
    if type(argument) in (list, tuple):
        return type(argument)(map(_values, argument))
    return argument


def replaceable(tensor: torch.Tensor) -> bool:
    """Whether nothing but this object, such as a view, an array or autograd, knows the elements of a plain tensor.

    All ranks find the same, as they run one program.
    """
    if type(tensor) not in _KINDS or tensor.requires_grad or tensor._is_view() or weakref.getweakrefs(tensor):
        return False
    storage = tensor.untyped_storage()
    # The second user of the storage is the object that we ask. One that NumPy knows too cannot be resized.
    users: int = tensor._use_count()  # type: ignore[attr-defined]
    return storage.resizable() and users == 1 and torch._C._storage_Use_Count(storage._cdata) == 2


def replace(tensor: torch.Tensor, value: DTensor) -> None:
    """Have ``tensor``, which is `replaceable`, stand for ``value``."""
    torch.utils.swap_tensors(tensor, StandIn(value))
