"""What each layer of a model will keep, send and need on a mesh, before anything runs: on shapes alone, in one process."""

from __future__ import annotations

import copy
import json
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import flop_registry

from torchhalo.exchange import gathers
from torchhalo.exchange.debug import modules
from torchhalo.exchange.layout import Layout
from torchhalo.exchange.plan import Exchange
from torchhalo.parallel.arrays import placements_for, shard
from torchhalo.parallel.parallelize import parallelize, replace_tensors, tensors_in
from torchhalo.tools.observe import named
from torchhalo.torch_internals import calls, dtensors, fake_tensors, simulation, switch, watching

#: Dense bfloat16 operations per second, and bytes per second to other devices of the host, by the makers' data sheets.
DEVICES = {
    "a100": (312e12, 300e9),
    "h100": (989e12, 450e9),
    "h200": (989e12, 450e9),
    "b200": (2250e12, 900e9),
    "mi300x": (1307e12, 448e9),
}

#: Seconds per message.
LATENCY = 1e-5


@dataclass
class Layer:
    """What a module itself, without those inside it, does in a step on one rank.

    Attributes:
        path: Of the module; empty for the model itself.
        kind: Its class.
        output: The global shape of what it returned.
        shard: The rank's part of that.
        halo: By dim, how many elements it needs before and after its own, in the forward's exchange with the most.
        source: Shape, mesh and cuts of the tensor that these are elements of.
        sent: Bytes of halos, forward and backward.
        messages: In how many pieces, to how many ranks.
        reduced: Bytes of statistics and sums that it takes part with.
        gathered: Bytes that it receives because an op needs the whole of a sharded activation.
        kept: Bytes of activations that live on when the forward has ended.
        flops: Of convolutions, matrix products and attention, forward and backward.
    """

    path: str
    kind: str = ""
    output: tuple[int, ...] = ()
    shard: tuple[int, ...] = ()
    halo: dict[int, tuple[int, int]] = field(default_factory=dict)
    source: Layout | None = None
    sent: int = 0
    messages: int = 0
    reduced: int = 0
    gathered: int = 0
    kept: int = 0
    flops: int = 0


@dataclass
class Rank:
    """A step on one rank.

    Attributes:
        place: Of the rank in the mesh.
        layers: In the order in which they begin.
        gradients: Bytes of the parameters' gradients that are summed over the mesh.
        peak: The most bytes of tensors at a time: parameters, gradients, activations, buffers for halos; not the optimizer's
            state, nor what kernels take for themselves.
    """

    place: tuple[int, ...]
    layers: list[Layer]
    gradients: int
    peak: int

    def total(self, name: str) -> int:
        """The sum over the layers of one of their numbers."""
        return sum(getattr(layer, name) for layer in self.layers)


@dataclass
class Explanation:
    """What `explain` found.

    Attributes:
        model: Its name.
        inputs: The global shapes.
        mesh: The shape of the mesh.
        dims: Along which dim each axis cuts the inputs.
        dtype: Of weights and inputs.
        train: Whether a step has a backward.
        ranks: Those that were looked at: the corners of the mesh and those between, which have neighbours on both sides.
        alone: The peak of one device that runs it all.
    """

    model: str
    inputs: list[tuple[int, ...]]
    mesh: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: str
    train: bool
    ranks: list[Rank]
    alone: int

    @property
    def busiest(self) -> Rank:
        """The rank that sends the most."""
        return max(self.ranks, key=lambda rank: rank.total("sent"))

    @property
    def peak(self) -> int:
        """Of the rank that needs the most memory."""
        return max(rank.peak for rank in self.ranks)

    def seconds(self, flops: float, bandwidth: float) -> tuple[float, float]:
        """How long a step takes at these operations and bytes per second, if all communication is hidden, and if none is."""
        rank, ranks = self.busiest, math.prod(self.mesh)
        around = 2 * (ranks - 1) / ranks * (rank.total("reduced") + rank.gradients)
        sent = (rank.total("sent") + rank.total("gathered") + around) / bandwidth + LATENCY * rank.total("messages")
        compute = rank.total("flops") / flops
        return max(compute, sent), compute + sent

    def json(self) -> str:
        """All of it, for programs."""
        return json.dumps({**asdict(self), "peak": self.peak}, indent=2)

    def __str__(self) -> str:
        return "\n".join(_table(self))

    def _repr_html_(self) -> str:
        from torchhalo.tools import report  # which imports this module

        return report.frame(self)


