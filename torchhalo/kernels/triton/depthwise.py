"""The Triton kernels of `torchhalo.depthwise`, which says what they do; it alone imports them, as Triton may not be there.

Tensors have the dims n (batch), c (channels), a (the cut one), b and e, and their strides come in that order.
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
def _tile(strides, e, c):
    """Where on a line its elements are, for all channels."""
    return e[:, None].to(tl.int64) * strides[4] + c[None, :].to(tl.int64) * strides[1]


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
            at_a, meets = _there(a, ka, windows[0], windows[1], windows[2], bounds[part + 1], MIRRORED)
            if meets & (at_a >= bounds[part]):
                for kb in range(taps[1]):
                    at_b, meets_b = _there(b, kb, windows[3], windows[4], windows[5], in_b, MIRRORED)
                    if meets_b:
                        line = _line(sources[part], strides[part], n, at_a - bounds[part], at_b)
                        tap = weight + ka * weight_strides[2] + kb * weight_strides[3]
                        for ke in range(taps[2]):
                            at_e, reached = _there(e, ke, windows[6], windows[7], windows[8], in_e, MIRRORED)
                            mask = reached[:, None] & few[None, :]
                            values = tl.load(line + _tile(strides[part], at_e, c), mask=mask, other=0.0)
                            factor = tl.load(tap + ke * weight_strides[4] + c * weight_strides[0], mask=few, other=0.0)
                            total += values.to(SUM) * factor.to(SUM)[None, :]
    places = _line(out, out_strides, n, a - own, b) + _tile(out_strides, e, c)
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
            at_a, meets = _there(a, ka, windows[0], windows[1], windows[2], own_bounds[1], MIRRORED)
            if meets & (at_a >= own_bounds[0]):
                for item in range(tl.program_id(2), items, tl.num_programs(2)):
                    e = (item % blocks) * BLOCK_E + tl.arange(0, BLOCK_E)
                    b, n = item // blocks % halo_b, item // blocks // halo_b
                    at_b, meets_b = _there(b, kb, windows[3], windows[4], windows[5], own_b, MIRRORED)
                    at_e, reached = _there(e, ke, windows[6], windows[7], windows[8], own_e, MIRRORED)
                    # A number, as Triton's interpreter makes no mask of a boolean for all and one for each.
                    stop = tl.where(meets_b, halo_e, 0)
                    mask = (reached & (e < stop))[:, None] & few[None, :]
                    line = _line(pieces[part], strides[part], n, a - bounds[part][0], b)
                    grads = tl.load(line + _tile(strides[part], e, c), mask=mask, other=0.0)
                    line = _line(own, own_strides, n, at_a - own_bounds[0], at_b)
                    values = tl.load(line + _tile(own_strides, at_e, c), mask=mask, other=0.0)
                    total += grads.to(SUM) * values.to(SUM)
    places = (tl.program_id(2) * channels + c) * tl.num_programs(1) + tap
    tl.store(sums + places, tl.sum(total, 0), mask=few)
