"""Sharded in space, right as one device: PyTorch DTensor with every convolution exact."""

from torchhalo import ops as ops
from torchhalo.dispatch import disable, enable, enabled
from torchhalo.gathers import GatherError, GatherWarning, strict

__all__ = ["GatherError", "GatherWarning", "disable", "enable", "enabled", "strict"]

__version__ = "0.1.0"
