"""Memory formats: strides of whole tensors and of shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch.distributed.tensor import DTensor

from torchhalo.exchange.plan import Order
from torchhalo.torch_internals import dtensors, tracing


def dense(shard: torch.Tensor, format: torch.memory_format) -> torch.Tensor:
    """A shard that is in a memory format already, with the strides that kernels know it by.

    A dim of size one may have any stride. But by that of the batch cuDNN's wrapper tells channels-last, and a view of a single
    image has another: then each convolution turned it around and back.
    """
    if tracing.is_traced(shard) or shard.stride() == (usual := strides(shard.shape, format)):
        return shard
    return shard.as_strided(shard.shape, usual)


def canonical(tensor: torch.Tensor, format: torch.memory_format) -> torch.Tensor:
    """``tensor`` in a memory format, with the strides that kernels know it by; a copy only where it is not in that format."""
    return dense(tensor.contiguous(memory_format=format), format)


def croppable(shape: Sequence[int], format: torch.memory_format) -> list[int]:
    """Dims along which a part of a shard is dense in memory, so that a kernel takes it as it is."""
    order = memory_order(format, len(shape)) or tuple(range(len(shape)))
    return [dim for place, dim in enumerate(order) if all(shape[outer] == 1 for outer in order[:place])]


def laid_out(shard: torch.Tensor, whole: DTensor | dtensors.Meta) -> torch.Tensor:
    """The shard in the memory format of the whole tensor."""
    stride = whole.stride() if isinstance(whole, DTensor) else whole.stride
    return shard.contiguous(memory_format=memory_format(whole.shape, stride))


def memory_format(shape: Sequence[int], stride: Sequence[int]) -> torch.memory_format:
    """The memory format of a tensor, for `torch.Tensor.contiguous`: channels-last if it is that and nothing else."""
    return _memory_format(tuple(map(int, shape)), tuple(map(int, stride)))


@lru_cache(maxsize=4096)
def _memory_format(shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if len(shape) not in formats or _dense(shape, stride, range(len(shape))):
        return torch.contiguous_format
    return formats[len(shape)] if _dense(shape, stride, (0, *range(2, len(shape)), 1)) else torch.contiguous_format


def memory_order(format: torch.memory_format, ndim: int) -> Order:
    """The dims as they lie in memory, the outermost first; None for the usual order."""
    return None if format == torch.contiguous_format else (0, *range(2, ndim), 1)


def strides(shape: Sequence[int], format: torch.memory_format) -> tuple[int, ...]:
    """The strides of a dense tensor of ``shape`` in a memory format."""
    return _strides(tuple(map(int, shape)), format)


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...], format: torch.memory_format) -> tuple[int, ...]:
    order = memory_order(format, len(shape)) or range(len(shape))
    found = dict.fromkeys(order, 1)
    for place, dim in enumerate(order):
        found[dim] = prod(max(1, shape[inner]) for inner in order[place + 1 :])
    return tuple(found[dim] for dim in range(len(shape)))


def formatted(result: dtensors.Meta, like: DTensor) -> dtensors.Meta:
    """``result`` in the memory format of ``like``: for ops whose kernels keep it, which fake tensors do not always know."""
    return result._replace(stride=strides(result.shape, memory_format(like.shape, like.stride())))


def formatted_on_cpu(result: dtensors.Meta, like: DTensor) -> dtensors.Meta:
    """The same for ops of which only the CPU's kernel keeps the memory format."""
    if like.device.type == "cpu":
        return formatted(result, like)
    return result._replace(stride=strides(result.shape, torch.contiguous_format))


def _dense(shape: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Whether the dims lie in memory in ``order``, the outermost first, without gaps."""
    return all(
        shape[dim] == 1 or stride[dim] == prod(shape[inner] for inner in order[place + 1 :]) for place, dim in enumerate(order)
    )
