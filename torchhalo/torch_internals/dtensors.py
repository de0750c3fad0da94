"""DTensors below autograd: their shards, their global shape and strides, and how to make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

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
    return DTensor(bare(shard), spec, requires_grad=False)


def _spec(mesh: DeviceMesh, placements: tuple[Placement, ...], meta: Meta) -> DTensorSpec:
    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(meta.shape), meta.stride, meta.dtype))


class Signature(NamedTuple):
    """All of a DTensor that is not data, but for its mesh."""

    placements: tuple[Placement, ...]
    meta: Meta
    device: str


def signature(tensor: DTensor) -> Signature:
    """What `cached_on_mesh` may depend on."""
    spec = tensor._spec
    assert spec.tensor_meta is not None
    shape, stride, dtype = spec.tensor_meta
    if is_traced(tensor._local_tensor):
        shape, stride = torch.Size(map(int, shape)), tuple(map(int, stride))
    return Signature(spec.placements, Meta(tuple(shape), stride, dtype), tensor._local_tensor.device.type)


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
    if len({id(t._spec.mesh) if isinstance(t, DTensor) else 0 for t in tensors.values() if t is not None}) == 1:
        return tuple(tensors.values())
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
