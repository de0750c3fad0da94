"""Torch's log: a wrong call shows its error alone."""

from __future__ import annotations

import logging
import sys
from types import FrameType

from torchhalo.torch_internals.fake_tensors import plain_result


def silence_fake_tensor_log(on: bool) -> None:
    """Let a wrong call on DTensors show its error alone: fake tensors, which find it out, log their stack as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    (log.addFilter if on else log.removeFilter)(_not_from_dtensor)


def _not_from_dtensor(record: logging.LogRecord) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.tensor.") or frame.f_code is plain_result.__code__:
            return False
        frame = frame.f_back
    return True
