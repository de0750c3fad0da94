"""What to do about a model that raises on shards, by what it raised."""

from __future__ import annotations

import re

#: By what an error says, the first that fits: what to do. docs/troubleshooting.md says more.
_REMEDIES = {
    "in one process already": "the model fails without torchhalo too; fix the model, or give the --input that it wants",
    "does not have a sharding strategy registered|no fake impl registered": (
        "neither torchhalo nor DTensor handles this op: write it with ops of docs/ops.md, or call it on x.full_tensor() if x "
        "is small, or on the shard if it is pointwise (torch.distributed.tensor.experimental.local_map)"
    ),
    "in-place operations that require placement changes": "use the form of this op that is not in place (inplace=False)",
    "got mixed torch.Tensor and DTensor": (
        "this op meets a plain tensor outside of the model's forward: make it in the forward, or from a tensor of the model"
    ),
    "torchhalo knows Shard, Replicate and Partial": "call x.redistribute(placements=...) before this op",
    "slice, selection or view along a sharded dim, and so a copy": "take the slice again after the tensor is written to",
    "dropout_p": "call F.scaled_dot_product_attention, or set the dropout of the attention to 0",
    "are no slices and selections": "use slices, unfold or view in place of as_strided",
    "can only grow there by a power of two": "convert the integer tensor to a floating dtype before it is interpolated",
    "Attempting to use FunctionalTensor|has no storage|data_ptr|numpy": (
        "this code reads the memory of a tensor, which on a rank is a shard: use torch ops, or x.full_tensor() if x is small"
    ),
    "timed out|Connection closed|did not come|data size": (
        "ranks took different branches, or one died: run with TORCHHALO_DEBUG=1, which names the op and the module"
    ),
    "out of memory|not enough memory": "give a smaller --input: each rank runs on this machine",
}
_OTHERWISE = (
    "cut another dim with --dims, or use other ops there; if the op is in docs/ops.md, or a model of a known library fails, "
    "please report it"
)


def remedy(error: str) -> str:
    """What to do about ``error``."""
    return next((advice for pattern, advice in _REMEDIES.items() if re.search(pattern, error)), _OTHERWISE)