def explain(
    model: Any,
    sample: Sequence[Any],
    mesh: Sequence[int],
    *,
    dims: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    train: bool = False,
    every_rank: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Explanation:
    """See what sharding does to a model before it runs, on a machine that could never run it.

    The model runs through torchhalo as it would on each rank, on tensors that have shapes and no values: nothing is computed,
    no process is started, no memory is taken, and the bytes are those that a real run sends.

    Args:
        model: A module, a function that makes one, or the name of such a function as ``package.module:function``.
        sample: The shape of the input, or one for each input. A tensor may stand for a shape: if it requires a gradient, so
            does the input; if it is one integer, such as a time step, the input has its value. On the meta device it takes no
            memory.
        mesh: The shape of the mesh, such as ``(2, 4)``.
        dims: Along which dim each axis of the mesh cuts the inputs; chosen as by `parallelize` if not given.
        train: In training mode, with a backward.
        every_rank: Look at all ranks; else at those that differ: at the ends of each axis, and one between.
        progress: Told what is being done.

    Example:
        >>> print(torchhalo.explain(torch.nn.Conv2d(3, 8, 3, padding=1), (1, 3, 4096, 4096), (4,)).busiest.total("sent"))
        98304
    """
    inputs = _inputs(sample, dtype)
    cut = _cut(inputs, len(mesh), dims)
    made = named(model) if isinstance(model, str) else model
    ends = [range(size) if every_rank else sorted({0, size // 2, size - 1}) for size in mesh]
    ranks = []
    for place in product(*ends):
        progress(f"rank {place} of {'x'.join(map(str, mesh))}")
        ranks.append(_observe(made, inputs, tuple(mesh), place, cut, dtype, train))
    progress("one device")
    alone = _observe(made, inputs, (1,), (0,), cut[:1], dtype, train).peak
    name = model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)
    shapes = [tuple(x.shape) for x in inputs]
    return Explanation(name, shapes, tuple(mesh), cut, str(dtype).removeprefix("torch."), train, ranks, alone)


def smallest_mesh(
    model: Any,
    sample: Sequence[Any],
    memory: int,
    axes: int = 1,
    *,
    dims: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    train: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[int, ...] | None:
    """The first mesh, of those made by doubling an axis along which shards are longest, on which no rank needs more.

    Args:
        memory: In bytes, for what `Rank.peak` counts.
        axes: How many axes the mesh has. The other arguments are those of `explain`.

    Returns:
        Its shape; None if even the largest that was tried, of 4096 ranks, does not do.

    Example:
        >>> smallest_mesh(torch.nn.Conv2d(3, 64, 3, padding=1), (1, 3, 4096, 4096), 2 * 2**30)
        (4,)
    """
    inputs = _inputs(sample, dtype)
    cut = _cut(inputs, axes, dims)
    made = named(model) if isinstance(model, str) else model
    mesh = [1] * axes
    while math.prod(mesh) <= 4096:
        progress(f"a mesh of {_mesh(mesh)}")
        if _observe(made, inputs, tuple(mesh), (0,) * axes, cut, dtype, train).peak <= memory:
            return tuple(mesh)
        mesh[max(range(axes), key=lambda axis: inputs[0].shape[cut[axis]] / mesh[axis])] *= 2
    return None


def _inputs(sample: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensors that were given, and for each shape one that takes no memory."""
    given = [sample] if isinstance(sample, torch.Tensor) or isinstance(sample[0], int) else sample
    return [x if isinstance(x, torch.Tensor) else torch.empty(tuple(x), dtype=dtype, device="meta") for x in given]


def _cut(inputs: list[torch.Tensor], axes: int, dims: int | Sequence[int] | None) -> tuple[int, ...]:
    return tuple(placement.dim for placement in placements_for(inputs[0].shape, axes, dims) if isinstance(placement, Shard))


def _observe(
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
        net = _without_values(model).train(train)
        with fake_tensors.fake_tensor_mode():
            replace_tensors(net, lambda tensor: _fake(tensor, dtype))
            parallelize(net, mesh, dims=dims)
            inputs = [_fake(x, dtype) for x in sample]
            inputs = [shard(x, mesh, dims) if x.ndim == inputs[0].ndim >= 3 else x for x in inputs]
            inputs = [x.detach().requires_grad_(given.requires_grad) for x, given in zip(inputs, sample, strict=True)]
            with gathers.watch(lambda gather: None):
                _step(net, inputs, train)  # DTensor works out placements with whole tensors, once
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


def _without_values(model: Any) -> nn.Module:
    """A copy of the model with parameters and buffers that take no memory; made outside of `fake_tensor_mode`."""
    if isinstance(model, nn.Module):
        memo: dict[int, Any] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            empty = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return copy.deepcopy(model, memo)
    try:
        with torch.device("meta"):
            return model()
    except (RuntimeError, NotImplementedError):  # it looks at values while it is made
        return _without_values(model())


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


def _table(found: Explanation) -> Iterator[str]:
    rank = found.busiest
    head = "layer", "output", "shard", "halo", "sent", "messages", "kept", "GFLOP", ""
    rows = [head]
    for layer in rank.layers:
        halo = " ".join(f"{dim}:{before}+{after}" for dim, (before, after) in sorted(layer.halo.items()))
        rows.append(
            (
                layer.path or "(model)",
                "x".join(map(str, layer.output)),
                "x".join(map(str, layer.shard)),
                halo,
                readable(layer.sent),
                str(layer.messages or ""),
                readable(layer.kept),
                f"{layer.flops / 1e9:.3g}" if layer.flops else "",
                f"GATHERS {readable(layer.gathered)}" if layer.gathered else "",
            )
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    step = "a training step" if found.train else "a forward"
    shapes = ", ".join(_mesh(shape) or "a number" for shape in found.inputs)
    yield f"{found.model}: {step} on {shapes} {found.dtype}, dims {found.dims} over a mesh of {_mesh(found.mesh)}"
    yield f"the rank that sends the most, at {rank.place}:"
    yield ""
    for row in rows:
        cells = [
            cell.ljust(width) if at < 4 else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
    yield ""
    yield f"halos sent per step     {readable(rank.total('sent')) or '0'} in {rank.total('messages')} messages"
    yield f"statistics and sums     {readable(rank.total('reduced')) or '0'}"
    if found.train:
        yield f"gradients summed        {readable(rank.gradients) or '0'}"
    gathered = rank.total("gathered")
    yield f"gathered                {readable(gathered) or 'nothing'}"
    yield f"operations              {rank.total('flops') / 1e9:,.1f} GFLOP"
    share = f"{found.peak / found.alone:.2f} of one device's {readable(found.alone)}"
    yield f"peak memory per rank    {readable(found.peak)}, {share}"


def _mesh(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def readable(count: int) -> str:
    """So many bytes, in words; nothing for none."""
    if not count:
        return ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    raise AssertionError
