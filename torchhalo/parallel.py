"""A model made ready for sharded inputs: parameters replicated, inputs cut, nothing of the model itself changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, product
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from torchhalo import dispatch
from torchhalo.arrays import placements_for, shard
from torchhalo.layout import layout
from torchhalo.plain import plain_as_replicated

Inputs = Literal["whole", "shard"]
Outputs = Literal["sharded", "whole"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    dims: int | Sequence[int] | None = None,
    inputs: Inputs = "whole",
    outputs: Outputs = "sharded",
) -> nn.Module:
    """Make ``model`` run on inputs that are sharded in space over ``mesh``.

    Parameters and buffers become DTensors, replicated over the mesh with the values of its first rank; make the optimizer
    afterwards. The keys of ``state_dict`` stay, and checkpoints of the plain model load as before; `plain_state_dict` gives one
    to save. A plain tensor given to the model is sharded if it has three or more dims and as many as the first tensor that the
    model is given; a DTensor is taken as it is. Plain tensors that the model makes for itself count as replicated. The call
    enables torchhalo. A model that is parallelized already, with the same settings, is returned as it is.

    Args:
        model: Changed in place.
        mesh: The ranks that share a sample. Of a larger mesh, the sub-mesh: ``mesh["space"]``.
        dims: Along which dim each axis of the mesh cuts the inputs. If not given: the first spatial dim (2), or, on a mesh of
            several axes, as many of the largest.
        inputs: Whether plain inputs are whole, the same on every rank, or only this rank's shard, cut as `torch.chunk` cuts.
        outputs: Whether outputs stay sharded, or come back as whole plain tensors.

    Returns:
        The model.

    Example:
        >>> model = torchhalo.parallelize(model, init_device_mesh("cuda", (4,)))  # doctest: +SKIP
        >>> loss = F.cross_entropy(model(image), torchhalo.shard(labels, mesh, dims=1))  # doctest: +SKIP
    """
    dispatch.enable()
    edges = _Edges(mesh, dims, inputs, outputs)
    present = _edges_of(model)
    if present is not None:
        if present.settings != edges.settings:
            raise ValueError(
                f"parallelize: the model is parallelized already, with {present}; asked for {edges}. "
                "Call torchhalo.unparallelize(model) first"
            )
        return model
    _replace_tensors(model, lambda tensor: tensor if isinstance(tensor, DTensor) else _replicated(tensor, mesh))
    edges.attach(model)
    return model


def unparallelize(model: nn.Module) -> nn.Module:
    """Undo `parallelize`: parameters and buffers are plain tensors again, with their present values.

    Example:
        >>> torchhalo.unparallelize(model)  # doctest: +SKIP
    """
    edges = _edges_of(model)
    if edges is not None:
        edges.detach(model)
        _replace_tensors(model, whole)
    return model


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """The ``state_dict`` of the plain model: the same keys, with plain tensors, the same on every rank.

    Example:
        >>> torch.save(torchhalo.plain_state_dict(model), "checkpoint.pt")  # doctest: +SKIP
    """
    return {key: whole(value) if isinstance(value, torch.Tensor) else value for key, value in model.state_dict().items()}


class SpatialParallel(ParallelStyle):
    """`parallelize` as a style for torch's ``parallelize_module``, of a model or of some of its modules.

    Args:
        dims, inputs, outputs: As for `parallelize`.

    Example:
        >>> parallelize_module(model, mesh, {"encoder": SpatialParallel(dims=3)})  # doctest: +SKIP
    """

    def __init__(
        self, *, dims: int | Sequence[int] | None = None, inputs: Inputs = "whole", outputs: Outputs = "sharded"
    ) -> None:
        super().__init__()
        self.dims, self.inputs, self.outputs = dims, inputs, outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return parallelize(module, device_mesh, dims=self.dims, inputs=self.inputs, outputs=self.outputs)


class _Edges:
    """What `parallelize` puts around the forward of a module."""

    def __init__(self, mesh: DeviceMesh, dims: int | Sequence[int] | None, inputs: Inputs, outputs: Outputs):
        for name, value, known in (("inputs", inputs, ("whole", "shard")), ("outputs", outputs, ("sharded", "whole"))):
            if value not in known:
                raise ValueError(f"parallelize: `{name}` must be one of {known}, got {value!r}")
        self.mesh, self.dims, self.inputs, self.outputs = mesh, dims, inputs, outputs
        self._scopes: list[AbstractContextManager[object]] = []
        self._handles: list[Any] = []

    @property
    def settings(self) -> tuple[object, ...]:
        dims = self.dims if self.dims is None or isinstance(self.dims, int) else tuple(self.dims)
        return self.mesh, dims, self.inputs, self.outputs

    def __repr__(self) -> str:
        return f"dims={self.dims}, inputs={self.inputs!r}, outputs={self.outputs!r} on {self.mesh}"

    def __deepcopy__(self, memo: dict[int, Any]) -> _Edges:
        """For a copy of the model (an average of weights, say): on the same mesh, which cannot be copied."""
        copied = memo[id(self)] = _Edges(self.mesh, self.dims, self.inputs, self.outputs)
        return copied

    def attach(self, module: nn.Module) -> None:
        module.__dict__["_torchhalo"] = self
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave, always_call=True)
        module.register_load_state_dict_pre_hook(self.load)

    def detach(self, module: nn.Module) -> None:
        del module.__dict__["_torchhalo"]
        for table in (module._forward_pre_hooks, module._forward_hooks, module._load_state_dict_pre_hooks):
            for key, hook in list(table.items()):
                if getattr(getattr(hook, "hook", hook), "__self__", None) is self:
                    del table[key]

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Shard the inputs, and open the scope in which plain tensors count as replicated."""
        dims = next((tensor.ndim for tensor in tensors_in((args, kwargs))), 0)
        args, kwargs = _mapped(lambda tensor: self._sharded(tensor, dims), (args, kwargs))
        scope = plain_as_replicated()
        scope.__enter__()
        self._scopes.append(scope)
        return args, kwargs

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Close the scope, also after an error, and put the outputs together if they are wanted whole."""
        if self._scopes:
            self._scopes.pop().__exit__(None, None, None)
        return _mapped(whole, output) if self.outputs == "whole" else output

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        """Let a checkpoint of plain tensors into the replicated parameters and buffers."""
        tensors = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        for name, tensor in chain(*tensors):
            given = state.get(prefix + name)
            if isinstance(tensor, DTensor) and isinstance(given, torch.Tensor) and not isinstance(given, DTensor):
                given = given.to(tensor.device_mesh.device_type)
                state[prefix + name] = distribute_tensor(given, tensor.device_mesh, tensor.placements)

    def _sharded(self, tensor: torch.Tensor, dims: int) -> torch.Tensor:
        if isinstance(tensor, DTensor) or tensor.ndim != dims or dims < 3:
            return tensor
        if self.inputs == "whole":
            return shard(tensor, self.mesh, self.dims)
        return _joined(tensor, self.mesh, placements_for(tensor.shape, self.mesh.ndim, self.dims))


def _edges_of(model: nn.Module) -> _Edges | None:
    return model.__dict__.get("_torchhalo")


def _replace_tensors(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put what ``change`` makes of each parameter and buffer in its place; those that are shared stay shared."""
    changed: dict[int, torch.Tensor] = {}
    for table, name, tensor in list(_slots(model)):
        if id(tensor) not in changed:
            with torch.no_grad():
                value = change(tensor)
            if isinstance(tensor, nn.Parameter) and value is not tensor:
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            changed[id(tensor)] = value
        table[name] = changed[id(tensor)]


