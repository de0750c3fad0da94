"""Process groups of the ranks along some axes of a mesh."""

from __future__ import annotations

import atexit
import faulthandler
import io
import sys
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from torchhalo.torch_internals.caching import cached_on_mesh


def coordinate(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """This rank's place in ``mesh``, or None outside it. In LocalTensor mode symbolic: pass it to a `per_rank` function."""
    found = mesh.get_coordinate()
    return None if found is None else tuple(found)


def key_value_store() -> dist.Store:
    """The store by which the ranks of this world found each other."""
    return dist.distributed_c10d._get_default_store()


def timeout(group: dist.ProcessGroup, device: str) -> timedelta:
    """For how long a collective of ``group`` waits for ranks that do not come."""
    return group._get_backend(torch.device(device)).options._timeout


def submesh_members(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[int, ...]:
    """The ranks that differ from this one along ``axes`` only, itself among them, in ascending order."""
    return cached_on_mesh(mesh, _submesh, tuple(axes))[0]


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


_made: Counter[tuple[int, ...]] = Counter()


def submesh_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """The group of the ranks that differ from this one along ``axes`` only, and where in it each of them stands.

    The second result lists, for the flattened (row-major) index along ``axes``, the position in the group, which torch keeps
    in the order of global ranks whatever the order of the mesh.
    """
    return cached_on_mesh(mesh, _submesh_group, axes)


def _submesh_group(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    members, places = cached_on_mesh(mesh, _submesh, axes)
    _trace_aborts()
    _let_threads_finish()
    return mesh.get_group(axes[0]) if len(axes) == 1 else _group_of(members), places


def _trace_aborts() -> None:
    """Let a process that gloo or NCCL ends say where it was.

    Gloo ends a process that is sent more than it expects, as where one rank has another kernel, and torch's watchdog of NCCL
    one that waited in vain, from threads in which no error can be raised. Python's trace is printed then, which ends at the op,
    or, on a GPU, where the process waits for it. Sizes cannot be compared by another collective instead: only on first use
    would that cost nothing, and ranks need not meet a shape for the first time together.
    """
    if not faulthandler.is_enabled():
        try:
            faulthandler.enable()
        except (AttributeError, ValueError, io.UnsupportedOperation):  # stderr is no file, as in a notebook
            if sys.__stderr__ is not None:
                faulthandler.enable(sys.__stderr__)


@lru_cache(maxsize=1)
def _let_threads_finish() -> None:
    """Let a process that ends right after a collective end well.

    A thread of gloo lets go of its tensors a little after the collective is done, and needs Python's lock for it. If Python is
    about to end by then, it ends the thread instead, and C++ then aborts the process; of plain torch 2.13 one in a hundred did.
    """
    atexit.register(time.sleep, 0.1)


def submesh_positions(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The second result of `submesh_group`, sooner."""
    return cached_on_mesh(mesh, _submesh, axes)[1]


def process_rank() -> int:
    """The rank of this process, also in LocalTensor mode, where `dist.get_rank` may stand for all ranks at once."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.rank()


def _submesh(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    with _disable_current_modes():
        ranks = mesh.mesh
        own = (ranks == process_rank()).nonzero()[0].tolist()
        others = ranks[tuple(slice(None) if axis in axes else own[axis] for axis in range(mesh.ndim))]
        submesh = others.permute([sorted(axes).index(axis) for axis in axes]).flatten().tolist()
    members = sorted(submesh)
    position = {rank: place for place, rank in enumerate(members)}
    return tuple(members), tuple(position[rank] for rank in submesh)


def _group_of(members: tuple[int, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is not None and list(members) == dist.get_process_group_ranks(world):
        return world
    try:
        dist.get_process_group_ranks(_groups[members])
    except (KeyError, ValueError):  # none yet, or destroyed with its world
        _groups[members] = _new_group(members)
    return _groups[members]


def _new_group(members: tuple[int, ...]) -> dist.ProcessGroup:
    """A group that only its members know of, so that ranks outside the mesh need not take part.

    torch names such a group after the number of groups that a rank is in, and ranks that are in different numbers of other
    groups would wait for each other under different names; so it gets a name that all members agree on.
    """
    _made[members] += 1
    name = "-".join(map(str, ("torchhalo", _made[members], *members)))
    with mock.patch.object(dist.distributed_c10d, "_process_group_name", lambda ranks, use_hashed_name: name):
        group = dist.new_group(list(members), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
