"""How Triton kernels are launched: Triton is asked once what to run for arguments of a kind.

At each launch Triton binds all arguments, works out what each is, makes a key of the text of that, and asks the driver about
each pointer. What it compiles for is the dtype of each tensor and whether it begins at a multiple of 16 bytes, and of each
number whether it is 1 or a multiple of 16. Here the numbers themselves are in the key, and addresses are handed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

#: How many ways to launch are kept; then all are let go.
MOST = 8192

#: With the kernel itself, so that no other takes its place in memory: its own hash is that of its source.
_known: dict[object, tuple[Callable[..., None] | None, object]] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    rest: tuple[Any, ...],
    free: tuple[int, ...] = (),
    **options: Any,
) -> None:
    """``kernel[grid](*tensors, *free, *rest, **options)`` on the device of the tensors.

    Args:
        rest: Numbers, and tuples of numbers.
        free: Numbers that the kernel has under ``do_not_specialize``, each with its type: they may differ at each launch.
        options: Triton's own, such as ``num_warps``.

    Example:
        Twice a vector, by a kernel ``twice(out, x, size, BLOCK: tl.constexpr)``::

            launch(twice, (4,), (out, x), (1000, 256))
    """
    device = tensors[0].get_device()
    with nullcontext() if device < 0 or device == torch.cuda.current_device() else torch.cuda.device(device):
        addresses = [tensor.data_ptr() for tensor in tensors]
        kinds = [tensor.dtype for tensor in tensors], [address % 16 == 0 for address in addresses]
        key = id(kernel), device, grid, rest, *options.items(), *kinds[0], *kinds[1]
        run, _ = _known.get(key, (None, None))
        if run is not None:
            run(*addresses, *free, *rest)
            return
        compiled = kernel[grid](*tensors, *free, *rest, **options)
        if key not in _known:
            if len(_known) >= MOST:
                _known.clear()
            _known[key] = _runner(compiled, grid), kernel


def _runner(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None] | None:
    """What launches just what Triton compiled, on the current stream; None if it was interpreted.

    Elsewhere than on CUDA Triton also compiles for the size of a tensor's memory.
    """
    target = getattr(getattr(compiled, "metadata", None), "target", None)
    if getattr(target, "backend", None) != "cuda" or not hasattr(compiled, "__getitem__"):
        return None
    return compiled[grid + (1,) * (3 - len(grid))]
