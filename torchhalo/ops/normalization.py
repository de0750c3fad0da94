"""Batch, group, layer and RMS norm: statistics over all ranks, and their gradients.

All are one engine. Forward: a rank takes mean and squared deviations of its part, per channel, group or row; one gather merges
those of all ranks; each normalises its own part. Backward: the gradient, and its product with the normalised input, are summed
over what shares a statistic, and over the ranks by one all-reduce; from these each rank computes its part. Where no statistic
has its elements on different ranks, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchhalo.exchange.memory import strides
from torchhalo.torch_internals import dtensors, handlers, redistribution

aten = torch.ops.aten

Placements = list[Placement]


def channel_placements(placements: Sequence[Placement]) -> Placements:
    """Of a tensor with one element per channel: cut where the channels are."""
    return [Shard(0) if p == Shard(1) else Replicate() for p in placements]


def parameter_gradient(
    shard: torch.Tensor, owner: DTensor | None, input: DTensor, shape: Sequence[int], placements: Placements
) -> DTensor:
    """The gradient of a parameter, returned as that is placed; as it was computed where that saves a collective.

    Args:
        owner: The parameter; the weight for a bias that the op is not given.
        input: The op's input, whose dtype a gradient has if there is no owner.
    """
    dtype = input.dtype if owner is None else owner.dtype
    meta = dtensors.Meta(tuple(shape), strides(tuple(shape), torch.contiguous_format), dtype)
    found = dtensors.wrap(shard.to(dtype), input.device_mesh, placements, meta)
    owned = [Replicate()] * len(placements) if owner is None else owner.placements
    pairs = zip(placements, owned, strict=True)
    return redistribution.redistribute(
        found, [q if isinstance(q, Shard) else p if p.is_partial() else Replicate() for p, q in pairs]
    )


def non_member_gradients(
    input: DTensor, results: Sequence[dtensors.Meta], placements: Sequence[Sequence[Placement]], mask: Sequence[bool]
) -> tuple[DTensor | None, ...] | None:
    """What a backward handler returns on a rank outside the mesh, of ``results`` those that ``mask`` wants; else None."""
    done = dtensors.non_member_result(input, results, placements)
    return done and tuple(grad if wanted else None for grad, wanted in zip(done, mask, strict=True))


handlers.register_composites(
    __name__,
    aten.batch_norm.default,
    aten.instance_norm.default,
    aten.group_norm.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten._batch_norm_impl_index.default,
    traffic="as the ops that it is made of",
)
