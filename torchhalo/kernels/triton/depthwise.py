"""Triton kernels for the edges of depthwise convolutions; `torchhalo.kernels.edges` says what they do.

Tensors have the dims n (batch), c (channels), a (the cut one), b and e, and their strides come in that order.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from torchhalo.kernels.triton.windows import line_of, there, tile_of


@triton.jit
def strips(
    out,
    before,
    shard,
    after,
    weight,
    bias,
    out_strides,
    strides,
    weight_strides,
    rows,
    own,
    bounds,
    sizes,
    taps,
    windows,
    MIRRORED: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Each program: a block of columns and of channels of one row of a strip."""
    channels, out_b, out_e, in_b, in_e = sizes
    at, b = tl.program_id(0) // out_b, tl.program_id(0) % out_b
    n, at = at // rows[3], at % rows[3]
    a = tl.where(at < rows[1], rows[0] + at, rows[2] + at - rows[1])
    e, c = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E), tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    few = c < channels
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.zeros((BLOCK_E, BLOCK_C), SUM)
    if BIAS:
        total += tl.load(bias + c, mask=few, other=0.0).to(SUM)[None, :]
    sources = (before, shard, after)
    for part in tl.static_range(3):
        for ka in range(taps[0]):
            at_a, meets = there(a, ka, windows[0], windows[1], windows[2], bounds[part + 1], MIRRORED)
            if meets & (at_a >= bounds[part]):
                for kb in range(taps[1]):
                    at_b, meets_b = there(b, kb, windows[3], windows[4], windows[5], in_b, MIRRORED)
                    if meets_b:
                        line = line_of(sources[part], strides[part], n, at_a - bounds[part], at_b)
                        tap = weight + ka * weight_strides[2] + kb * weight_strides[3]
                        for ke in range(taps[2]):
                            at_e, reached = there(e, ke, windows[6], windows[7], windows[8], in_e, MIRRORED)
                            mask = reached[:, None] & few[None, :]
                            values = tl.load(line + tile_of(strides[part], at_e, c), mask=mask, other=0.0)
                            factor = tl.load(tap + ke * weight_strides[4] + c * weight_strides[0], mask=few, other=0.0)
                            total += values.to(SUM) * factor.to(SUM)[None, :]
    places = line_of(out, out_strides, n, a - own, b) + tile_of(out_strides, e, c)
    tl.store(places, total.to(out.dtype.element_ty), mask=(e < out_e)[:, None] & few[None, :])


@triton.jit
def pairs(
    sums,
    own,
    before,
    after,
    own_strides,
    strides,
    own_bounds,
    bounds,
    items,
    sizes,
    taps,
    windows,
    MIRRORED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Each program: one tap for a block of channels, over every so manieth block of the halo's rows."""
    channels, halo_b, halo_e, own_b, own_e = sizes
    tap, blocks = tl.program_id(1), tl.cdiv(halo_e, BLOCK_E)
    ka, kb, ke = tap // (taps[1] * taps[2]), tap // taps[2] % taps[1], tap % taps[2]
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    few = c < channels
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.zeros((BLOCK_E, BLOCK_C), SUM)
    pieces = (before, after)
    for part in tl.static_range(2):
        for a in range(bounds[part][0], bounds[part][1]):
            at_a, meets = there(a, ka, windows[0], windows[1], windows[2], own_bounds[1], MIRRORED)
            if meets & (at_a >= own_bounds[0]):
                for item in range(tl.program_id(2), items, tl.num_programs(2)):
                    e = (item % blocks) * BLOCK_E + tl.arange(0, BLOCK_E)
                    b, n = item // blocks % halo_b, item // blocks // halo_b
                    at_b, meets_b = there(b, kb, windows[3], windows[4], windows[5], own_b, MIRRORED)
                    at_e, reached = there(e, ke, windows[6], windows[7], windows[8], own_e, MIRRORED)
                    # A number, as Triton's interpreter makes no mask of a boolean for all and one for each.
                    stop = tl.where(meets_b, halo_e, 0)
                    mask = (reached & (e < stop))[:, None] & few[None, :]
                    line = line_of(pieces[part], strides[part], n, a - bounds[part][0], b)
                    grads = tl.load(line + tile_of(strides[part], e, c), mask=mask, other=0.0)
                    line = line_of(own, own_strides, n, at_a - own_bounds[0], at_b)
                    values = tl.load(line + tile_of(own_strides, at_e, c), mask=mask, other=0.0)
                    total += grads.to(SUM) * values.to(SUM)
    places = (tl.program_id(2) * channels + c) * tl.num_programs(1) + tap
    tl.store(sums + places, tl.sum(total, 0), mask=few)
