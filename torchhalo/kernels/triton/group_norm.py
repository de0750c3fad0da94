"""The Triton kernels of `torchhalo.kernels.group_norm`, which says what they do; it alone imports them.

A shard has n samples of c channels of s elements each. In memory either s is innermost, or c (channels-last): ``LAST``. A
program of the large kernels takes one chunk of s of a block of channels, and walks through it in tiles.

``sizes`` are samples, channels, elements of each, and those of a chunk. ``grouping`` is the rank's first channel, the size of a
group, and how many groups there are; ``counts`` are samples, channels, and chunks of a channel.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _walk(sizes, LAST: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr):
    """Of a program: sample and channels, where its chunk begins and ends, and where in memory the sample and a tile are."""
    _, channels, length, chunk = sizes
    blocks = tl.cdiv(channels, BLOCK_C)
    n, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    e, f = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_C)
    first = block * BLOCK_C
    start = tl.program_id(1) * chunk
    begin = n.to(tl.int64) * channels * length
    if LAST:
        begin += first
        tile = e[:, None] * channels + f[None, :]
    else:
        begin += first.to(tl.int64) * length
        tile = f[None, :] * length + e[:, None]
    return n, first + f, first + f < channels, start, tl.minimum(start + chunk, length), begin, tile


@triton.jit
def _at(at, stop, owned, begin, sizes, LAST: tl.constexpr, BLOCK_S: tl.constexpr):
    """Of one step of the walk: where in memory it is, and which cells of the tile there are."""
    step = sizes[1] if LAST else 1
    here = (at + tl.arange(0, BLOCK_S) < stop)[:, None] & owned[None, :]
    return begin + tl.cast(at, tl.int64) * step, here


@triton.jit
def _cell(n, c, grouping):
    """Where the numbers of a sample and of a channel's group are."""
    first, size, groups = grouping
    return n * groups + (first + c) // size


@triton.jit
def _members(row, channels, grouping):
    """Of a sample and a group: the sample, and which of the rank's channels are in the group, the first and how many."""
    first, size, groups = grouping
    n, g = row // groups, row % groups
    low = tl.maximum(g * size - first, 0)
    return n, low, tl.maximum(tl.minimum(g * size + size - first, channels) - low, 0)


