"""From arrays to sharded tensors and back, each rank its own box: the whole is never held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchhalo.exchange.layout import layout
from torchhalo.exchange.relayout import without_grids
from torchhalo.geometry import Box
from torchhalo.torch_internals import dtensors, process_groups, redistribution, simulation


def spatial_dims(shape: Sequence[int], axes: int) -> tuple[int, ...]:
    """The dims along which to cut a batch of images, volumes or videos over a mesh of so many axes, in ascending order.

    The first spatial dim for one axis; for more, as many of the largest. Dims 0 and 1 are batch and channels.

    Example:
        >>> spatial_dims((1, 3, 16, 480, 640), axes=2)
        (3, 4)
    """
    spatial = range(2, len(shape))
    if axes > len(spatial):
        raise ValueError(f"a mesh of {axes} axes cuts {axes} spatial dims, a tensor of shape {tuple(shape)} has {len(spatial)}")
    if axes == 1:
        return (2,)
    return tuple(sorted(sorted(spatial, key=lambda dim: -shape[dim])[:axes]))


def placements_for(shape: Sequence[int], axes: int, dims: int | Sequence[int] | None) -> list[Placement]:
    """One `Shard` per axis of a mesh of so many: along ``dims``, or, if there are none given, along `spatial_dims`."""
    chosen = spatial_dims(shape, axes) if dims is None else (dims,) if isinstance(dims, int) else tuple(dims)
    if len(chosen) != axes:
        raise ValueError(f"`dims` (={chosen}) must name one dim for each of the {axes} axes of the mesh")
    for dim in chosen:
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"`dims` (={chosen}) must be dims of the tensor, whose shape is {tuple(shape)}")
    return [Shard(dim % len(shape)) for dim in chosen]


def shard(source: Any, mesh: DeviceMesh, dims: int | Sequence[int] | None = None) -> DTensor:
    """Cut a tensor, or read from an array, only this rank's box.

    Nothing is sent: every rank must see the same source. Of an array (NumPy, a memory map, zarr, h5py: anything with ``shape``
    and slicing) nothing but the box is read. The result is on the device of the mesh.

    Args:
        source: A plain tensor or an array.
        mesh: The ranks to cut it over.
        dims: One dim for each axis of the mesh; if not given, the first spatial dim (2), or the largest ones on several axes.

    Example:
        >>> volume = np.load("ct.npy", mmap_mode="r")  # doctest: +SKIP
        >>> x = torchhalo.shard(volume, mesh, dims=2)  # doctest: +SKIP
    """
    if isinstance(source, DTensor):
        raise TypeError("shard: the source is a DTensor already; use its `redistribute`")
    shape = tuple(int(size) for size in source.shape)
    placements = placements_for(shape, mesh.ndim, dims)
    found = process_groups.coordinate(mesh)
    if isinstance(source, torch.Tensor):
        stride, dtype = source.stride(), source.dtype
    else:
        stride = torch.empty(shape, device="meta").stride()
        dtype = _copied(source[(slice(0, 0),) * len(shape)]).dtype
    if found is None:
        return dtensors.wrap(torch.empty(0, dtype=dtype), mesh, placements, dtensors.Meta(shape, stride, dtype))
    boxes = layout(shape, mesh, placements)
    part = simulation.per_rank(lambda source, *place: _copied(source[_cuts(boxes.owned(place))]), source, *found)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _copied(part: Any) -> torch.Tensor:
    """A tensor of its own; also of an array that may only be read, of which `torch.as_tensor` would warn."""
    return part.clone(memory_format=torch.preserve_format) if isinstance(part, torch.Tensor) else torch.tensor(part)


def store(tensor: DTensor, target: Any) -> None:
    """Write this rank's box of ``tensor`` into an array that all ranks share: a memory map, zarr, h5py opened in parallel.

    Boxes of several ranks may share a chunk of the file: with zarr, choose chunks that divide the shards, or write one rank
    after another. A box that several ranks hold (along an axis that does not shard) is written by the first of them.

    Args:
        tensor: Of the shape of ``target``; partial sums are added up first.
        target: Anything with ``shape`` and slice assignment.

    Example:
        >>> out = np.lib.format.open_memmap("result.npy", mode="r+")  # doctest: +SKIP
        >>> torchhalo.store(model(x), out)  # doctest: +SKIP
    """
    shape = tuple(map(int, tensor.shape))
    if tuple(target.shape) != shape:
        raise ValueError(f"store: the target must have the tensor's shape {shape}, it has {tuple(target.shape)}")
    owned = first_copy(tensor.detach())
    if owned is not None and owned[1].size:
        part, box = owned[0].cpu(), owned[1]
        target[_cuts(box)] = part if isinstance(target, torch.Tensor) else part.numpy()


def first_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, Box] | None:
    """This rank's shard and its box, if the rank is the first of those that hold it; so that all ranks together have all once.

    Partial sums are added up first, and grids moved.
    """
    assert isinstance(tensor, DTensor)
    tensor = without_grids(redistribution.reduce_partial(tensor))
    coordinate = process_groups.coordinate(tensor.device_mesh)
    copies = [axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate)]
    if coordinate is None or any(coordinate[axis] for axis in copies):
        return None
    return tensor.to_local(), layout(tensor.shape, tensor.device_mesh, tensor.placements).owned(coordinate)


def _cuts(box: Box) -> tuple[slice, ...]:
    """The slices that cut ``box`` out of the whole."""
    return tuple(span.within(0) for span in box.spans)
