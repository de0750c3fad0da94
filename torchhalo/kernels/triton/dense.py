"""Triton kernels for the edges of convolutions of all channels with all; `torchhalo.kernels.edges` says what they do.

Tensors have the dims n (batch), c (channels), a (the cut one), b and e, and their strides come in that order; weights have the
channels of the source, then those of the target, in place of the first two.
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
    PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Each program: a block of columns and of the target's channels of one row of a strip."""
    sources, targets, out_b, out_e, in_b, in_e = sizes
    at, b = tl.program_id(0) // out_b, tl.program_id(0) % out_b
    n, at = at // rows[3], at % rows[3]
    a = tl.where(at < rows[1], rows[0] + at, rows[2] + at - rows[1])
    e, t = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E), tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    few = t < targets
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.zeros((BLOCK_E, BLOCK_T), SUM)
    if BIAS:
        total += tl.load(bias + t, mask=few, other=0.0).to(SUM)[None, :]
    pieces = (before, shard, after)
    for part in tl.static_range(3):
        for ka in range(taps[0]):
            at_a, meets = there(a, ka, windows[0], windows[1], windows[2], bounds[part + 1], MIRRORED)
            if meets & (at_a >= bounds[part]):
                for kb in range(taps[1]):
                    at_b, meets_b = there(b, kb, windows[3], windows[4], windows[5], in_b, MIRRORED)
                    if meets_b:
                        line = line_of(pieces[part], strides[part], n, at_a - bounds[part], at_b)
                        tap = weight + ka * weight_strides[2] + kb * weight_strides[3]
                        for ke in range(taps[2]):
                            at_e, reached = there(e, ke, windows[6], windows[7], windows[8], in_e, MIRRORED)
                            for first in range(0, sources, BLOCK_S):
                                s = first + tl.arange(0, BLOCK_S)
                                there_are = s < sources
                                mask = reached[:, None] & there_are[None, :]
                                values = tl.load(line + tile_of(strides[part], at_e, s), mask=mask, other=0.0)
                                places = s[:, None] * weight_strides[0] + t[None, :] * weight_strides[1]
                                mask = there_are[:, None] & few[None, :]
                                factors = tl.load(tap + ke * weight_strides[4] + places, mask=mask, other=0.0)
                                total = tl.dot(values, factors, total, input_precision=PRECISION, out_dtype=SUM)
    places = line_of(out, out_strides, n, a - own, b) + tile_of(out_strides, e, t)
    tl.store(places, total.to(out.dtype.element_ty), mask=(e < out_e)[:, None] & few[None, :])


@triton.jit
def pairs(
    sums,
    own,
    before,
    after,
    sum_strides,
    own_strides,
    strides,
    own_bounds,
    bounds,
    items,
    sizes,
    taps,
    windows,
    MIRRORED: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Each program: one tap for a block of either channels, over every so manieth block of the halo's rows.

    What it finds it adds to the gradient itself, or leaves in a sum of its own.
    """
    sources, targets, halo_b, halo_e, own_b, own_e = sizes
    tap, blocks = tl.program_id(1), tl.cdiv(halo_e, BLOCK_E)
    ka, kb, ke = tap // (taps[1] * taps[2]), tap // taps[2] % taps[1], tap % taps[2]
    columns = tl.cdiv(targets, BLOCK_T)
    s = tl.program_id(0) // columns * BLOCK_S + tl.arange(0, BLOCK_S)
    t = tl.program_id(0) % columns * BLOCK_T + tl.arange(0, BLOCK_T)
    few_s, few_t = s < sources, t < targets
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.zeros((BLOCK_S, BLOCK_T), SUM)
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
                    meeting = reached & (e < stop)
                    line = line_of(pieces[part], strides[part], n, a - bounds[part][0], b)
                    mask = meeting[:, None] & few_s[None, :]
                    grads = tl.load(line + tile_of(strides[part], e, s), mask=mask, other=0.0)
                    line = line_of(own, own_strides, n, at_a - own_bounds[0], at_b)
                    mask = meeting[:, None] & few_t[None, :]
                    values = tl.load(line + tile_of(own_strides, at_e, t), mask=mask, other=0.0)
                    total = tl.dot(tl.trans(grads), values, total, input_precision=PRECISION, out_dtype=SUM)
    places = ka * sum_strides[2] + kb * sum_strides[3] + ke * sum_strides[4]
    places = sums + places + s[:, None] * sum_strides[0] + t[None, :] * sum_strides[1]
    mask = few_s[:, None] & few_t[None, :]
    if ADD:
        total += tl.load(places, mask=mask, other=0.0).to(SUM)
    else:
        places += tl.program_id(2) * taps[0] * taps[1] * taps[2] * sources * targets
    tl.store(places, total.to(sums.dtype.element_ty), mask=mask)
