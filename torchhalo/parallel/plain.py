"""Plain tensors that a model makes for itself, taken as replicated where they meet DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from torchhalo.exchange import debug
from torchhalo.parallel.structures import tensors_in
from torchhalo.torch_internals import (
    caching,
    collectives,
    dtensors,
    overrides,
    process_groups,
    redistribution,
    simulation,
    stand_ins,
    switch,
    tracing,
    watching,
)

aten = torch.ops.aten


class plain_as_replicated(TorchFunctionMode):
    """Inside this context plain tensors mix with DTensors as if replicated: coordinate grids, embeddings, zero caches.

    Every rank must hold the same values; with ``TORCHHALO_DEBUG=1`` in the environment that is compared, at the cost of a
    collective per tensor, and a difference raises. A plain tensor that requires a gradient gets a plain one, the whole of it on
    every rank. Contexts nest.

    A plain tensor that a sharded one is written to becomes sharded too, such as the zeros that a library scatters labels into.
    One that is larger along the sharded dims, of which something else knows the elements (a view, an array), or to which a
    gradient is written, stays plain; what is written to it is made whole, a gather. And a complex tensor that is made here,
    such as ``torch.zeros(shape, dtype=torch.cfloat)``, is a DTensor, sharded as the last complex one with as many dims: models
    write the modes that they keep into such ones.

    After `parallelize` the same holds everywhere in eager code, but for the complex tensors, on the mesh of the model: a loss
    may be called with sharded predictions and plain labels. Elsewhere mixing raises.

    Args:
        gradients: "shares" for a model whose parameters DDP or FSDP keeps as plain tensors: each rank gets a share of the
            gradient of a parameter, such that the mean over the ranks, which the wrapper takes, is the gradient.

    Example:
        >>> import torchhalo
        >>> with torchhalo.plain_as_replicated():
        ...     pass  # here ``x + torch.linspace(0, 1, x.shape[-1])`` is right for a DTensor ``x``
    """

    def __init__(self, *, gradients: Literal["whole", "shares"] = "whole") -> None:
        super().__init__()
        self._shares = gradients == "shares"
        self._before: list[bool] = []  # one per entry, as the same context may be entered again
        self._spectra: dict[int, Any] = {}  # by number of dims, a small one that is sharded as the last one was

    def __enter__(self) -> plain_as_replicated:
        if not torch.compiler.is_compiling():
            # torch's own functions make plain tensors too, and below them no mode is asked
            self._before.append(dtensors.replicate_implicitly(True))
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        if not torch.compiler.is_compiling():
            dtensors.replicate_implicitly(self._before.pop())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return self._call(func, args, kwargs or {})
        with overrides.not_overridden():
            return self._call(func, args, kwargs or {})

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mesh = None if func in _AS_THEY_ARE else _mesh((args, kwargs))
        if mesh is None:
            return self._blank(func, args, kwargs) if func in _BLANKS else func(*args, **kwargs)
        mixed = _any_plain((args, kwargs))
        out = _mix(func, args, kwargs, mesh, self._shares) if mixed else overrides.call(func, args, kwargs)
        if isinstance(out, DTensor) and out.is_complex():
            known = self._spectra.get(out.ndim)
            if known is None or known.placements != out.placements or known.device_mesh != out.device_mesh:
                self._spectra[out.ndim] = out.new_empty((2,) * out.ndim)
        return out

    def _blank(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A new tensor; a DTensor, if it is complex and there was a spectrum with as many dims."""
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        sizes = args[0] if args and isinstance(args[0], (list, tuple)) else args
        like = self._spectra.get(len(sizes)) if dtype is not None and dtype.is_complex else None
        if like is None or not kwargs.keys() <= {"dtype", "device"} or torch.device(device or "cpu").type != like.device.type:
            return func(*args, **kwargs)
        return _BLANKS[func](like, sizes, dtype=dtype)


def permit(mesh: DeviceMesh) -> None:
    """From now on plain tensors mix with DTensors on ``mesh`` everywhere in eager code, as inside `plain_as_replicated`.

    A training loop calls its loss outside of the model, with plain labels from a data loader. Code that torch.compile traces
    is allowed the same, as far as plain tensors that require no gradient go.
    """
    if not _permitted:
        dtensors.replicate_implicitly(True)
        overrides.override_functions(_mixed)
    _permitted.add(mesh)


def _forbid() -> None:
    if _permitted:
        _permitted.clear()
        dtensors.replicate_implicitly(False)
        overrides.override_functions(None)


_permitted: set[DeviceMesh] = set()
switch.when_disabled.append(_forbid)


