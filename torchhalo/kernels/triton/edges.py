"""Triton kernels for the edges of convolutions; `torchhalo.kernels.edges` says what they do.

Tensors have the dims n (batch), c (channels), a (the cut one), b and e, and their strides come in that order. Weights have, in
place of the first two, the sources that a target reads, and the targets. With ``DEPTHWISE`` a target reads one source, the
channel at its own place, and products are taken channel by channel.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _there(at, tap, stride, padding, dilation, stop, MIRRORED: tl.constexpr):
    """What ``at`` meets in a tap on the other side, which ends at ``stop``, and whether it meets any."""
    if MIRRORED:
        steps = at + padding - tap * dilation
        there = steps // stride
        meets = (steps >= 0) & (steps % stride == 0) & (there < stop)
    else:
        there = at * stride - padding + tap * dilation
        meets = (there >= 0) & (there < stop)
    return there, meets


@triton.jit
def _line(tensor, strides, n, a, b):
    """Where a line along e begins."""
    return tensor + n.to(tl.int64) * strides[0] + a.to(tl.int64) * strides[2] + b.to(tl.int64) * strides[3]


@triton.jit
def _tile(line, strides, e, c):
    """Where on a line its elements are, of some columns and channels."""
    return line + (e[:, None].to(tl.int64) * strides[4] + c[None, :].to(tl.int64) * strides[1])


@triton.jit
def _loaded(line, strides, e, c, here, few):
    """What lies there: zero but for the columns that are here, and for these few channels."""
    return tl.load(_tile(line, strides, e, c), mask=here[:, None] & few[None, :], other=0.0)


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
    DEPTHWISE: tl.constexpr,
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
    few_t = t < targets
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.zeros((BLOCK_E, BLOCK_T), SUM)
    if BIAS:
        total += tl.load(bias + t, mask=few_t, other=0.0).to(SUM)[None, :]
    pieces = (before, shard, after)
    for part in tl.static_range(3):
        for ka in range(taps[0]):
            at_a, meets = _there(a, ka, windows[0], windows[1], windows[2], bounds[part + 1], MIRRORED)
            if meets & (at_a >= bounds[part]):
                for kb in range(taps[1]):
                    at_b, meets_b = _there(b, kb, windows[3], windows[4], windows[5], in_b, MIRRORED)
                    if meets_b:
                        line = _line(pieces[part], strides[part], n, at_a - bounds[part], at_b)
                        tap = weight + ka * weight_strides[2] + kb * weight_strides[3]
                        for ke in range(taps[2]):
                            at_e, reached = _there(e, ke, windows[6], windows[7], windows[8], in_e, MIRRORED)
                            if DEPTHWISE:
                                values = _loaded(line, strides[part], at_e, t, reached, few_t)
                                factors = tl.load(tap + ke * weight_strides[4] + t * weight_strides[1], mask=few_t, other=0.0)
                                total += values.to(SUM) * factors.to(SUM)[None, :]
                            else:
                                for first in range(0, sources, BLOCK_S):
                                    s = first + tl.arange(0, BLOCK_S)
                                    few_s = s < sources
                                    values = _loaded(line, strides[part], at_e, s, reached, few_s)
                                    places = s[:, None] * weight_strides[0] + t[None, :] * weight_strides[1]
                                    mask = few_s[:, None] & few_t[None, :]
                                    factors = tl.load(tap + ke * weight_strides[4] + places, mask=mask, other=0.0)
                                    total = tl.dot(values, factors, total, input_precision=PRECISION, out_dtype=SUM)
    places = _tile(_line(out, out_strides, n, a - own, b), out_strides, e, t)
    tl.store(places, total.to(out.dtype.element_ty), mask=(e < out_e)[:, None] & few_t[None, :])


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
    DEPTHWISE: tl.constexpr,
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
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    if DEPTHWISE:
        t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
        few_t = t < targets
        s, few_s = t, few_t
        total = tl.zeros((BLOCK_E, BLOCK_T), SUM)
    else:
        columns = tl.cdiv(targets, BLOCK_T)
        s = tl.program_id(0) // columns * BLOCK_S + tl.arange(0, BLOCK_S)
        t = tl.program_id(0) % columns * BLOCK_T + tl.arange(0, BLOCK_T)
        few_s, few_t = s < sources, t < targets
        total = tl.zeros((BLOCK_S, BLOCK_T), SUM)
    pieces = (before, after)
    for part in tl.static_range(2):
        for a in range(bounds[part][0], bounds[part][1]):
            at_a, meets = _there(a, ka, windows[0], windows[1], windows[2], own_bounds[1], MIRRORED)
            if meets & (at_a >= own_bounds[0]):
                for item in range(tl.program_id(2), items, tl.num_programs(2)):
                    e = (item % blocks) * BLOCK_E + tl.arange(0, BLOCK_E)
                    b, n = item // blocks % halo_b, item // blocks // halo_b
                    at_b, meets_b = _there(b, kb, windows[3], windows[4], windows[5], own_b, MIRRORED)
                    at_e, reached = _there(e, ke, windows[6], windows[7], windows[8], own_e, MIRRORED)
                    # A number, as Triton's interpreter makes no mask of a boolean for all and one for each.
                    stop = tl.where(meets_b, halo_e, 0)
                    here = reached & (e < stop)
                    line = _line(pieces[part], strides[part], n, a - bounds[part][0], b)
                    grads = _loaded(line, strides[part], e, s, here, few_s)
                    line = _line(own, own_strides, n, at_a - own_bounds[0], at_b)
                    values = _loaded(line, own_strides, at_e, t, here, few_t)
                    if DEPTHWISE:
                        total += grads.to(SUM) * values.to(SUM)
                    else:
                        total = tl.dot(tl.trans(grads), values, total, input_precision=PRECISION, out_dtype=SUM)
    places = sums + ka * sum_strides[2] + kb * sum_strides[3] + ke * sum_strides[4]
    if DEPTHWISE:
        total = tl.sum(total, 0)
        places, mask = places + t * sum_strides[1], few_t
    else:
        places = places + s[:, None] * sum_strides[0] + t[None, :] * sum_strides[1]
        mask = few_s[:, None] & few_t[None, :]
    if ADD:
        total += tl.load(places, mask=mask, other=0.0).to(SUM)
    else:
        places += tl.program_id(2) * taps[0] * taps[1] * taps[2] * sources * targets
    tl.store(places, total.to(sums.dtype.element_ty), mask=mask)
