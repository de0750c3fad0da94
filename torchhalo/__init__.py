"""Sharded in space, right as one device: PyTorch DTensor with the ops of convolution networks exact."""

from torchhalo import ops as ops
from torchhalo.dispatch import disable, enable, enabled
from torchhalo.gathers import GatherError, GatherWarning, strict
from torchhalo.ops.randomness import torch_random
from torchhalo.plain import plain_as_replicated

__all__ = ["GatherError", "GatherWarning", "disable", "enable", "enabled", "plain_as_replicated", "strict", "torch_random"]

__version__ = "0.1.0"
