"""Run a model in one process of a check, and tell what was seen of it."""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from torchhalo.exchange import gathers
from torchhalo.exchange.debug import modules
from torchhalo.exchange.grids import positions
from torchhalo.exchange.transfer import counted
from torchhalo.parallel.arrays import shard
from torchhalo.parallel.parallelize import parallelize
from torchhalo.parallel.structures import tensors_in, whole
from torchhalo.tools.launch import peak_memory
from torchhalo.torch_internals import dtensors, handlers, process_groups, redistribution, switch, watching

#: By how many sums the outputs of a module are told apart.
PROBES = 3


class Case(NamedTuple):
    """What to run.

    Attributes:
        model: A module, a function that makes one, or the name of such a function as ``package.module:function``.
        sample: Positional inputs: tensors, or shapes of random ones.
        dims: Along which dim each axis of the mesh cuts the inputs; None to have them chosen.
        backward: Whether to compare gradients too.
        train: Whether the model is in training mode.
        method: What of the model is called.
        loss: A function of what that returns to a scalar, or its name as ``package.module:function``; the gradients are its.
            None for a sum of all outputs in which every element counts differently.
    """

    model: Any
    sample: tuple[Any, ...]
    dims: tuple[int, ...] | None
    backward: bool
    train: bool
    dtype: torch.dtype
    seed: int
    method: str = "forward"
    loss: Any = None


class Gradient(NamedTuple):
    """The gradient of a tensor that one module made and others read.

    Attributes:
        of: Which tensor, in words.
        readers: The paths of the modules that read it, the innermost ones: their backward made the gradient.
        sums: This rank's share in the sums by which it is told apart.
    """

    of: str
    readers: list[str]
    sums: list[float]


class Seen(NamedTuple):
    """What one process saw.

    Attributes:
        values: Outputs, gradients and buffers by name; empty on ranks other than the first.
        modules: The path of each module, in the order in which they ended, and this rank's share in the sums by which its
            outputs are told apart.
        gradients: Likewise of the gradients of inputs and of outputs of modules, in the order of backward.
        gathered: How often each (op, module) gathered, and the bytes of it.
        moved: Likewise for what moved from one sharding to another.
        convolved: How many bytes of inputs the convolutions read, all ranks together.
        memory: By how many bytes the run raised the peak memory of the process.
        sent: How many bytes this rank sent in exchanges.
    """

    values: dict[str, torch.Tensor]
    modules: list[tuple[str, list[float]]]
    gradients: list[Gradient]
    gathered: list[tuple[str, str, int, int]]
    moved: list[tuple[str, str, int, int]]
    convolved: int
    memory: int
    sent: int


class ModelError(RuntimeError):
    """The model raised."""


def observe(case: Case, mesh_shape: tuple[int, ...] | None) -> Seen:
    """Run the model on this rank: whole if there is no mesh, else sharded."""
    redistribution.silence_hints()
    switch.enable()
    mesh = init_device_mesh("cpu", mesh_shape or (1,))
    torch.manual_seed(case.seed)
    with Uncast(case.dtype):
        model = _made(case.model).to(case.dtype).train(case.train)
    generator = torch.Generator().manual_seed(case.seed)
    inputs = [input_of(sample, case.dtype, generator) for sample in case.sample]
    _warm_up(mesh, case.dtype)
    before = peak_memory()
    if mesh_shape is not None:
        parallelize(model, mesh, dims=case.dims, methods=() if case.method == "forward" else (case.method,))
        inputs = [shard(x, mesh, case.dims) if x.ndim == inputs[0].ndim >= 3 else x for x in inputs]
    inputs = [x.detach().requires_grad_(case.backward and x.is_floating_point()) for x in inputs]
    watcher = _Watcher(model, inputs)
    alone = _SingleProcess(mesh)
    if mesh_shape is None:
        alone.mark([*inputs, *model.parameters(), *model.buffers()])
    scope = alone if mesh_shape is None else nullcontext()
    place = _FailureTracker()
    watched = gathers.watch(watcher.gathered.count), gathers.watch_moves(watcher.moved.count)
    with watched[0], watched[1], counted() as sent, modules.watched(), scope, Uncast(case.dtype), place:
        torch.manual_seed(case.seed)
        try:
            outputs, loss = _called(model, case, inputs)
            watcher.stack = ["backward"]
            if case.backward:
                (weighted(outputs) if loss is None else loss).backward()
        except Exception as error:
            where = place.where or f"in {watcher.path or 'the model'}"
            raise ModelError(f"{where}: {type(error).__name__}: {error}") from error
    memory = peak_memory() - before
    values = dict(values_of(model, inputs, outputs))
    if loss is not None:
        values["loss: "] = whole(loss).detach()
    kept = values if dist.get_rank() == 0 else {}
    return Seen(
        kept,
        watcher.modules,
        watcher.gradients,
        watcher.gathered.rows(),
        watcher.moved.rows(),
        alone.convolved,
        memory,
        sum(sent),
    )


