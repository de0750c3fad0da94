"""What `parallelize` puts around a model: tensors replicated, inputs cut, outputs put together, and all of it undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain, product
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from torchhalo.exchange.debug import agree
from torchhalo.exchange.layout import layout
from torchhalo.exchange.memory import memory_format, strides
from torchhalo.ops.attention_inputs import ModuleInputs
from torchhalo.parallel.arrays import placements_for, shard
from torchhalo.parallel.gradients import Reducer
from torchhalo.parallel.plain import permit, plain_as_replicated
from torchhalo.parallel.structures import mapped, ordinary, tensors_in, without_grids
from torchhalo.torch_internals import collectives, dtensors, process_groups, stand_ins, switch

Inputs = Literal["whole", "shard"]
Outputs = Literal["sharded", "whole"]

#: The methods of models, beside ``forward``, that are called from outside: those of autoencoders.
METHODS = ("encode", "decode")


class Edges:
    """What `parallelize` puts around the forward, and other methods, of a module."""

    def __init__(
        self,
        mesh: DeviceMesh,
        dims: int | Sequence[int] | None = None,
        inputs: Inputs = "whole",
        outputs: Outputs = "sharded",
        methods: Sequence[str] = (),
    ):
        for name, value, known in (("inputs", inputs, ("whole", "shard")), ("outputs", outputs, ("sharded", "whole"))):
            if value not in known:
                raise ValueError(f"parallelize: `{name}` must be one of {known}, got {value!r}")
        self.mesh, self.dims, self.inputs, self.outputs, self.methods = mesh, dims, inputs, outputs, tuple(methods)
        self.reducer, self.wrapped = Reducer(mesh), False
        self._module_inputs = ModuleInputs()
        self._shares = False
        self._agreed: set[tuple[str, ...]] = set()
        self._scopes: list[AbstractContextManager[object] | None] = []

    @property
    def settings(self) -> tuple[object, ...]:
        dims = self.dims if self.dims is None or isinstance(self.dims, int) else tuple(self.dims)
        return self.mesh, dims, self.inputs, self.outputs, self.methods

    def __repr__(self) -> str:
        named = f", methods={self.methods}" if self.methods else ""
        return f"dims={self.dims}, inputs={self.inputs!r}, outputs={self.outputs!r}{named} on {self.mesh}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Edges:
        """For a copy of the model (an average of weights, say): on the same mesh, which cannot be copied."""
        copied = memo[id(self)] = Edges(self.mesh, self.dims, self.inputs, self.outputs, self.methods)
        copied.wrapped, copied._shares = self.wrapped, self._shares
        return copied

    def __reduce__(self) -> Any:
        """In a file: what is to be around the model where it is loaded, on a mesh of the same shape there."""
        return _loaded, (self.mesh, self.dims, self.inputs, self.outputs, self.methods, self.wrapped, self._shares)

    def attach(self, model: nn.Module) -> None:
        """Replicate what nobody else keeps, and put hooks on the model and its modules."""
        missing = [name for name in self.methods if not callable(getattr(type(model), name, None))]
        if missing:
            raise ValueError(f"parallelize: `methods` must name methods of {type(model).__name__}, which has no {missing}")
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
        for name in dict.fromkeys((*METHODS, *self.methods)):
            if callable(getattr(type(model), name, None)):
                model.__dict__[name] = _Method(model, name, model.__dict__.get(name))

    def detach(self, model: nn.Module) -> None:
        del model.__dict__["_torchhalo"]
        for name, method in [(name, each) for name, each in model.__dict__.items() if isinstance(each, _Method)]:
            del model.__dict__[name]
            if method.own is not None:
                model.__dict__[name] = method.own
        for module in model.modules():
            for table in (module._forward_pre_hooks, module._forward_hooks, module._load_state_dict_pre_hooks):
                for key, hook in list(table.items()):
                    if getattr(getattr(hook, "hook", hook), "__self__", None) is self:
                        del table[key]

    def enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Shard the inputs."""
        if not torch.compiler.is_compiling():
            self.reducer.watch(model)  # also what has been copied, assigned or unfrozen since
            self._module_inputs.adopt()
            self._agree(model, tensors_in((args, kwargs)))
        dims = next((tensor.ndim for tensor in tensors_in((args, kwargs))), 0)
        args, kwargs = mapped(lambda tensor: self._sharded(tensor, dims), (args, kwargs))
        return args, kwargs

    def leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Put the outputs together if they are wanted whole, and go to the caller rather than to the model itself."""
        if self._scopes:
            return output
        if self.outputs == "whole":
            return mapped(ordinary, output, objects=True)
        return without_grids(output)

    def call(self, model: nn.Module, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the hooks do around forward, around another method."""
        if self._scopes:
            return method(*args, **kwargs)
        args, kwargs = self.enter(model, args, kwargs)
        args = self.open(model, args) or args
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = self.close(model, args, output)
        return self.leave(model, args, output)

    def open(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Open the scope in which plain tensors count as replicated, unless it is open.

        Returns:
            The arguments, if an attention in the module is to have its samples cut.
        """
        scope = None if self._scopes else plain_as_replicated(gradients="shares" if self._shares else "whole")
        if scope is not None:
            scope.__enter__()
        self._scopes.append(scope)
        return self._module_inputs.enter(module, args)

    def close(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Close what `open` opened, also after an error."""
        output = self._module_inputs.leave(module, output)
        scope = self._scopes.pop() if self._scopes else None
        if scope is not None:
            scope.__exit__(None, None, None)
        return output

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
        tensor = stand_ins.value_of(tensor)
        if isinstance(tensor, DTensor) or tensor.ndim != dims or dims < 3:
            return tensor
        if self.inputs == "whole":
            return shard(tensor, self.mesh, self.dims)
        return _joined(tensor, self.mesh, placements_for(tensor.shape, self.mesh.ndim, self.dims))


class _Method:
    """A method of a parallelized module, in the place of the one of its class.

    It knows the module, so that in a copy of the module it is one of the copy.

    Attributes:
        own: What the module had there, if that was not the method of its class.
    """

    def __init__(self, model: nn.Module, name: str, own: Callable[..., Any] | None):
        self.model, self.name, self.own = model, name, own

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What it stands for, also for who inspects its signature."""
        return self.own or getattr(type(self.model), self.name).__get__(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        edges = edges_of(self.model)
        return self.__wrapped__(*args, **kwargs) if edges is None else edges.call(self.model, self.__wrapped__, args, kwargs)


def _loaded(mesh: DeviceMesh, dims: Any, inputs: Inputs, outputs: Outputs, methods: Any, wrapped: bool, shares: bool) -> Edges:
    switch.enable()
    edges = Edges(mesh, dims, inputs, outputs, methods)
    edges.wrapped, edges._shares = wrapped, shares
    if inputs == "whole":
        permit(mesh)
    return edges


def _description(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def edges_of(model: nn.Module) -> Edges | None:
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


def _replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """``tensor`` with the values of the first rank of the mesh, and in memory as it was."""
    if isinstance(tensor, DTensor):
        return tensor
    found = distribute_tensor(tensor.detach(), mesh, [Replicate()] * mesh.ndim)
    shard, stride = dtensors.local(found), tensor.stride()
    usual = strides(tensor.shape, memory_format(tensor.shape, stride))
    if shard.stride() == stride or any(a != b for n, a, b in zip(tensor.shape, stride, usual, strict=True) if n > 1):
        return found
    # torch makes every shard contiguous: a channels-last model would turn each of its weights around at each step.
    shard = shard.new_empty_strided(tensor.shape, stride).copy_(shard)
    return dtensors.wrap(shard, mesh, found.placements, dtensors.meta(found))


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
