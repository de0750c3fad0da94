"""A model made ready for sharded inputs: parameters replicated, inputs cut, nothing of the model itself changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, product
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parallel import DistributedDataParallel

from torchhalo.exchange.debug import agree
from torchhalo.exchange.layout import layout
from torchhalo.parallel.arrays import placements_for, shard
from torchhalo.parallel.gradients import Reducer
from torchhalo.parallel.plain import permit, plain_as_replicated
from torchhalo.torch_internals import collectives, process_groups, switch

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
    afterwards. Their gradients are summed over the mesh once per backward, many in one collective, while it goes on: when
    ``backward()`` returns they are replicated too; `no_sync` puts that off. Parameters that ``fully_shard`` or
    `DistributedDataParallel` keeps, if called before, are left to it.

    The keys of ``state_dict`` stay, and checkpoints of the plain model load as before; `plain_state_dict` gives one to save. A
    plain tensor given to the model is sharded if it has three or more dims and as many as the first tensor that the model is
    given; a DTensor is taken as it is. Plain tensors that the model makes for itself count as replicated. The call enables
    torchhalo. A model that is parallelized already, with the same settings, is returned as it is.

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
    switch.enable()
    edges = _Edges(mesh, dims, inputs, outputs)
    present = _edges_of(model)
    if present is not None:
        if present.settings != edges.settings:
            raise ValueError(
                f"parallelize: the model is parallelized already, with {present}; asked for {edges}. "
                "Call torchhalo.unparallelize(model) first"
            )
        return model
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
        replace_tensors(model, whole)
    return model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, gradients of a parallelized model gather on each rank; the next backward outside sums them over the mesh.

    For gradient accumulation: one reduction for several backwards. Until that backward, ``grad`` holds partial sums. Where DDP
    or FSDP keeps the parameters, use its own way.

    Example:
        >>> with torchhalo.no_sync(model):  # doctest: +SKIP
        ...     loss(model(first)).backward()
        >>> loss(model(second)).backward()  # doctest: +SKIP
    """
    found = [edges for module in model.modules() if (edges := _edges_of(module)) is not None]
    if not found or any(edges.wrapped for edges in found):
        reason = "DDP or FSDP keeps its parameters: use its own way" if found else "call torchhalo.parallelize first"
        raise ValueError(f"no_sync: torchhalo does not reduce the gradients of this model; {reason}")
    before = [edges.reducer.on for edges in found]
    for edges in found:
        edges.reducer.on = False
    try:
        yield
    finally:
        for edges, on in zip(found, before, strict=True):
            edges.reducer.on = on


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
        self.reducer, self.wrapped = Reducer(mesh), False
        self._shares = False
        self._agreed: set[tuple[str, ...]] = set()
        self._scopes: list[AbstractContextManager[object] | None] = []

    @property
    def settings(self) -> tuple[object, ...]:
        dims = self.dims if self.dims is None or isinstance(self.dims, int) else tuple(self.dims)
        return self.mesh, dims, self.inputs, self.outputs

    def __repr__(self) -> str:
        return f"dims={self.dims}, inputs={self.inputs!r}, outputs={self.outputs!r} on {self.mesh}"

    def __deepcopy__(self, memo: dict[int, Any]) -> _Edges:
        """For a copy of the model (an average of weights, say): on the same mesh, which cannot be copied."""
        copied = memo[id(self)] = _Edges(self.mesh, self.dims, self.inputs, self.outputs)
        copied.wrapped, copied._shares = self.wrapped, self._shares
        return copied

    def attach(self, model: nn.Module) -> None:
        """Replicate what nobody else keeps, and put hooks on the model and its modules."""
        tensors = chain(model.named_parameters(), model.named_buffers())
        agree(f"the parameters of {type(model).__name__}", {name: _description(tensor) for name, tensor in tensors}, self.mesh)
        kept = _kept(model)
        self.wrapped, self._shares = bool(kept), _averages(model, kept, self.mesh)
        replace_tensors(model, lambda tensor: (_same if id(tensor) in kept else _replicated)(tensor, self.mesh))
        self.reducer.watch(model)
        model.__dict__["_torchhalo"] = self
        if self.inputs == "whole":  # else the plain tensors around may be shards as well
            permit(self.mesh)
        model.register_forward_pre_hook(self.enter, with_kwargs=True)
        model.register_load_state_dict_pre_hook(self.load)
        for module in model.modules():
            # Each for itself as well: activation checkpointing calls them again while backward runs, outside of the model.
            module.register_forward_pre_hook(self.open)
            module.register_forward_hook(self.close, always_call=True)
        model.register_forward_hook(self.leave)

    def detach(self, model: nn.Module) -> None:
        del model.__dict__["_torchhalo"]
        for module in model.modules():
            for table in (module._forward_pre_hooks, module._forward_hooks, module._load_state_dict_pre_hooks):
                for key, hook in list(table.items()):
                    if getattr(getattr(hook, "hook", hook), "__self__", None) is self:
                        del table[key]

    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Shard the inputs."""
        if not torch.compiler.is_compiling():
            self.reducer.watch(model)  # also what has been copied, assigned or unfrozen since
            self._agree(model, tensors_in((args, kwargs)))
        dims = next((tensor.ndim for tensor in tensors_in((args, kwargs))), 0)
        args, kwargs = _mapped(lambda tensor: self._sharded(tensor, dims), (args, kwargs))
        return args, kwargs

    def leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Put the outputs together if they are wanted whole."""
        return _mapped(whole, output) if self.outputs == "whole" else output

    def open(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Open the scope in which plain tensors count as replicated, unless it is open."""
        scope = None if self._scopes else plain_as_replicated(gradients="shares" if self._shares else "whole")
        if scope is not None:
            scope.__enter__()
        self._scopes.append(scope)

    def close(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Close what `open` opened, also after an error."""
        scope = self._scopes.pop() if self._scopes else None
        if scope is not None:
            scope.__exit__(None, None, None)

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        """Let a checkpoint of plain tensors into the replicated parameters and buffers."""
        tensors = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
        for name, tensor in chain(*tensors):
            given = state.get(prefix + name)
            if isinstance(tensor, DTensor) and isinstance(given, torch.Tensor) and not isinstance(given, DTensor):
                given = given.to(tensor.device_mesh.device_type)
                state[prefix + name] = distribute_tensor(given, tensor.device_mesh, tensor.placements)

    def _agree(self, model: nn.Module, inputs: list[torch.Tensor]) -> None:
        """Have the ranks compare inputs of new shapes or dtypes, which are new on all of them at once, or they differ."""
        if self.inputs == "shard":
            return  # whose shapes `_joined` compares
        descriptions = tuple(map(_description, inputs))
        if descriptions not in self._agreed:
            facts = {f"input {number}": text for number, text in enumerate(descriptions)}
            agree(f"the inputs of {type(model).__name__}", facts, self.mesh)
            if len(self._agreed) >= 1024:
                self._agreed.clear()
            self._agreed.add(descriptions)

    def _sharded(self, tensor: torch.Tensor, dims: int) -> torch.Tensor:
        if isinstance(tensor, DTensor) or tensor.ndim != dims or dims < 3:
            return tensor
        if self.inputs == "whole":
            return shard(tensor, self.mesh, self.dims)
        return _joined(tensor, self.mesh, placements_for(tensor.shape, self.mesh.ndim, self.dims))


def _description(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _edges_of(model: nn.Module) -> _Edges | None:
    return model.__dict__.get("_torchhalo")


def replace_tensors(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
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
    """``tensor`` with the values of the first rank of the mesh."""
    return tensor if isinstance(tensor, DTensor) else distribute_tensor(tensor.detach(), mesh, [Replicate()] * mesh.ndim)


def _kept(model: nn.Module) -> dict[int, list[int]]:
    """The tensors that DDP or FSDP keeps, by identity, and the ranks over which it takes the mean of their gradients."""
    kept: dict[int, list[int]] = {}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            kept |= {id(tensor): ranks for tensor in chain(module.parameters(), module.buffers())}
        elif isinstance(module, FSDPModule):
            meshes = {id(tensor): tensor.device_mesh for tensor in module.parameters() if isinstance(tensor, DTensor)}
            kept |= {key: list(process_groups.submesh_members(mesh, range(mesh.ndim))) for key, mesh in meshes.items()}
    return kept


def _same(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A tensor that DDP or FSDP keeps; a plain one gets the values of the first rank of the mesh."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(_replicated(tensor, mesh).to_local())
    return tensor


def _averages(model: nn.Module, kept: dict[int, list[int]], mesh: DeviceMesh) -> bool:
    """Whether the mean that DDP or FSDP takes goes over the ranks of ``mesh`` too.

    Raises:
        ValueError: For some parameters, or for some ranks.
    """
    if not kept:
        return False
    space = set(process_groups.submesh_members(mesh, range(mesh.ndim)))
    shared = {len(space & set(ranks)) for ranks in kept.values()}
    if shared - {1, len(space)} or len(shared) > 1:
        raise ValueError(
            "parallelize: the mean that DDP or FSDP takes of the gradients must go over all ranks of the mesh of `parallelize` "
            f"or over none, for all parameters alike; over {sorted(space)} it goes over {sorted(shared)} of them"
        )
    return len(space) > 1 and shared == {len(space)}


def _joined(part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The sharded tensor of which each rank gives its part.

    Raises:
        ValueError: The parts are not those that `torch.chunk` makes; on every rank alike.
    """
    given = collectives.all_gather(torch.tensor(part.shape, device=mesh.device_type), mesh, range(mesh.ndim)).tolist()
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