def _called(model: nn.Module, case: Case, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """What the model returns, and the loss of it if one is wanted."""
    if not hasattr(model, case.method):
        raise ValueError(f"{type(model).__name__} has no method {case.method!r}")
    returned = (model if case.method == "forward" else getattr(model, case.method))(*inputs)
    if case.loss is None:
        return tensors_in(returned), None
    loss = (named(case.loss) if isinstance(case.loss, str) else case.loss)(returned)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"the loss must be a tensor of one element, got {got}")
    return tensors_in(returned), loss


def _warm_up(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Have torch and DTensor load what they load once, so that it does not count as memory of the model."""
    layer = parallelize(nn.Conv2d(1, 1, 3, padding=1, dtype=dtype), mesh, dims=(2,) * mesh.ndim)
    layer(torch.ones(1, 1, 8, 8, dtype=dtype)).sum().backward()


def _made(model: Any) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    return named(model)() if isinstance(model, str) else model()


def named(name: str) -> Callable[..., Any]:
    """The function called ``package.module:function``, also in the present folder.

    Raises:
        ValueError: There is no such function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"a function is named as package.module:function, got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no function {function!r} in a module {module!r}: {error}") from error
    return found


def input_of(sample: Any, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if isinstance(sample, torch.Tensor):
        return sample.to(dtype) if sample.is_floating_point() else sample
    return torch.randn(tuple(sample), dtype=dtype, generator=generator)


def weighted(outputs: list[torch.Tensor]) -> torch.Tensor:
    """A sum of all outputs in which every element counts differently, so that no error in a gradient cancels out."""
    total: Any = 0
    for output in outputs:
        if output.requires_grad:
            total = total + (output * torch.cos(_positions(output))).sum()
    return total


def _positions(tensor: torch.Tensor) -> torch.Tensor:
    """The place of each element in the whole tensor, sharded as it is."""
    whole = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape).to(tensor.dtype)
    if not isinstance(tensor, DTensor):
        return whole
    kept = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return distribute_tensor(whole, tensor.device_mesh, kept, src_data_rank=None)


def values_of(model: nn.Module, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, output in enumerate(outputs):
        yield f"outputs: {number}", whole(output).detach()
    for number, x in enumerate(inputs):
        if x.grad is not None:
            yield f"input gradients: {number}", whole(x.grad)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"gradients: {name}", whole(parameter.grad)
    for name, buffer in model.named_buffers():
        yield f"buffers: {name}", whole(buffer).detach()


class _Watcher:
    """Hooks on every module: which one runs, and by which sums its outputs, and their gradients, are told apart."""

    def __init__(self, model: nn.Module, inputs: list[torch.Tensor]):
        self.stack: list[str] = []
        self.modules: list[tuple[str, list[float]]] = []
        self.gradients: list[Gradient] = []
        self.gathered, self.moved = _Tally(self), _Tally(self)
        for number, tensor in enumerate(inputs):
            self._follow(tensor, f"input {number}")
        for path, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, path))

    @property
    def path(self) -> str:
        return self.stack[-1] if self.stack else ""

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stack.append(path)
        for tensor in tensors_in((args, kwargs)):
            followed = tensor.__dict__.get("_torchhalo_followed")
            if followed is not None and path not in followed[1]:
                followed[1].append(path)

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()
        self.modules.append((path, [share for tensor in tensors_in(output) for share in _fingerprint(tensor)]))
        for tensor in tensors_in(output):
            self._follow(tensor, f"the output of {path or 'the model'}")

    def _follow(self, tensor: torch.Tensor, name: str) -> None:
        """Note the gradient of ``tensor``, once for the module that made it and not for those that hand it on."""
        step, _ = tensor.__dict__.get("_torchhalo_followed", ("", []))
        if not tensor.requires_grad or tensor.grad_fn is step:  # another step: it was written to in place
            return
        readers: list[str] = []
        tensor.__dict__["_torchhalo_followed"] = tensor.grad_fn, readers
        tensor.register_hook(partial(self._gradient, name, readers))

    def _gradient(self, name: str, readers: list[str], grad: torch.Tensor) -> None:
        inner = [path for path in readers if not any(other != path and other.startswith(f"{path}.") for other in readers)]
        self.gradients.append(Gradient(name, inner, _fingerprint(grad)))


