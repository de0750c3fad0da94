"""Streams of a GPU: work on a side stream, and whether a CUDA graph records the current one."""

from __future__ import annotations

import threading

import torch

from torchhalo.torch_internals.tracing import is_plain


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is recording what is queued on ``device`` now."""
    # A torch without CUDA raises where it is asked; fake tensors may be on its devices all the same.
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class SideStream:
    """Work that needs nothing of what is queued on the device meanwhile: it may run beside it.

    What is inside starts after all that was queued when this object was made, and what comes after it waits for both. Only on a
    CUDA device does it make a difference; elsewhere, and without a tensor, the work runs in its turn.

    Example:
        >>> side = SideStream(torch.ones(3))
        >>> longer = torch.ones(10_000).sum()
        >>> with side:
        ...     short = torch.ones(3).sum()
    """

    _made = threading.local()  # two threads, such as autograd's, must not record the same event

    def __init__(self, like: torch.Tensor | None) -> None:
        self._main: torch.cuda.Stream | None = None
        if like is not None and like.is_cuda and is_plain(like):
            self._main = torch.cuda.current_stream(like.device)
            made = self._made.__dict__.setdefault("by_device", {})
            if like.device not in made:
                # First in line: the blocks of a long kernel that waits for its turn would keep the short ones out to its end.
                made[like.device] = torch.cuda.Stream(like.device, priority=-1), torch.cuda.Event(), torch.cuda.Event()
            self._side, self._start, self._end = made[like.device]
            self._start.record(self._main)

    def __enter__(self) -> None:
        if self._main is not None:
            self._side.wait_event(self._start)
            torch.cuda.set_stream(self._side)

    def __exit__(self, *exc: object) -> None:
        if self._main is not None:
            self._end.record(self._side)
            torch.cuda.set_stream(self._main)
            self._main.wait_event(self._end)
