"""A program written down while it runs on fake tensors: which op reads and writes which memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from torchhalo.torch_internals import tracing as tracing  # registers `torchhalo::after`
from torchhalo.torch_internals.calls import Op
from torchhalo.torch_internals.watching import TorchDispatchMode


class View(NamedTuple):
    """A tensor as a place in memory: which storage, and how it lies there. A leaf of the arguments of an `Instruction`."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor in real memory."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor


class Instruction(NamedTuple):
    """One op that computes something; views are made when they are read.

    Attributes:
        args, kwargs: Of the call, with a `View` for each tensor.
        results: For each tensor that the op returns in memory of its own, which one, and a `View` of it.
        reads, writes, makes: Storages.
        group: The ranks that take part, of a collective.
        draw: Which draw it is, of an op that draws random numbers: equal draws give equal numbers.
        module: The path of the module that called it.
        flops: Of matrix products and convolutions.
    """

    op: Op | LocalKernel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int, View], ...]
    reads: frozenset[int]
    writes: frozenset[int]
    makes: frozenset[int]
    group: tuple[int, ...] | None
    draw: int | None
    module: str
    flops: int = 0


class _Schema(NamedTuple):
    name: str
    arguments: tuple[Any, ...] = ()


class LocalKernel:
    """A function of plain tensors that returns a new one, and that is written down as one op, though torch knows none.

    Args:
        function: Changes no argument.
        like: From the same arguments to an empty result.
        simple: Whether it costs little more than to read and write its tensors, and gives the same again.
    """

    namespace = "torchhalo"

    def __init__(self, function: Callable[..., torch.Tensor], like: Callable[..., torch.Tensor], simple: bool = False):
        update_wrapper(self, function)
        self.function, self.like = function, like
        self.tags = [torch.Tag.pointwise] if simple else []
        self.overloadpacket = self
        self._schema = _Schema(f"torchhalo::{function.__name__}")

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _recorders and any(isinstance(arg, torch.Tensor) and is_fake(arg) for arg in (*args, *kwargs.values())):
            return _recorders[-1].call(self, args, kwargs)
        return self.function(*args, **kwargs)

    def __str__(self) -> str:
        return self._schema.name


def local_kernel(
    like: Callable[..., torch.Tensor], simple: bool = False
) -> Callable[[Callable[..., torch.Tensor]], LocalKernel]:
    """The decorator of a `LocalKernel`.

    Example:
        >>> @local_kernel(like=torch.empty_like)
        ... def twice(tensor):
        ...     return tensor * 2
        >>> twice(torch.ones(2))
        tensor([2., 2.])
    """
    return lambda function: LocalKernel(function, like, simple)


_recorders: list[Recorder] = []


def is_recording() -> bool:
    """Whether what is called is written down."""
    return bool(_recorders)