class _Tally:
    """How often something happened, and of how many bytes, by op and module."""

    def __init__(self, watcher: _Watcher):
        self._watcher = watcher
        self._counts: dict[tuple[str, str], list[int]] = {}

    def count(self, event: gathers.Gather | gathers.Move) -> None:
        """Note a gather or a move where it happens."""
        counts = self._counts.setdefault((event.op, self._watcher.path), [0, 0])
        counts[0] += 1
        counts[1] += event.bytes

    def rows(self) -> list[tuple[str, str, int, int]]:
        return [(op, path, times, size) for (op, path), (times, size) in self._counts.items()]


class _SingleProcess(watching.TorchDispatchMode):
    """In one process: counts what convolutions read, and draws random numbers as a mesh of one rank does.

    Of the latter only those for tensors that would be DTensors on a mesh: inputs, parameters, and all that is made from them.
    What a model draws for a plain tensor of its own comes from torch's stream there too.
    """

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.convolved = 0
        self._mesh = mesh
        self._random = {entry.op for entry in handlers.registry() if entry.family == "randomness"}

    def mark(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take ``tensors`` as ones that would be DTensors."""
        for tensor in tensors:
            tensor.__dict__["_torchhalo_distributed"] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.convolved += args[0].numel() * args[0].element_size()
        kwargs = kwargs or {}
        if not any("_torchhalo_distributed" in tensor.__dict__ for tensor in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        out = self._drawn(func, args, kwargs) if func in self._random else func(*args, **kwargs)
        self.mark(tensors_in(out))
        return out

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [dtensors.replicated(arg, self._mesh) if isinstance(arg, torch.Tensor) else arg for arg in args]
        out = func(*given, **kwargs)
        if func._schema.is_mutable:
            return args[0]
        return tuple(map(dtensors.local, out)) if isinstance(out, tuple) else dtensors.local(out)


class _FailureTracker(watching.TorchDispatchMode):
    """Notes at which op, and in which module, a model raises."""

    def __init__(self) -> None:
        super().__init__()
        self.where: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            backward = ", backward" if modules.backward() else ""
            self.where = f"{func} in {modules.path() or 'the model'}{backward}"
            raise


class Uncast(watching.TorchDispatchMode):
    """Where a model computes some layers in float32, a check in float64 stays there, so that its tolerance holds for all."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = self._dtype
        return func(*args, **kwargs)


def _fingerprint(tensor: torch.Tensor) -> list[float]:
    """This rank's share in a few weighted sums over the whole tensor, which differ for tensors that differ; nothing is sent."""
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            part, places = tensor, [torch.arange(size) for size in tensor.shape]
        else:
            tensor = redistribution.reduce_partial(tensor)
            coordinate = process_groups.coordinate(tensor.device_mesh)
            copies = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
            if coordinate is None or any(coordinate[axis] for axis in copies):
                return [0.0] * PROBES
            part, places = tensor.to_local(), positions(tensor, coordinate)
        scale = math.sqrt(max(1, tensor.numel()))
        return [_weighted_sum(part.to(torch.float64), places, probe) / scale for probe in range(PROBES)]


def _weighted_sum(part: torch.Tensor, places: list[torch.Tensor], probe: int) -> float:
    """The sum with weights that are a product over dims, so that no tensor of them is needed."""
    for dim in reversed(range(part.ndim)):
        part = part @ torch.cos((0.7 + dim) * (probe + 1) * places[dim].double() + probe)
    return float(part)
