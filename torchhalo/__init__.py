"""Sharded in space, right as one device: PyTorch DTensor with every convolution exact."""

from torchhalo import ops as ops
from torchhalo.dispatch import disable, enable, enabled

__all__ = ["disable", "enable", "enabled"]

__version__ = "0.1.0"
