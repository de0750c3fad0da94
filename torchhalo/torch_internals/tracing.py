"""Whether a tensor has values, or torch.compile is recording what happens to it."""

from __future__ import annotations

from itertools import count

import torch
from torch.distributed import _functional_collectives as funcol


def has_values(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has values now, as opposed to while something is traced."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not is_tracing() and not isinstance(tensor, FakeTensor)


def is_tracing() -> bool:
    """Whether torch.compile is recording the ops."""
    return funcol._are_we_tracing()


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether torch.compile is recording what happens to ``tensor``; sooner answered than `is_tracing`."""
    return not is_plain(tensor) and is_tracing()


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but memory, so that a kernel unknown to torch may read and write it."""
    return type(tensor) in _PLAIN


def no_dispatch_modes() -> bool:
    """Whether no dispatch mode sees what is called: one that counts work or memory knows torch's usual ops and tensors."""
    return torch._C._len_torch_dispatch_stack() == 0


@torch.library.custom_op("torchhalo::after", mutates_args=())
def _after(tensor: torch.Tensor, cause: torch.Tensor, call: int) -> torch.Tensor:
    return tensor.clone()


@_after.register_fake
def _(tensor: torch.Tensor, cause: torch.Tensor, call: int) -> torch.Tensor:
    return torch.empty_like(tensor)


_calls = count()


def depend_on(tensor: torch.Tensor, cause: torch.Tensor) -> torch.Tensor:
    """``tensor``, made to depend on ``cause`` in a compiled graph by an op that the compiler cannot look into.

    Every rank compiles its own graph, and the graphs must hold the same collectives. On a rank that receives nothing the
    halo is unused, and the exchange would be dropped there; on one that sends nothing the buffer to send depends on
    nothing, and an exchange of the backward graph would be moved to the forward one. And of two equal exchanges one would be
    dropped where the compiler sees that they are equal, which depends on the shard; so each call gets a number. Else the other
    ranks would wait forever.
    """
    return _after(tensor, cause, next(_calls)) if is_traced(tensor) else tensor


def depend_if_empty(result: torch.Tensor, cause: torch.Tensor) -> torch.Tensor:
    """``result``; if it is empty, made to depend on ``cause``: a compiler may drop what only an empty tensor needs."""
    return result if result.numel() else depend_on(result, cause)
