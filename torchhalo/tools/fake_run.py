"""One step of one rank on fake tensors: what each layer keeps, sends and computes, without values or other ranks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from torchhalo.exchange import gathers
from torchhalo.exchange.debug import modules
from torchhalo.exchange.plan import Exchange
from torchhalo.parallel.arrays import shard
from torchhalo.parallel.edges import replace_tensors
from torchhalo.parallel.parallelize import parallelize
from torchhalo.parallel.start import without_values
from torchhalo.parallel.structures import tensors_in
from torchhalo.tools.explanation import Layer, Rank
from torchhalo.torch_internals import calls, dtensors, fake_tensors, simulation, switch, watching


def observe_rank(
    model: Any,
    sample: list[torch.Tensor],
    mesh_shape: tuple[int, ...],
    place: tuple[int, ...],
    dims: tuple[int, ...],
    dtype: torch.dtype,
    train: bool,
) -> Rank:
    number = 0
    for size, at in zip(mesh_shape, place, strict=True):
        number = number * size + at
    with switch.enable(), simulation.fake_world(math.prod(mesh_shape), number):
        mesh = init_device_mesh("cpu", mesh_shape)
        net = without_values_of(model).train(train)
        with fake_tensors.fake_tensor_mode():
            replace_tensors(net, lambda tensor: _fake(tensor, dtype))
            parallelize(net, mesh, dims=dims)
            inputs = [_fake(x, dtype) for x in sample]
            inputs = [shard(x, mesh, dims) if x.ndim == inputs[0].ndim >= 3 else x for x in inputs]
            inputs = [x.detach().requires_grad_(given.requires_grad) for x, given in zip(inputs, sample, strict=True)]
            with gathers.watch(lambda gather: None):
                _step(net, inputs, train)  # the first shows what attention wants moved, all others are as the second
            for tensor in [*net.parameters(), *inputs]:
                tensor.grad = None
            observer = _Observer(net, inputs, place)
            with observer.installed():
                _step(net, inputs, train, observer.keep)
            return observer.rank()


def _step(model: nn.Module, inputs: list[torch.Tensor], train: bool, between: Callable[[], None] = lambda: None) -> None:
    with torch.set_grad_enabled(train):
        outputs = tensors_in(model(*inputs))
        between()
        if train:
            wanted = [x for x in outputs if x.requires_grad]
            # Sharded as the outputs are, as from a loss that looks at each element; that of a plain mean would be replicated.
            torch.autograd.backward(wanted, [torch.ones_like(x) for x in wanted])


def _fake(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.numel() == 1 and not tensor.is_floating_point() and not tensor.is_meta:
        return torch.tensor(tensor.tolist(), dtype=tensor.dtype)  # of which `item` knows the value
    return torch.empty_like(tensor, device="cpu", dtype=dtype if tensor.is_floating_point() else tensor.dtype)


def without_values_of(model: Any) -> nn.Module:
    """A copy of the model with parameters and buffers that take no memory; made outside of `fake_tensor_mode`."""
    if isinstance(model, nn.Module):
        return without_values(model)
    try:
        with torch.device("meta"):
            return model()
    except (RuntimeError, NotImplementedError):  # it looks at values while it is made
        return without_values_of(model())


class _Observer(watching.TorchDispatchMode, watching.Watcher):
    """Watches one rank: what its tensors take, what its ops compute, and what is sent."""

    def __init__(self, model: nn.Module, inputs: list[torch.Tensor], place: tuple[int, ...]):
        super().__init__()
        self._place = place
        self._model = type(model).__name__
        self._names = {id(module): path for path, module in model.named_modules()}
        self._layers: dict[str, Layer] = {}
        self._living: dict[int, tuple[int, str | None]] = {}
        self._now = self._peak = self._gradients = 0
        self._kept = False
        for tensor in tensors_in([*model.parameters(), *model.buffers(), *inputs]):
            self._born(dtensors.local(tensor) if isinstance(tensor, DTensor) else tensor, None)

    def installed(self) -> ExitStack:
        """A context in which everything is seen."""
        scope = ExitStack()
        scope.enter_context(modules.watched())
        scope.enter_context(gathers.watch(self._gather))
        scope.enter_context(gathers.watch_moves(self._move))
        scope.enter_context(watching.watched_by(self))
        hook = torch.nn.modules.module.register_module_forward_hook(self._left)
        scope.callback(hook.remove)
        scope.enter_context(self)
        return scope

    def keep(self) -> None:
        """Note which activations are alive: backward needs them, or they are outputs."""
        self._kept = True
        for size, path in list(self._living.values()):
            if path is not None:
                self._layer(path).kept += size

    def rank(self) -> Rank:
        return Rank(self._place, list(self._layers.values()), self._gradients, self._peak)

    def _layer(self, path: str | None = None) -> Layer:
        path = modules.path() if path is None else path
        path = "" if path == self._model else path  # which runs under its class's name
        return self._layers.setdefault(path, Layer(path))

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        path = self._names.get(id(module))
        found = tensors_in(output)
        if path is None or not found or not isinstance(found[0], DTensor):
            return
        layer = self._layer(path)
        layer.kind, layer.output, layer.shard = type(module).__name__, tuple(found[0].shape), tuple(found[0].to_local().shape)

    def _gather(self, gather: gathers.Gather) -> None:
        self._layer().gathered += gather.bytes

    def _move(self, move: gathers.Move) -> None:
        self._layer().moved += move.bytes

    def collective(self, each: watching.Collective) -> None:
        kind, tensor, _, sent, _, about = each
        size = tensor.element_size()
        if kind != "all_to_all":
            if modules.path() or calls.running_call() is not None:
                self._layer().reduced += tensor.numel() * size
            else:
                self._gradients += tensor.numel() * size
            return
        layer = self._layer()
        layer.sent += sum(sent) * size
        layer.messages += sum(1 for count in sent if count)
        if isinstance(about, Exchange) and not self._kept:
            self._halo(layer, about)

    def _halo(self, layer: Layer, exchange: Exchange) -> None:
        plan = exchange.plan(self._place)
        spans = [pair for pair in zip(exchange.dims, plan.owned.spans, plan.needs.spans, strict=True) if pair[1].size]
        halo = {dim: (max(0, own.start - need.start), max(0, need.stop - own.stop)) for dim, own, need in spans if need.size}
        if exchange.source == layer.source:  # of an op that takes one dim after another
            halo = {**layer.halo, **{dim: max(layer.halo.get(dim, (0, 0)), sides, key=sum) for dim, sides in halo.items()}}
        if layer.source is None or sum(map(sum, halo.values())) > sum(map(sum, layer.halo.values())):
            layer.halo, layer.source = halo, exchange.source

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.overloadpacket in flop_registry:
            self._layer().flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        path = modules.path()
        for tensor in tensors_in(out):
            self._born(tensor, path)
        return out

    def _born(self, tensor: torch.Tensor, path: str | None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._living:
            self._living[key] = storage.nbytes(), path
            self._now += storage.nbytes()
            self._peak = max(self._peak, self._now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._now -= self._living.pop(key)[0]
