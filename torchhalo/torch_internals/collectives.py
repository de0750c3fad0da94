"""Collectives that autograd does not see; watchers are told of each before it starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed._local_tensor import local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh

from torchhalo.torch_internals.calls import running_call
from torchhalo.torch_internals.process_groups import submesh_group
from torchhalo.torch_internals.tracing import is_traced
from torchhalo.torch_internals.watching import Collective, watchers


def all_to_all(
    tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup, about: object = None
) -> torch.Tensor:
    """Send ``sent[i]`` elements of the flat ``tensor`` to member ``i`` of ``group``, and get ``received[i]`` from it.

    Args:
        about: What watchers are told besides.

    Returns:
        A buffer for `wait`; what comes between overlaps with the communication.
    """
    for watcher in watchers:
        watcher.collective(Collective("all_to_all", tensor, group, sent, received, about))
    if tensor.is_complex():  # gloo knows no complex numbers
        received, sent = ([2 * size for size in sizes] for sizes in (received, sent))
        pairs = _all_to_all(torch.view_as_real(tensor).flatten(), received, sent, group)
        return torch.view_as_complex(pairs.unflatten(0, (-1, 2)))
    return _all_to_all(tensor, received, sent, group)


def _all_to_all(tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    if is_traced(tensor) or local_tensor_mode():
        return funcol.all_to_all_single(tensor, list(received), list(sent), group)
    # funcol resolves the group anew and wraps the result in a tensor that waits for itself: more time than all the rest here.
    return torch.ops._c10d_functional.all_to_all_single(tensor, received, sent, group.group_name)


def all_reduce(
    tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], reduction: str = "sum", in_place: bool = False
) -> torch.Tensor:
    """``tensor`` reduced over the ranks along ``axes`` by one collective, whatever their number; as it is if there are none.

    Args:
        in_place: Whether the result may take the place of ``tensor``, which saves a copy: if the caller has just made that.
    """
    return wait(start_all_reduce(tensor, mesh, axes, reduction, in_place))


def start_all_reduce(
    tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int], reduction: str = "sum", in_place: bool = False
) -> torch.Tensor:
    """As `all_reduce`, but the result is for `wait`; what comes between overlaps with the communication."""
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not axes:
        return tensor
    group = submesh_group(mesh, axes)[0]
    for watcher in watchers:
        watcher.collective(Collective("all_reduce", tensor, group))
    if is_traced(tensor) or local_tensor_mode():
        return funcol.all_reduce(tensor, reduction, group)
    ops = torch.ops._c10d_functional
    return (ops.all_reduce_ if in_place and tensor.is_contiguous() else ops.all_reduce)(tensor, reduction, group.group_name)


def all_gather(tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """What the ranks along ``axes`` hold, stacked along a new first dim in row-major order of ``axes``, by one collective.

    For small tensors of one shape, such as statistics; not for activations.
    """
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not axes:
        return tensor.unsqueeze(0)
    group, places = submesh_group(mesh, axes)
    for watcher in watchers:
        watcher.collective(Collective("all_gather", tensor, group))
    rows = tensor.contiguous().unsqueeze(0)
    if is_traced(tensor) or local_tensor_mode():
        # torch 2.13 renamed it
        gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
        found = wait(gather(rows, 0, group))
    else:
        found = wait(torch.ops._c10d_functional.all_gather_into_tensor(rows, len(places), group.group_name))
    return found if places == tuple(range(len(places))) else torch.stack([found[place] for place in places])


def reduce_scatter(tensor: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """The adjoint of `all_gather`: the ``i``-th rank along ``axes`` gets the sum over ranks of row ``i`` of ``tensor``."""
    axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
    if not axes:
        return tensor.squeeze(0)
    group, places = submesh_group(mesh, axes)
    if places != tuple(range(len(places))):
        tensor = torch.stack([tensor[places.index(place)] for place in range(len(places))])
    for watcher in watchers:
        watcher.collective(Collective("reduce_scatter", tensor, group))
    # torch 2.13 renamed it
    reduce = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    return wait(reduce(tensor.contiguous(), "sum", 0, group)).squeeze(0)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """What `all_to_all` received. Call it even if nothing was: torch keeps the state of a collective until it is waited for."""
    try:
        if isinstance(tensor, funcol.AsyncCollectiveTensor):
            return tensor.wait()
        return tensor if is_traced(tensor) else torch.ops._c10d_functional.wait_tensor(tensor)
    except RuntimeError as error:
        call = running_call()
        raise type(error)(
            f"{'a collective' if call is None else call.name}: no data from another rank; it may have died, be "
            "late, or be running another op or shape. Run all ranks with TORCHHALO_DEBUG=1 to learn which, and where. "
            f"{error}"
        ) from error
