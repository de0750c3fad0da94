"""Sharded in space, right as one device: PyTorch DTensor with the ops of convolution networks exact."""

from torchhalo import ops as ops
from torchhalo.exchange.gathers import GatherError, GatherWarning, strict
from torchhalo.ops.randomness import torch_random
from torchhalo.parallel.arrays import shard, store
from torchhalo.parallel.checkpoint import Checkpoints
from torchhalo.parallel.parallelize import SpatialParallel, no_sync, parallelize, plain_state_dict, unparallelize
from torchhalo.parallel.plain import plain_as_replicated
from torchhalo.parallel.start import materialize
from torchhalo.parallel.streaming.stream import stream, unstream
from torchhalo.tools.check import check
from torchhalo.tools.explain import explain
from torchhalo.torch_internals.switch import disable, enable, enabled

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
    "stream",
    "strict",
    "torch_random",
    "unparallelize",
    "unstream",
]

__version__ = "0.1.0"