class Recorder(TorchDispatchMode):
    """Writes down what the ops below DTensor do on fake tensors, inside a fake tensor mode.

    Attributes:
        instructions: In the order of their calls.
        sizes: Of all storages, in bytes.
        constants: The values of storages that hold real tensors, which the model has made before.
        failed: The op that raised, and the module that called it.
    """

    def __init__(self, module: Callable[[], str]) -> None:
        super().__init__()
        self.instructions: list[Instruction] = []
        self.sizes: list[int] = []
        self.constants: dict[int, torch.Tensor] = {}
        self.failed: tuple[str, str] | None = None
        self._module = module
        self._numbers: dict[int, tuple[int, torch.UntypedStorage]] = {}  # kept, so that no other takes the address
        self._draws: dict[bytes, int] = {}

    def __enter__(self) -> Recorder:
        _recorders.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        _recorders.remove(self)

    def view(self, tensor: torch.Tensor) -> View:
        """Where ``tensor`` lies, in a storage that is known from now on."""
        number = self._number(tensor)
        shape, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return View(number, tensor.dtype, shape, stride, int(tensor.storage_offset()), tensor.is_conj(), tensor.is_neg())

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            number = len(self.sizes)
            self._numbers[storage._cdata] = number, storage
            self.sizes.append(int(storage.nbytes()))
            if not is_fake(tensor):
                with _disable_current_modes():
                    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
                    self.constants[number] = whole.clone()
        return self._numbers[storage._cdata][0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, (DTensor, funcol.AsyncCollectiveTensor)) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        given = mapped(torch.Tensor, self.view, (args, kwargs))
        before = len(self.sizes)
        try:
            out = func(*args, **kwargs)
        except Exception:
            self.failed = str(func), self._module()
            raise
        if func is _CPU_ATTENTION and out[1].dtype != args[0].dtype == torch.float64:  # torch 2.11 traces its sums in float32
            out = out[0], torch.empty_like(out[1], dtype=args[0].dtype)
        draw = self._draw() if _draws(func, args, kwargs, out) else None
        known = flop_registry.get(func.overloadpacket)
        flops = 0 if known is None else int(known(*args, **kwargs, out_val=out))
        if func.namespace == "_c10d_functional" and "wait_tensor" in func._schema.name:
            self._numbers[out.untyped_storage()._cdata] = given[0][0].storage, out.untyped_storage()
        else:
            self._note(func, given, out, before, draw, flops)
        return out

    def call(self, kernel: LocalKernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Write down a call of a kernel that torch does not know."""
        given = mapped(torch.Tensor, self.view, (args, kwargs))
        before = len(self.sizes)
        with _disable_current_modes():
            out = kernel.like(*args, **kwargs)
        self._note(kernel, given, out, before, None, 0)
        return out

    def _note(self, op: Any, given: Any, out: Any, before: int, draw: int | None, flops: int) -> None:
        results = [
            (place, view)
            for place, tensor in enumerate(out if isinstance(out, (tuple, list)) else (out,))
            if isinstance(tensor, torch.Tensor) and (view := self.view(tensor)).storage >= before
        ]
        written = {view.storage for view in _views(_written(op, *given))}
        if op in _NO_WORK or not (results or written):
            return  # it makes views
        args, kwargs = given
        if op in _COPIES:
            op, args = torch.ops.aten.clone.default, args[:1]
        reads = frozenset(view.storage for view in _views((args, kwargs)))
        makes = frozenset(view.storage for _, view in results)
        group = _group(op, args)
        self.instructions.append(
            Instruction(op, args, kwargs, tuple(results), reads, frozenset(written), makes, group, draw, self._module(), flops)
        )

    def _draw(self) -> int:
        """Which draw this is. What restores the state of the generator, as checkpointing does, draws the same again."""
        with _disable_current_modes():
            state = torch.default_generator.get_state().numpy().tobytes()
            torch.rand(())  # a fake draw leaves the generator as it is
        return self._draws.setdefault(state, len(self._draws))


def _draws(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """Whether ``op`` draws random numbers: not for an empty tensor, nor an attention that drops nothing."""
    if torch.Tag.nondeterministic_seeded not in op.tags or (isinstance(out, torch.Tensor) and not out.numel()):
        return False
    given = {argument.name: argument.default_value for argument in op._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", True))


_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_NO_WORK = {torch.ops.aten.detach_.default}
_COPIES = {torch.ops.aten.lift_fresh.default, torch.ops.torchhalo.after.default}


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has a shape and no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _views(tree: Any) -> Iterator[View]:
    if isinstance(tree, View):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _views(item)
    elif isinstance(tree, dict):
        yield from _views(list(tree.values()))


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found = []
    for place, arg in enumerate(op._schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs.get(arg.name))
    return found


def _group(op: Any, args: tuple[Any, ...]) -> tuple[int, ...] | None:
    """The ranks that take part in a collective; None for any other op."""
    if op.namespace not in ("_c10d_functional", "_dtensor"):
        return None
    name: Any = [arg for arg in args if isinstance(arg, str)][-1]
    return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(name)))


def mapped(kind: type, change: Callable[[Any], Any], tree: Any) -> Any:
    """Arguments of an op with ``change(item)`` for each item of ``kind``, in lists, tuples and dicts too."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        items = [mapped(kind, change, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return {key: mapped(kind, change, item) for key, item in tree.items()} if isinstance(tree, dict) else tree