@triton.jit
def statistics(
    x,
    partials,
    sizes,
    splits,
    LAST: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of each chunk: the mean, less the channel's first element, and the sum of squared deviations; and that first element."""
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    samples, channels, length, _ = sizes
    n, c, owned, start, stop, begin, tile = _walk(sizes, LAST, BLOCK_S, BLOCK_C)
    e = tl.arange(0, BLOCK_S)
    lines = tl.arange(0, BLOCK_C) * (1 if LAST else length)
    origin = tl.load(x + begin + lines, mask=owned, other=0.0).to(ACC)
    mean = tl.zeros((BLOCK_S, BLOCK_C), ACC)
    squares = tl.zeros((BLOCK_S, BLOCK_C), ACC)
    for at in tl.range(start, stop, BLOCK_S, num_stages=STAGES):
        place, here = _at(at, stop, owned, begin, sizes, LAST, BLOCK_S)
        values = tl.load(x + place + tile, mask=here, other=0.0).to(ACC) - origin[None, :]
        apart = tl.where(here, values - mean, 0.0)
        mean += apart * (1.0 / ((at - start) // BLOCK_S + 1).to(ACC))
        squares += apart * (values - mean)
    counts = tl.cdiv(tl.maximum(stop - start - e, 0), BLOCK_S).to(ACC)[:, None]
    total = (stop - start).to(ACC)
    center = tl.sum(counts * mean, 0) / total
    apart = mean - center[None, :]
    squares = tl.sum(squares + counts * apart * apart, 0)
    cells = samples * channels
    place = n * channels + c
    split = tl.program_id(1)
    tl.store(partials + split * cells + place, center, mask=owned)
    tl.store(partials + (splits + split) * cells + place, squares, mask=owned)
    # A number, as Triton's interpreter makes no mask of a boolean for all and one for each.
    firsts = tl.where(split == 0, channels, 0)
    tl.store(partials + 2 * splits * cells + place, origin, mask=owned & (c < firsts))


@triton.jit
def _chunks(i, partials, n, low, width, sizes, splits):
    """Of some chunks of a group: which there are, how many elements each has, their mean, and the sum of squared deviations."""
    samples, channels, length, chunk = sizes
    cells = samples * channels
    here = i < width * splits
    split, place = i // width, n * channels + low + i % width
    count = tl.minimum(length - split * chunk, chunk).to(tl.float64)
    center = tl.load(partials + split * cells + place, mask=here, other=0.0).to(tl.float64)
    origin = tl.load(partials + 2 * splits * cells + place, mask=here, other=0.0).to(tl.float64)
    squares = tl.load(partials + (splits + split) * cells + place, mask=here, other=0.0).to(tl.float64)
    return here, count, origin + center, squares


@triton.jit
def merge_chunks(partials, parts, sizes, splits, grouping, BLOCK: tl.constexpr):
    """Of each sample and group: mean and mean of squared deviations over chunks and the rank's channels."""
    samples, channels, length, _ = sizes
    row, rows = tl.program_id(0), samples * grouping[2]
    n, low, width = _members(row, channels, grouping)
    total = tl.maximum(width, 1).to(tl.float64) * length
    sums = tl.zeros((BLOCK,), tl.float64)
    for at in range(0, width * splits, BLOCK):
        here, count, center, _squares = _chunks(at + tl.arange(0, BLOCK), partials, n, low, width, sizes, splits)
        sums += tl.where(here, count * center, 0.0)
    mean = tl.sum(sums, 0) / total
    sums = tl.zeros((BLOCK,), tl.float64)
    for at in range(0, width * splits, BLOCK):
        here, count, center, squares = _chunks(at + tl.arange(0, BLOCK), partials, n, low, width, sizes, splits)
        apart = center - mean
        sums += tl.where(here, squares + count * apart * apart, 0.0)
    tl.store(parts + row, mean)
    tl.store(parts + rows + row, tl.sum(sums, 0) / total)


@triton.jit
def _of_rank(rank, parts, shares, i, here, cells, groups, BY_GROUP: tl.constexpr):
    """The share that a rank has of all elements, its mean, and its mean of squared deviations."""
    share = tl.load(shares + (rank * groups + i % groups if BY_GROUP else rank + i * 0), mask=here, other=0.0)
    mean = tl.load(parts + 2 * rank * cells + i, mask=here, other=0.0)
    squares = tl.load(parts + (2 * rank + 1) * cells + i, mask=here, other=0.0)
    return share, mean, squares


@triton.jit
def merge_ranks(parts, shares, few, ranks, samples, groups, EPS: tl.constexpr, BY_GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Of all ranks: mean, one over the standard deviation, and what rounding has taken from the mean."""
    cells = samples * groups
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < cells
    origin = tl.load(parts + i, mask=here, other=0.0)
    center = tl.zeros((BLOCK,), tl.float64)
    for rank in range(ranks):
        share, mean, _squares = _of_rank(rank, parts, shares, i, here, cells, groups, BY_GROUP)
        center += share * (mean - origin)
    variance = tl.zeros((BLOCK,), tl.float64)
    for rank in range(ranks):
        share, mean, squares = _of_rank(rank, parts, shares, i, here, cells, groups, BY_GROUP)
        apart = mean - origin - center
        variance += share * (squares + apart * apart)
    mean = origin + center
    rounded = mean.to(few.dtype.element_ty)
    rstd = 1.0 / tl.sqrt(variance + tl.full((), EPS, tl.float64))
    tl.store(few + i, rounded, mask=here)
    tl.store(few + cells + i, rstd.to(few.dtype.element_ty), mask=here)
    tl.store(few + 2 * cells + i, (mean - rounded.to(tl.float64)).to(few.dtype.element_ty), mask=here)


@triton.jit
def normalize(
    x,
    out,
    mean,
    rstd,
    rest,
    weight,
    bias,
    sizes,
    grouping,
    LAST: tl.constexpr,
    REST: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    n, c, owned, start, stop, begin, tile = _walk(sizes, LAST, BLOCK_S, BLOCK_C)
    cell = _cell(n, c, grouping)
    center = tl.load(mean + cell, mask=owned, other=0.0).to(ACC)
    scale = tl.load(rstd + cell, mask=owned, other=0.0).to(ACC)
    if WEIGHT:
        scale *= tl.load(weight + c, mask=owned, other=0.0).to(ACC)
    shift = tl.zeros((BLOCK_C,), ACC)
    if REST:
        shift -= tl.load(rest + cell, mask=owned, other=0.0) * scale
    if BIAS:
        shift += tl.load(bias + c, mask=owned, other=0.0).to(ACC)
    for at in tl.range(start, stop, BLOCK_S, num_stages=STAGES):
        place, here = _at(at, stop, owned, begin, sizes, LAST, BLOCK_S)
        values = tl.load(x + place + tile, mask=here, other=0.0).to(ACC)
        values = (values - center[None, :]) * scale[None, :] + shift[None, :]
        tl.store(out + place + tile, values.to(out.dtype.element_ty), mask=here)


@triton.jit
def products(
    grad,
    x,
    mean,
    partials,
    sizes,
    splits,
    grouping,
    LAST: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of each chunk the sums of the gradient, and of its product with the deviations."""
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    n, c, owned, start, stop, begin, tile = _walk(sizes, LAST, BLOCK_S, BLOCK_C)
    center = tl.load(mean + _cell(n, c, grouping), mask=owned, other=0.0).to(ACC)
    sums = tl.zeros((BLOCK_S, BLOCK_C), ACC)
    slopes = tl.zeros((BLOCK_S, BLOCK_C), ACC)
    for at in tl.range(start, stop, BLOCK_S, num_stages=STAGES):
        place, here = _at(at, stop, owned, begin, sizes, LAST, BLOCK_S)
        values = tl.load(x + place + tile, mask=here, other=0.0).to(ACC)
        grads = tl.load(grad + place + tile, mask=here, other=0.0).to(ACC)
        sums += grads
        slopes += grads * (values - center[None, :])
    samples, channels, _, _ = sizes
    cells = samples * channels
    place = tl.program_id(1) * cells + n * channels + c
    tl.store(partials + place, tl.sum(sums, 0), mask=owned)
    tl.store(partials + splits * cells + place, tl.sum(slopes, 0), mask=owned)


@triton.jit
def _of_group(row, partials, weight, sums, counts, grouping, WEIGHT: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    samples, channels, splits = counts
    n, low, width = _members(row, channels, grouping)
    cells, items = samples * channels, width * splits
    grads = tl.zeros((BLOCK,), ACC)
    slopes = tl.zeros((BLOCK,), ACC)
    for at in range(0, items, BLOCK):
        i = at + tl.arange(0, BLOCK)
        here = i < items
        c = low + i % width
        place = i // width * cells + n * channels + c
        one = tl.load(partials + place, mask=here, other=0.0)
        two = tl.load(partials + splits * cells + place, mask=here, other=0.0)
        if WEIGHT:
            factor = tl.load(weight + c, mask=here, other=0.0).to(ACC)
            one *= factor
            two *= factor
        grads += one
        slopes += two
    tl.store(sums + row, tl.sum(grads, 0))
    tl.store(sums + samples * grouping[2] + row, tl.sum(slopes, 0))


@triton.jit
def _of_channels(
    block, partials, rstd, sums, counts, grouping, ACC: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_C: tl.constexpr
):
    samples, channels, splits = counts
    first, size, groups = grouping
    every = block * BLOCK_C + tl.arange(0, BLOCK_C)
    c, g = every - first, every // size
    owned = (c >= 0) & (c < channels)
    items = samples * splits
    grads = tl.zeros((BLOCK_I, BLOCK_C), ACC)
    slopes = tl.zeros((BLOCK_I, BLOCK_C), ACC)
    for at in range(0, items, BLOCK_I):
        i = at + tl.arange(0, BLOCK_I)
        here = (i < items)[:, None] & owned[None, :]
        place = i[:, None] * channels + c[None, :]
        spread = tl.load(rstd + (i % samples)[:, None] * groups + g[None, :], mask=here, other=0.0).to(ACC)
        grads += tl.load(partials + place, mask=here, other=0.0)
        slopes += tl.load(partials + items * channels + place, mask=here, other=0.0) * spread
    whole = groups * size
    sums += 2 * samples * groups
    tl.store(sums + every, tl.sum(grads, 0), mask=every < whole)
    tl.store(sums + whole + every, tl.sum(slopes, 0), mask=every < whole)


@triton.jit
def merge_products(
    partials,
    rstd,
    weight,
    sums,
    counts,
    grouping,
    WEIGHT: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Of each sample and group the sums of both, with the weight; then of each channel, of all ranks, over the samples.

    A program has a sample and a group, or a block of channels.
    """
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = counts[0] * grouping[2]
    id = tl.program_id(0)
    if id < rows:
        _of_group(id, partials, weight, sums, counts, grouping, WEIGHT, ACC, BLOCK)
    else:
        _of_channels(id - rows, partials, rstd, sums, counts, grouping, ACC, BLOCK_I, BLOCK_C)


@triton.jit
def input_gradient(
    grad,
    x,
    out,
    mean,
    rstd,
    weight,
    sums,
    members,
    sizes,
    grouping,
    LAST: tl.constexpr,
    WEIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    n, c, owned, start, stop, begin, tile = _walk(sizes, LAST, BLOCK_S, BLOCK_C)
    cell = _cell(n, c, grouping)
    center = tl.load(mean + cell, mask=owned, other=0.0).to(ACC)
    scale = tl.load(rstd + cell, mask=owned, other=0.0).to(ACC)
    factor = -scale / tl.cast(members, ACC)
    shift = tl.load(sums + cell, mask=owned, other=0.0) * factor
    slope = tl.load(sums + sizes[0] * grouping[2] + cell, mask=owned, other=0.0) * factor * scale * scale
    if WEIGHT:
        gain = tl.load(weight + c, mask=owned, other=0.0).to(ACC)
        scale *= gain
        if not WEIGHTED:
            shift *= gain
            slope *= gain
    for at in tl.range(start, stop, BLOCK_S, num_stages=STAGES):
        place, here = _at(at, stop, owned, begin, sizes, LAST, BLOCK_S)
        values = tl.load(x + place + tile, mask=here, other=0.0).to(ACC)
        grads = tl.load(grad + place + tile, mask=here, other=0.0).to(ACC)
        values = grads * scale[None, :] + ((values - center[None, :]) * slope[None, :] + shift[None, :])
        tl.store(out + place + tile, values.to(out.dtype.element_ty), mask=here)
