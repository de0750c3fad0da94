"""Sharded in space, right as one device: PyTorch DTensor with the ops of convolution networks exact."""

from torchhalo import ops as ops
from torchhalo.arrays import shard, store
from torchhalo.check import check
from torchhalo.checkpoint import Checkpoints
from torchhalo.dispatch import disable, enable, enabled
from torchhalo.explain import explain
from torchhalo.gathers import GatherError, GatherWarning, strict
from torchhalo.ops.randomness import torch_random
from torchhalo.parallel import SpatialParallel, no_sync, parallelize, plain_state_dict, unparallelize
from torchhalo.plain import plain_as_replicated
from torchhalo.start import materialize

__all__ = [
    "Checkpoints",
    "GatherError",
    "GatherWarning",
    "SpatialParallel",
    "check",
    "disable",
    "enable",
    "enabled",
    "explain",
    "materialize",
    "no_sync",
    "parallelize",
    "plain_as_replicated",
    "plain_state_dict",
    "shard",
    "store",
    "strict",
    "torch_random",
    "unparallelize",
]

__version__ = "0.1.0"
