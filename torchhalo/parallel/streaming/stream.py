"""A model that one device runs on images of any size, shard after shard, with the numbers of a device that could hold them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
from torch import nn

from torchhalo.parallel.streaming.host import Blocks
from torchhalo.parallel.streaming.prepare import Prepared, key_of, search
from torchhalo.parallel.streaming.run import Run, Streamed, part_of
from torchhalo.parallel.streaming.trace import METHODS, Call
from torchhalo.parallel.structures import mapped


def stream(
    model: nn.Module,
    *,
    memory: int | str | None = None,
    shards: int | Sequence[int] | None = None,
    dims: int | Sequence[int] | None = None,
    progress: bool = True,
) -> nn.Module:
    """Let one device run ``model`` on images, volumes and videos that it cannot hold, with the numbers of one that could.

    The call is cut into shards, as `parallelize` cuts it for ranks. The device computes them in turn; what waits lies in host
    memory, or, for a CPU, in a file. Parameters, ``state_dict`` and optimizers stay as they are, and a training step works as
    always: ``model(volume)``, a loss of it, ``backward()``. No process group is needed, and none may be there.

    The first call with inputs of new shapes runs the model once per shard on shapes alone, to know what it does; so it may not
    look at values of tensors. Inputs may be tensors on any device, or arrays with ``shape`` and slicing (NumPy, a memory map,
    zarr, h5py), of which each shard is read when it is needed. Outputs are whole tensors on the device of the first input, on
    the CPU for arrays; ``out=`` names an array or a tensor to write the output into instead.

    Args:
        model: Changed in place: its ``forward``, and ``encode`` and ``decode`` if it has them. Its parameters stay on the
            device where they are, and that device computes.
        memory: The most bytes on the device, parameters included, such as ``8 * 10**9`` or ``"8GB"``. On a GPU a thirty-second
            of it is left to what kernels take for themselves; outputs on the device come on top. If not given: on a GPU, nine
            tenths of what is free; on a CPU, no limit.
        shards: Into how many to cut, or how many along each of ``dims``; if not given, as few as the budget allows.
        dims: Along which dim, or dims, to cut; if not given, the first spatial dim (2).
        progress: Show a line with the progress of calls that take long, if standard error is a terminal.

    Returns:
        The model.

    Raises:
        BudgetError: At a call: a step of the smallest shards needs more than the budget.
        RuntimeError: At a call: the model cannot be traced; the message names the op and the module.

    Example:
        >>> import torch, torchhalo
        >>> model = torch.nn.Conv2d(3, 8, 3, padding=1)
        >>> image = torch.randn(1, 3, 64, 48)
        >>> expected = model(image)
        >>> torchhalo.stream(model, shards=4)(image).sub(expected).abs().max().item() < 1e-5
        True
    """
    counts = None if shards is None else (shards,) if isinstance(shards, int) else tuple(shards)
    if counts is not None and any(count < 1 for count in counts):
        raise ValueError(f"stream: `shards` must be positive, got {shards}")
    cut = (dims,) if isinstance(dims, int) else None if dims is None else tuple(dims)
    if counts is not None and cut is not None and len(counts) != len(cut):
        raise ValueError(f"stream: `shards` (={shards}) and `dims` (={dims}) must be as many")
    budget = None if memory is None else size_of(memory)
    for method in METHODS:
        if hasattr(model, method):
            model.__dict__.pop(method, None)
            model.__dict__[method] = _Streamed(model, method, budget, counts, cut, progress)
    return model


def unstream(model: nn.Module) -> nn.Module:
    """Undo `stream`.

    Example:
        >>> torchhalo.unstream(model)  # doctest: +SKIP
    """
    for method in METHODS:
        if isinstance(model.__dict__.get(method), _Streamed):
            del model.__dict__[method]
    return model


#: Which part of a GPU's budget is left to what kernels take for themselves, beside what is known of convolutions.
SPARE = 1 / 32

_UNITS = {"": 1, **{f"{p}B": 1000**n for n, p in enumerate(("", "K", "M", "G", "T"))}}
_UNITS |= {f"{p}IB": 1024**n for n, p in enumerate(("", "K", "M", "G", "T")) if n}


def size_of(text: int | str) -> int:
    """A number of bytes, as people write it.

    >>> size_of("1.5GiB"), size_of("8GB"), size_of(100)
    (1610612736, 8000000000, 100)
    """
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", str(text))
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"a number of bytes is written as 8GB or 500MiB, got {text!r}")
    return round(float(found[1]) * _UNITS[found[2].upper()])


class _Streamed:
    """A method of a model that runs shard by shard."""

    def __init__(
        self,
        model: nn.Module,
        method: str,
        budget: int | None,
        shards: tuple[int, ...] | None,
        dims: tuple[int, ...] | None,
        progress: bool,
    ):
        self._model, self._method = model, method
        self._budget, self._shards, self._dims, self._progress = budget, shards, dims, progress
        self._prepared: dict[object, Prepared] = {}
        self._blocks = Blocks()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Streamed:
        model = memo.get(id(self._model), self._model)
        return _Streamed(model, self._method, self._budget, self._shards, self._dims, self._progress)

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        sources: list[Any] = []

        def note(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                sources.append(value)
                known = value.numel() == 1 and not value.is_floating_point()
                return value.detach().clone() if known else torch.empty_like(value, device="meta")
            sources.append(value)
            return torch.empty(tuple(map(int, value.shape)), dtype=part_of(value, None).dtype, device="meta")

        args, kwargs = _map_inputs(note, (args, kwargs))
        held = dict([*self._model.named_parameters(), *self._model.named_buffers()])
        device = next((t.device for t in held.values()), torch.device("cpu"))
        trained = torch.is_grad_enabled()
        wanted = [n for n, x in enumerate(sources) if isinstance(x, torch.Tensor) and x.requires_grad and trained]
        learned = [name for name, p in self._model.named_parameters() if p.requires_grad and trained]
        call = Call(self._model, self._method, args, kwargs, device, bool(wanted or learned), frozenset(wanted))
        prepared = self._prepare(call)
        home = sources[0].device if sources and isinstance(sources[0], torch.Tensor) else torch.device("cpu")
        run = Run(prepared, held, device, home, sources, out, wanted, learned, self._progress, self._blocks)
        outputs = iter(Streamed.apply(run, *[sources[n] for n in wanted], *[held[name] for name in learned]))
        return mapped(lambda _: next(outputs), prepared.returned.structure, objects=True)

    def _prepare(self, call: Call) -> Prepared:
        key = key_of(call)
        if key not in self._prepared:
            with torch.random.fork_rng(devices=[]):  # to trace a draw moves the generator on
                self._prepared[key] = self._search(call)
        return self._prepared[key]

    def _search(self, call: Call) -> Prepared:
        budget: float = inf
        if self._budget is not None:
            budget = self._budget
        elif call.device.type == "cuda":
            budget = 0.9 * torch.cuda.mem_get_info(call.device)[0]
        if call.device.type == "cuda":
            budget *= 1 - SPARE
        return search(call, self._shards, self._dims, budget)


def _is_array(value: Any) -> bool:
    return not isinstance(value, (torch.Tensor, torch.Size)) and hasattr(value, "shape") and hasattr(value, "__getitem__")


def _map_inputs(change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``change`` of every tensor and array in it."""
    if isinstance(value, torch.Tensor) or _is_array(value):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_inputs(change, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_inputs(change, item) for item in value))
    return type(value)(_map_inputs(change, item) for item in value) if isinstance(value, (list, tuple)) else value
