"""How tensors lie in memory, as a dimension of tests: the same values with other strides.

Before, behind and between the elements, where nobody may read, there is nan, or the largest integer.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st

MARGIN = 64  # elements before and behind a tensor


class Memory(NamedTuple):
    """How to lay out a tensor.

    Attributes:
        order: ``usual``, ``channels last`` (dim 1 innermost) or ``transposed`` (the last two dims swapped).
        step: 0 if the elements lie one behind another; else the tensor is sliced out of a larger one with that step.
        repeated: Dims with stride 0, along which the tensor becomes its first element, expanded.
        single: The stride of dims of size one, which may be any; None for that of a dense tensor.
    """

    order: str = "usual"
    step: int = 0
    repeated: tuple[int, ...] = ()
    single: int | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` in memory of its own.

        >>> Memory("transposed", step=2)(torch.ones(2, 3)).stride()
        (2, 12)
        """
        shape, ndim = tensor.shape, tensor.ndim
        if not tensor.numel():
            return tensor.clone(memory_format=torch.contiguous_format)
        first = tensor[tuple(slice(0, 1 if dim in self.repeated else None) for dim in range(ndim))]
        order = _order(self.order, ndim)
        sizes = [first.shape[dim] * self.step + 2 if self.step else first.shape[dim] for dim in order]
        count = math.prod(sizes)
        storage = torch.full((count + 2 * MARGIN,), _nothing(tensor.dtype), dtype=tensor.dtype, device=tensor.device)
        part = storage[MARGIN : MARGIN + count].view(sizes).permute([order.index(dim) for dim in range(ndim)])
        if self.step:
            part = part[(slice(1, -1, self.step),) * ndim]
        part.copy_(first)
        stride = list(part.stride())
        for dim, size in enumerate(shape):
            if size == 1 and self.single is not None:
                stride[dim] = self.single
            elif dim in self.repeated:
                stride[dim] = 0
        return part.as_strided(shape, stride)


def _order(name: str, ndim: int) -> list[int]:
    """The dims, the outermost in memory first."""
    dims = list(range(ndim))
    if name == "channels last" and ndim > 2:
        dims.append(dims.pop(1))
    elif name == "transposed" and ndim > 1:
        dims[-2:] = reversed(dims[-2:])
    return dims


def _nothing(dtype: torch.dtype) -> float:
    return math.nan if dtype.is_floating_point or dtype.is_complex else dtype == torch.bool or torch.iinfo(dtype).max


#: One of each kind.
MEMORIES = {
    "contiguous": Memory(),
    "channels last": Memory("channels last"),
    "transposed": Memory("transposed"),
    "sliced": Memory(step=2),
    "channels last, sliced": Memory("channels last", step=1),
    "expanded": Memory(repeated=(0, 2, 3, 4)),
    "odd strides": Memory(single=1),
    "channels last, odd strides": Memory("channels last", single=3),
}


def memories(tensors: int) -> st.SearchStrategy[tuple[Memory, ...] | None]:
    """How so many tensors, and the gradient of the result, lie in memory: the argument ``memory`` of `assert_parity`."""
    return st.none() | st.tuples(*[any_memory()] * (tensors + 1))


def any_memory(repeated: bool = True) -> st.SearchStrategy[Memory]:
    """How one tensor lies in memory; ``repeated`` if it may lose values."""
    orders = st.sampled_from(["usual", "usual", "channels last", "channels last", "transposed"])
    dims = st.sampled_from([(), (), (), (0,), (1,), (2,), (3,), (0, 2, 3, 4), (0, 1, 2, 3, 4)] if repeated else [()])
    return st.builds(Memory, orders, st.sampled_from([0, 0, 0, 1, 2]), dims, st.sampled_from([None, None, 0, 1, 3, 1000]))