def _slots(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    yield table, name, tensor


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` of every tensor in it: of nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is dict:
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = _mapped(function, item)
        return result
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(function, item) for item in value))
    return type(value)(_mapped(function, item) for item in value) if isinstance(value, (tuple, list)) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in their order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _mapped(note, value)
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor with all of a DTensor; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(tensor.detach(), mesh, [Replicate()] * mesh.ndim)


def _joined(part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The sharded tensor of which each rank gives its part.

    Raises:
        ValueError: The parts are not those that `torch.chunk` makes; on every rank alike.
    """
    given = dispatch.all_gather(torch.tensor(part.shape, device=mesh.device_type), mesh, range(mesh.ndim)).tolist()
    parts = dict(zip(product(*map(range, mesh.shape)), given, strict=True))
    cuts = layout(part.shape, mesh, placements).cuts
    shape = [
        sum(
            found[dim]
            for place, found in parts.items()
            if not any(place[axis] for axis in range(mesh.ndim) if axis not in axes)
        )
        for dim, axes in enumerate(cuts)
    ]
    boxes = layout(shape, mesh, placements)
    for place, found in parts.items():
        expected = boxes.owned(place).shape
        if expected != tuple(found):
            raise ValueError(
                f"parallelize: the parts of an input of shape {tuple(shape)} must be those of torch.chunk; the rank at {place} "
                f"of the mesh must give {expected}, it gave {tuple(found)}"
            )
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