def _mixed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` with DTensors and, if their mesh permits that, plain tensors."""
    if func is torch.Tensor.numpy:
        return _known_to_all("numpy", args[0]).numpy(**kwargs)
    if func is torch.Tensor.as_subclass:
        return _known_to_all(args[1].__name__, args[0]).as_subclass(args[1])
    if func in _AS_THEY_ARE or not _any_plain((args, kwargs)):
        return overrides.call(func, args, kwargs)
    mesh = _mesh((args, kwargs))
    if mesh is not None and mesh in _permitted:
        return _mix(func, args, kwargs, mesh, shares=False)
    before = dtensors.replicate_implicitly(False)
    try:
        return func(*args, **kwargs)
    finally:
        dtensors.replicate_implicitly(before)


def _known_to_all(name: str, tensor: DTensor) -> torch.Tensor:
    """What is known to all ranks anyway, for metrics that leave torch for NumPy, SciPy or another kind of tensor."""
    if any(placement != Replicate() for placement in tensor.placements):
        raise TypeError(
            f"{name}: each rank has a part of this tensor of shape {tuple(tensor.shape)}; call `tensor.full_tensor()` first, "
            "which gathers all of it on every rank (metrics of surfaces and rankings need that)"
        )
    return tensor.to_local() if tensor.requires_grad else dtensors.local(tensor)


def _mix(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, shares: bool) -> Any:
    """Call ``func`` with plain tensors as replicated DTensors; or, where it writes to a plain one, as that one can take it."""
    if not torch.compiler.is_compiling():
        args, kwargs = _each(stand_ins.value_of, (args, kwargs))
    written = _written(func, args, kwargs)
    if not isinstance(written, torch.Tensor) or isinstance(written, DTensor):
        args, kwargs = _each(_Replicate(_name(func), mesh, shares), (args, kwargs))
        return overrides.call(func, args, kwargs)
    placements = None if torch.compiler.is_compiling() else _taken(_name(func), written, (args, kwargs), mesh)
    if placements is None:
        args, kwargs = _each(lambda tensor: _whole(tensor, _name(func)), (args, kwargs))
        return func(*args, **kwargs)
    sharded = aten.clone(redistribution.redistribute(_Replicate(_name(func), mesh, shares=False)(written), placements))
    assert isinstance(sharded, DTensor)
    if written is kwargs.get("out"):
        sharded.copy_(_mix(func, args, {name: kwargs[name] for name in kwargs.keys() - {"out"}}, mesh, shares))
    else:
        args, kwargs = _each(lambda tensor: sharded if tensor is written else tensor, (args, kwargs))
        _mix(func, args, kwargs, mesh, shares)
    stand_ins.replace(written, sharded)
    return sharded


def _taken(name: str, written: torch.Tensor, arguments: Any, mesh: DeviceMesh) -> list[Placement] | None:
    """How a plain tensor is sharded by what is written to it: along dims of their size; None if it must stay plain.

    A larger one, such as an image that is put together from tiles, stays plain.
    """
    tensors = tensors_in(arguments)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            continue
        for axis, p in enumerate(tensor.placements):
            if p == Replicate() or p.is_partial():
                continue
            if type(p) is not Shard or tensor.device_mesh != mesh:
                return None
            # What is broadcast may lack the first dims, a mask the last ones.
            places = (p.dim + written.ndim - tensor.ndim, p.dim)
            dims = [dim for dim in places if 0 <= dim < written.ndim and written.shape[dim] == tensor.shape[p.dim]]
            if not dims:
                return None
            placements[axis] = Shard(dims[0])
    if all(p == Replicate() for p in placements):
        return None
    alone = stand_ins.replaceable(written)
    if tracing.has_values(written):
        caching.cached_on_mesh(mesh, _Agreed, name, tuple(written.shape), tuple(placements)).once(alone)
    return placements if alone else None


class _Agreed:
    """A kind of write, of which the ranks compare the first one: who else knows a tensor depends on what each has run."""

    def __init__(self, mesh: DeviceMesh, name: str, shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
        self._mesh, self._what, self._done = mesh, f"{name} of shards to a plain tensor of shape {shape}", False

    def once(self, alone: bool) -> None:
        """Raise the same error on every rank if only some of them have a view, or an array, of the tensor."""
        if not self._done:
            debug.agree(self._what, {"known by nobody else": alone}, self._mesh)
            self._done = True


def _whole(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """All of ``tensor`` on every rank, for a plain tensor that it is written to."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, placements = tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim
    watching.announce(watching.Redistribution(name, tensor.shape, tensor.dtype, mesh, tensor.placements, placements))
    return tensor.full_tensor()


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", str(func))


def _mesh(arguments: Any) -> DeviceMesh | None:
    """The mesh of the first DTensor among ``arguments``."""
    if isinstance(arguments, (DTensor, stand_ins.StandIn)):
        return arguments.device_mesh
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, (list, tuple)):
        return None
    for argument in arguments:
        mesh = _mesh(argument)
        if mesh is not None:
            return mesh
    return None


def _written(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What ``func`` writes to: its first argument if it is in place, or ``out``."""
    return args[0] if func in _IN_PLACE else kwargs.get("out")


# Sets of functions, not of names, because that is what torch.compile can look into.
_OPERATORS = ["add", "and", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor"]
_IN_PLACE = {getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name[0] != "_" and name[-1] == "_"} | {
    getattr(torch.Tensor, name) for name in ["__setitem__", *(f"__i{operator}__" for operator in _OPERATORS)]
}
# These tell tensors apart by identity, or store them.
_AS_THEY_ARE = {
    torch.autograd.grad,
    torch.autograd.backward,
    torch.Tensor.grad.__set__,  # type: ignore[union-attr]
    torch.Tensor.data.__set__,  # type: ignore[attr-defined]
}


_BLANKS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.empty: torch.Tensor.new_empty,
    torch.ones: torch.Tensor.new_ones,
    torch.zeros: torch.Tensor.new_zeros,
}


def _each(change: Callable[[torch.Tensor], torch.Tensor], argument: Any) -> Any:
    """``argument`` with ``change`` of every tensor in it, in lists, tuples and dicts too."""
    if isinstance(argument, torch.Tensor):
        return change(argument)
    if isinstance(argument, dict):
        return {key: _each(change, value) for key, value in argument.items()}
    if type(argument) in (list, tuple):
        return type(argument)([_each(change, value) for value in argument])
    return argument


#: Of what most arguments are.
_NOT_PLAIN = {DTensor, bool, int, float, str, type(None), torch.dtype}


def _any_plain(argument: Any) -> bool:
    if isinstance(argument, torch.Tensor):
        return not isinstance(argument, DTensor)
    if isinstance(argument, dict):
        argument = argument.values()
    elif not isinstance(argument, (list, tuple)):
        return False
    # An optimizer gives hundreds of DTensors in a list, and each call of an op comes through here.
    return any(type(each) not in _NOT_PLAIN and _any_plain(each) for each in argument)


class _Replicate:
    """Makes plain tensors replicated DTensors on a mesh, with a step in the autograd graph."""

    def __init__(self, name: str, mesh: DeviceMesh, shares: bool):
        self._name, self._mesh, self._shares = name, mesh, shares

    def __call__(self, tensor: torch.Tensor) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor
        tensor = overrides.undressed(tensor)
        if debug.ON and not torch.compiler.is_compiling():
            assert_same(self._name, tensor.detach(), self._mesh)
        # torch.compile cannot look into the first way; the second, with a sum for each parameter, has the same mean.
        if self._shares and isinstance(tensor, torch.nn.Parameter) and not torch.compiler.is_compiling():
            return _Shared.apply(tensor, self._mesh)
        return DTensor.from_local(tensor, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)


class _Shared(torch.autograd.Function):
    """A plain parameter as a replicated DTensor.

    Adjoint: this rank's partial sum, times the number of ranks, so that the mean over them is the sum.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        return dtensors.replicated(tensor.detach(), mesh)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        kept = [p if p.is_partial("sum") else Replicate() for p in grad.placements]
        ranks = prod(grad.device_mesh.size(axis) for axis, p in enumerate(kept) if p.is_partial())
        return dtensors.local(redistribution.redistribute(grad, kept)) * ranks, None


def assert_same(name: str, tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raise on all ranks of ``mesh`` if they do not hold the same bytes; ``name`` is that of the op that wants them."""
    if process_groups.coordinate(mesh) is None or not tracing.has_values(tensor):
        return
    sums = collectives.all_gather(simulation.per_rank(_checksum, tensor).to(mesh.device_type), mesh, range(mesh.ndim))
    seen = [[int(number.item()) for number in row.unbind()] for row in sums.unbind()]
    others = [rank for rank, row in zip(mesh.mesh.flatten().tolist(), seen, strict=True) if row != seen[0]]
    if others:
        raise RuntimeError(
            f"{name}: a plain tensor (shape={tuple(tensor.shape)}, dtype={tensor.dtype}) is taken as replicated, but ranks "
            f"{others} hold other values than rank {int(mesh.mesh.flatten()[0])}: make it from the same numbers on all ranks"
        )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Two numbers that differ, but for rare accidents, where shape or any byte differs."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    places = torch.arange(1, content.numel() + 1, device=content.device)
    shape = sum(size * 31**dim for dim, size in enumerate(tensor.shape, start=1))
    return torch.stack([(content * places.mul(0x9E3779B97F4A7C1).bitwise_xor(places)).sum(), content.sum() + shape])
