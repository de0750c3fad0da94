"""Many ranks simulated in this process (LocalTensor mode), and what is compared of them or of the processes of `pools`.

With ``TORCHHALO_TEST_DEVICE=cuda`` simulated ranks are on the GPU, and the processes are ranks of NCCL that share it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from memory import Memory
from torch.distributed._local_tensor import (
    LocalTensor,
    LocalTensorMode,
    _LocalDeviceMesh,
    local_tensor_mode,
    maybe_disable_local_tensor_mode,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchhalo
from torchhalo.exchange import parts
from torchhalo.torch_internals import dtensors, simulation
from torchhalo.torch_internals.grid_shard import GridShard, has_grid

CONTIGUOUS = {"memory_format": torch.contiguous_format}
# Compilers that many processes share: no workers for each of them, and no vector code, which takes longest to compile.
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
DEVICE = os.environ.get("TORCHHALO_TEST_DEVICE", "cpu")
if "TORCHHALO_TEST_PARTS" in os.environ:  # 1 to compute in parts wherever that can be, 0 never; else by size
    parts.in_parts(os.environ["TORCHHALO_TEST_PARTS"] == "1").__enter__()


def _default_to_device() -> None:
    """Make tensors on the GPU if nothing else is said; what generators of the CPU draw is drawn there first."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_default_device(DEVICE)
    torch.empty(0, device="cpu")  # torch lists what makes tensors when it is asked first, and is to list its own functions

    def moved(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(draw)
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("generator") is None or "device" in kwargs:
                return draw(*args, **kwargs)
            return draw(*args, **kwargs, device=kwargs["generator"].device).to(DEVICE)

        return wrapper

    for name in ("rand", "randn", "randint", "randperm"):
        setattr(torch, name, moved(getattr(torch, name)))


if DEVICE != "cpu":
    _default_to_device()


@contextlib.contextmanager
def simulated(ranks: int) -> Iterator[None]:
    """All of ``ranks`` in this process, with torchhalo enabled."""
    stock, kept = _LocalDeviceMesh.get_coordinate, {}

    def coordinate(mesh: DeviceMesh) -> Any:
        """Keeps the mesh: before torch 2.15 coordinates are cached by its id, which another may get when it is freed."""
        kept[id(mesh)] = mesh
        return stock(mesh)

    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        with (
            torchhalo.enable(),
            mock.patch.object(_LocalDeviceMesh, "get_coordinate", staticmethod(coordinate)),
            LocalTensorMode(ranks),
        ):
            yield
    finally:
        dist.destroy_process_group()


class Sent(NamedTuple):
    """One collective: its name, such as ``all_to_all_single``, and how many elements each simulated rank got from the others.

    Of a reduction, how many it takes part with.
    """

    name: str
    received: dict[int, int]


class _Wire(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if func.namespace in ("_c10d_functional", "_dtensor") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            given, got = (
                {rank: part.numel() for rank, part in getattr(t, "elem", t)._local_tensors.items()} for t in (args[0], out)
            )
            kept = given if "all_gather" in name or "shard_dim" in name else dict.fromkeys(given, 0)
            self.sent.append(Sent(name, {rank: n - kept[rank] for rank, n in got.items()}))
        return out


@contextlib.contextmanager
def wire() -> Iterator[list[Sent]]:
    """Every collective that simulated ranks run inside, torchhalo's and torch's own, in order.

    Example:
        >>> with simulated(2), wire() as sent:  # doctest: +SKIP
        ...     F.conv2d(x, w, padding=1)
        >>> sent  # doctest: +SKIP
        [Sent(name='all_to_all_single', received={0: 24, 1: 24})]
    """
    with _Wire() as mode:
        yield mode.sent


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """One mesh of gloo ranks per shape: DTensor's caches mix up two equal ones, and torch.compile fails then, with or without
    torchhalo.
    """
    return init_device_mesh(DEVICE, shape)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full value of a DTensor, which must be the same on every rank, as a plain tensor.

    To the bit, except on CUDA, whose kernels need not give the same bits twice.
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else None
    if isinstance(local, LocalTensor) and _by_hand(tensor.device_mesh, tensor.placements):
        return _joined(tensor)
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    values = full._local_tensors.values() if isinstance(full, LocalTensor) else (full,)
    return _same([value.detach() for value in values])


def _same(values: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *others = values
    tolerance = 0.0 if first.device.type == "cpu" else 1e-10 if first.dtype == torch.float64 else 1e-2
    for other in others:
        torch.testing.assert_close(other, first, rtol=tolerance, atol=tolerance, equal_nan=True)
    return first


# `distribute_tensor` and `full_tensor` take longer in LocalTensor mode than what is tested. So on a mesh of all ranks shards
# are cut, and put together, by hand.


def _by_hand(mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    mode = local_tensor_mode()
    return mode is not None and mesh.size() == len(mode.ranks) and {type(p) for p in placements} <= {Shard, Replicate}


def _ranks(mesh: DeviceMesh) -> dict[tuple[int, ...], int]:
    """The rank at each place of ``mesh``, with which that is kept: to ask takes milliseconds, and an equal one may differ."""
    if "_test_ranks" not in mesh.__dict__:
        with maybe_disable_local_tensor_mode(), torch.inference_mode(False):
            ranks = mesh.mesh.flatten().tolist()
        mesh.__dict__["_test_ranks"] = dict(zip(itertools.product(*map(range, mesh.shape)), ranks, strict=True))
    return mesh.__dict__["_test_ranks"]


def _parts(tensor: torch.Tensor, placement: Placement, ranks: int) -> list[torch.Tensor]:
    """What each of the ranks along one axis gets."""
    if not isinstance(placement, Shard):
        return [tensor] * ranks
    parts = tensor.chunk(ranks, placement.dim)
    return [*parts, *[tensor.narrow(placement.dim, 0, 0)] * (ranks - len(parts))]


def _cut(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    with maybe_disable_local_tensor_mode():
        places = {(): tensor.detach()}
        for axis, placement in enumerate(placements):
            places = {
                (*place, i): part
                for place, whole in places.items()
                for i, part in enumerate(_parts(whole, placement, mesh.size(axis)))
            }
        # contiguous, as those of `distribute_tensor` are
        shards = {rank: places[at].clone(memory_format=torch.contiguous_format) for at, rank in _ranks(mesh).items()}
    return dtensors.wrap(LocalTensor(shards), mesh, placements, dtensors.Meta(tensor.shape, tensor.stride(), tensor.dtype))


def _joined(tensor: DTensor) -> torch.Tensor:
    mesh, placements, ranks = tensor.device_mesh, tensor.placements, _ranks(tensor.device_mesh)
    shards = {at: tensor._local_tensor._local_tensors[rank].detach() for at, rank in ranks.items()}

    def along(axis: int, place: tuple[int, ...], meta: torch.Tensor) -> torch.Tensor:
        if axis == mesh.ndim:
            assert shards[place].shape == meta.shape, f"{place} has {shards[place].shape} of {tensor.shape} {placements}"
            return shards[place]
        expected = _parts(meta, placements[axis], mesh.size(axis))
        parts = [along(axis + 1, (*place, i), part) for i, part in enumerate(expected)]
        return torch.cat(parts, placements[axis].dim) if isinstance(placements[axis], Shard) else _same(parts)

    with maybe_disable_local_tensor_mode():
        return along(0, (), torch.empty(tensor.shape, device="meta"))


def shard(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], memory: Memory | None = None) -> DTensor:
    """``distribute_tensor``, also for Partial placements: each summand is then an equal part of the value.

    Args:
        memory: How the shards lie in memory; the tensor is one that lies so.
    """
    sharded = _sharded(tensor, mesh, placements)
    if memory is None:
        return sharded
    local = simulation.per_rank(memory, sharded.to_local())
    return dtensors.wrap(local, mesh, placements, dtensors.meta(tensor))


def _sharded(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    mode = local_tensor_mode()
    if has_grid(placements):
        return _sharded(tensor, mesh, [Replicate() if isinstance(p, GridShard) else p for p in placements]).redistribute(
            placements=placements
        )
    kept = [Replicate() if isinstance(p, Partial) else p for p in placements]
    if not isinstance(tensor, LocalTensor) and _by_hand(mesh, kept):
        sharded = _cut(tensor, mesh, kept)
    else:
        if mode is not None and not isinstance(tensor, LocalTensor):
            tensor = LocalTensor({rank: tensor.clone() for rank in mode.ranks})
        sharded = distribute_tensor(tensor, mesh, kept)
    if kept == list(placements):
        return sharded
    summands = math.prod(mesh.size(axis) for axis, p in enumerate(placements) if isinstance(p, Partial))
    part = sharded.to_local() / summands
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def assert_parity(
    function: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    mesh: DeviceMesh,
    placements: Sequence[Sequence[Placement] | None],
    atol: float = 1e-10,
    needs_grad: Sequence[bool] | None = None,
    memory: Sequence[Memory] | None = None,
    long_strides: bool = False,
) -> DTensor:
    """The sharded ``function`` gives one process's result and gradients, with its shape, strides and dtype.

    Args:
        tensors: Plain arguments, None where there is none.
        placements: One per tensor.
        needs_grad: Which of the tensors get a gradient; all, if not given.
        memory: How the tensors, and then the gradient of the result, lie in memory. One process gets the same values, but
            contiguous: of strange strides it makes wrong gradients itself. Then strides are not compared.
        long_strides: Compare strides along dims longer than one only: where fake tensors, which tell them, and torch differ.

    Returns:
        The sharded result.
    """
    needs_grad = needs_grad or [True] * len(tensors)
    *given, grad_memory = memory or [None] * (len(tensors) + 1)
    with maybe_disable_local_tensor_mode():
        tensors = [t if t is None or m is None else m(t) for t, m in zip(tensors, given, strict=True)]
        plain = [
            None if t is None else t.clone(**({} if memory is None else CONTIGUOUS)).requires_grad_(g)
            for t, g in zip(tensors, needs_grad, strict=True)
        ]
        expected = function(*plain)
        wide = torch.complex128 if expected.is_complex() else torch.float64
        grad = torch.randn(expected.shape, dtype=wide, generator=torch.Generator().manual_seed(1)).to(expected)
        grad = grad if grad_memory is None else grad_memory(grad)
        if any(needs_grad):
            expected.backward(grad if grad_memory is None else grad.clone(**CONTIGUOUS))

    sharded = [
        None if t is None else shard(t, mesh, p, m).detach().requires_grad_(g)
        for t, p, g, m in zip(tensors, placements, needs_grad, given, strict=True)
    ]
    result = function(*sharded)
    assert isinstance(result, DTensor)
    assert result.shape == expected.shape and result.dtype == expected.dtype
    compared = [dim for dim, size in enumerate(expected.shape) if not memory and (size > 1 or not long_strides)]
    assert all(result.stride(dim) == expected.stride(dim) for dim in compared), (result.stride(), expected.stride())
    torch.testing.assert_close(whole(result), expected.detach(), rtol=0, atol=atol)
    if any(needs_grad):
        kept = [Replicate() if isinstance(p, Partial) else p for p in result.placements]
        result.backward(shard(grad, mesh, kept, grad_memory))
    for got, want in zip(sharded, plain, strict=True):
        if got is not None and want.requires_grad:
            assert got.grad is not None and got.grad.shape == want.shape
            torch.testing.assert_close(whole(got.grad), want.grad, rtol=0, atol=atol)
        elif got is not None:
            assert got.grad is None
    return result
