"""DTensors below autograd: their shards, their global shape and strides, and how to make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from torchhalo.torch_internals import caching
from torchhalo.torch_internals.caching import cached_on_mesh
from torchhalo.torch_internals.calls import Op
from torchhalo.torch_internals.handlers import named
from torchhalo.torch_internals.process_groups import coordinate
from torchhalo.torch_internals.tracing import is_traced


class Meta(NamedTuple):
    """Global shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def meta(tensor: torch.Tensor) -> Meta:
    """The `Meta` of ``tensor``; of a DTensor, of the whole tensor."""
    return Meta(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def local(tensor: DTensor) -> torch.Tensor:
    """This rank's shard, without a step in the autograd graph."""
    return tensor._local_tensor


def wrap(shard: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], meta: Meta) -> DTensor:
    """The DTensor with global ``meta`` of which this rank holds ``shard``."""
    key = _spec, tuple(placements), meta
    spec = _spec(mesh, *key[1:]) if is_traced(shard) else cached_on_mesh(mesh, *key)
    return _new(bare(shard), spec)


def _new(shard: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor, without the ``__init__`` that does nothing but keep Dynamo out, which takes longer than the rest."""
    return DTensor.__new__(DTensor, shard, spec, requires_grad=False)


def detached(tensor: DTensor) -> DTensor:
    """``tensor.detach()``, below autograd."""
    return _new(tensor._local_tensor.detach(), tensor._spec)


class Result:
    """A result whose placements and `Meta` are known beforehand: `wrap` with nothing to look up."""

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement], meta: Meta) -> None:
        self.mesh, self.placements, self.meta = mesh, tuple(placements), meta
        self._spec = cached_on_mesh(mesh, _spec, self.placements, meta)

    def wrap(self, shard: torch.Tensor) -> DTensor:
        """The DTensor of which this rank holds ``shard``."""
        if is_traced(shard):
            return wrap(shard, self.mesh, self.placements, self.meta)
        return _new(bare(shard), self._spec)


def _spec(mesh: DeviceMesh, placements: tuple[Placement, ...], meta: Meta) -> DTensorSpec:
    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(meta.shape), meta.stride, meta.dtype))


@dataclass(frozen=True)
class Signature:
    """All of a DTensor that is not data, but for its mesh."""

    placements: tuple[Placement, ...]
    meta: Meta
    device: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.placements, self.meta, self.device)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]


#: By the identity of a spec, of which most tensors of a kind share one.
_signatures: dict[tuple[int, str], tuple[ref[DTensorSpec], object, Signature]] = {}


def device_type(tensor: DTensor) -> str:
    """Where a tensor is. What stock DTensor gives a rank outside of the mesh for its part is on the CPU."""
    device, mesh = tensor._local_tensor.device.type, tensor._spec.mesh
    return mesh.device_type if device == "cpu" != mesh.device_type and mesh.get_coordinate() is None else device


def signature(tensor: DTensor) -> Signature:
    """What `cached_on_mesh` may depend on."""
    spec, shard = tensor._spec, tensor._local_tensor
    device = device_type(tensor)
    if is_traced(shard):
        return _signature(spec, device)
    known = _signatures.get((id(spec), device))
    if known is not None and known[0]() is spec and known[1] is spec.tensor_meta:
        return known[2]
    if len(_signatures) >= caching.CACHE_SIZE:
        _signatures.clear()
    found = _signature(spec, device)
    _signatures[id(spec), device] = ref(spec), spec.tensor_meta, found
    return found


def _signature(spec: DTensorSpec, device: str) -> Signature:
    assert spec.tensor_meta is not None
    shape, stride, dtype = spec.tensor_meta
    return Signature(spec.placements, Meta(tuple(map(int, shape)), tuple(map(int, stride)), dtype), device)


def bare(shard: torch.Tensor) -> torch.Tensor:
    """Without the mark that `DTensor.from_local` leaves on the shard of a tensor that requires a gradient."""
    return shard.detach() if shard.requires_grad else shard


def non_member_result(
    like: DTensor, results: Sequence[Meta], placements: Sequence[Sequence[Placement]]
) -> tuple[DTensor, ...] | None:
    """What a rank outside the mesh of ``like`` returns, results with no elements here; None on a rank inside."""
    mesh = like.device_mesh
    if coordinate(mesh) is not None:
        return None
    pairs = zip(results, placements, strict=True)
    return tuple(wrap(like._local_tensor.new_empty(0, dtype=r.dtype), mesh, p, r) for r, p in pairs)


def as_dtensors(name: str, **tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """The tensor arguments of the op ``name``, all DTensors on one mesh, or an error that says how to get there."""
    mesh: DeviceMesh | None = None
    for tensor in tensors.values():
        if tensor is None:
            continue
        if not isinstance(tensor, DTensor) or (mesh is not None and tensor._spec.mesh is not mesh):
            return _on_one_mesh(name, tensors)
        mesh = tensor._spec.mesh
    return tuple(tensors.values())


def _on_one_mesh(name: str, tensors: dict[str, torch.Tensor | None]) -> tuple[Any, ...]:
    meshes = {key: t.device_mesh for key, t in tensors.items() if isinstance(t, DTensor)}
    first, mesh = next(iter(meshes.items()))
    for key, other in meshes.items():
        if other != mesh:
            raise RuntimeError(f"{name}: all tensors must be on one device mesh, `{first}` is on {mesh} and `{key}` on {other}")
    return tuple(
        tensor if tensor is None or isinstance(tensor, DTensor) else _replicated(name, key, tensor, first, mesh)
        for key, tensor in tensors.items()
    )


def named_dtensors(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of ``op`` by name, defaults filled in; those that are tensors as DTensors."""
    given = named(op, args, kwargs)
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    return given | dict(zip(tensors, as_dtensors(op.overloadpacket.__name__, **tensors), strict=True))


def mesh_of(*tensors: torch.Tensor | None) -> DeviceMesh:
    """The mesh of the first DTensor among ``tensors``."""
    return next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))


def replicate_implicitly(on: bool) -> bool:
    """Let DTensor take plain tensors as replicated, or not; what it did before."""
    dispatcher = DTensor._op_dispatcher
    before = bool(dispatcher._allow_implicit_replication)
    dispatcher._allow_implicit_replication = on
    return before


def _replicated(name: str, key: str, tensor: torch.Tensor, other: str, mesh: DeviceMesh) -> DTensor:
    if not DTensor._op_dispatcher._allow_implicit_replication:
        raise RuntimeError(
            f"{name}: got mixed torch.Tensor and DTensor: `{other}` is a DTensor, `{key}` (shape={tuple(tensor.shape)}) "
            "is a plain tensor. Put the module on the mesh with torch.distributed.tensor.distribute_module(module, mesh), or "
            "the tensor with distribute_tensor(tensor, mesh)"
        )
    return replicated(tensor, mesh)


def replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """A plain tensor, the same on every rank, as a DTensor; one that is a DTensor already as it is."""
    if isinstance(tensor, DTensor):
        return tensor
    return wrap(tensor, mesh, (Replicate(),) * mesh.ndim, meta(tensor))
