"""The Triton kernels of `torchhalo.kernels.draws`, which says what they do; it alone imports them, as Triton may not be there.

Elements are seen as rows and columns: a column is a place along the dim whose elements lie closest in memory.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

STEP: tl.constexpr = tl.constexpr(0x9E3779B97F4A7C15)
STREAM: tl.constexpr = tl.constexpr(0xD1342543DE82EF95)
FIRST: tl.constexpr = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND: tl.constexpr = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return z ^ (z >> 31)


@triton.jit
def _key(seed, drawn):
    """The seed, of which one part comes from the host and one from the device."""
    return seed.to(tl.uint64) + tl.load(drawn).to(tl.uint64)


@triton.jit
def _places(rows, cols, sizes, strides, NDIM: tl.constexpr):
    """What the strides say of each row, and of each column."""
    at = tl.zeros_like(rows).to(tl.int64)
    for i in tl.static_range(NDIM - 1):
        at += (rows % sizes[NDIM - 2 - i]).to(tl.int64) * strides[NDIM - 2 - i]
        rows = rows // sizes[NDIM - 2 - i]
    return at, cols.to(tl.int64) * strides[NDIM - 1]


@triton.jit
def _pointers(tensor, rows, cols, sizes, strides, NDIM: tl.constexpr):
    along, across = _places(rows, cols, sizes, strides, NDIM)
    return tensor + along[:, None] + across[None, :]


@triton.jit
def _block(count, sizes, NDIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, LARGE: tl.constexpr):
    """The rows and the columns of a program, and which of them there are."""
    blocks = tl.cdiv(sizes[NDIM - 1], COLS)
    at, across = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if LARGE:
        at, across = at.to(tl.int64), across.to(tl.int64)
    rows, cols = at * ROWS + tl.arange(0, ROWS), across * COLS + tl.arange(0, COLS)
    return rows, cols, (rows < count)[:, None] & (cols < sizes[NDIM - 1])[None, :]


@triton.jit
def _words(rows, cols, sizes, steps, start, NDIM: tl.constexpr):
    """The places in the whole tensor, times the step of the hash."""
    along, across = _places(rows, cols, sizes, steps, NDIM)
    return ((along + start).to(tl.uint64) * STEP)[:, None] + (across.to(tl.uint64) * STEP)[None, :]


@triton.jit
def _unit(bits, DIGITS: tl.constexpr):
    """Uniform in [0, 1)."""
    words = bits >> (64 - DIGITS)
    if DIGITS == 53:
        found = words.to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))
    else:
        found = words.to(tl.int32).to(tl.float32) * (1.0 / (1 << DIGITS))
    return found


@triton.jit
def _number(bits, WIDE: tl.constexpr):
    """A double that came as its bits, as a launch would round it to single precision."""
    number = bits.to(tl.int64).to(tl.float64, bitcast=True)
    return number if WIDE else number.to(tl.float32)


# The seed changes with each draw, and the rest with each layer: nothing is compiled for what divides them.
@triton.jit(do_not_specialize=["seed", "threshold", "first", "second"])
def draw(
    out,
    drawn,
    seed: tl.int64,
    threshold: tl.int64,
    first: tl.int64,
    second: tl.int64,
    start,
    count,
    sizes,
    steps,
    strides,
    KIND: tl.constexpr,
    DIGITS: tl.constexpr,
    NDIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LARGE: tl.constexpr,
):
    """Each program: one block of a draw."""
    rows, cols, there = _block(count, sizes, NDIM, ROWS, COLS, LARGE)
    words, key = _words(rows, cols, sizes, steps, start, NDIM), _key(seed, drawn)
    bits = _mixed(words + _mixed(key))
    WIDE: tl.constexpr = DIGITS == 53
    if KIND == "bernoulli":
        values = (bits >> 11) < threshold.to(tl.uint64)
        if out.dtype.element_ty != tl.int1:
            values = values.to(tl.float32)
    else:
        low, factor = _number(first, WIDE), _number(second, WIDE)
        if KIND == "uniform":
            values = _unit(bits, DIGITS) * factor + low
        else:
            turn = _unit(_mixed(words + _mixed(key + STREAM)), 53 if WIDE else 24)
            if WIDE:
                log = tl.log(((bits >> 11) + 1).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53)))
                radius = tl.sqrt(log * -2.0)
            else:
                log = tl.log(((bits >> 32) + 1).to(tl.int64).to(tl.float32) * (1.0 / (1 << 32)))
                radius = tl.sqrt_rn(log * -2.0)
            values = radius * tl.cos(turn * 6.283185307179586) * factor + low
    tl.store(_pointers(out, rows, cols, sizes, strides, NDIM), values.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["seed", "threshold", "scale"])
def dropout(
    kept,
    out,
    input,
    drawn,
    seed: tl.int64,
    threshold: tl.int64,
    scale: tl.int64,
    start,
    count,
    sizes,
    steps,
    strides,
    NDIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LARGE: tl.constexpr,
):
    """Each program: one block of a draw of what is kept, and of the input times that and the scale."""
    rows, cols, there = _block(count, sizes, NDIM, ROWS, COLS, LARGE)
    words = _words(rows, cols, sizes, steps, start, NDIM)
    keeps = (_mixed(words + _mixed(_key(seed, drawn))) >> 11) < threshold.to(tl.uint64)
    WIDE: tl.constexpr = out.dtype.element_ty == tl.float64
    SUM: tl.constexpr = tl.float64 if WIDE else tl.float32
    tl.store(_pointers(kept, rows, cols, sizes, strides[0], NDIM), keeps, mask=there)
    values = tl.load(_pointers(input, rows, cols, sizes, strides[2], NDIM), mask=there, other=0.0).to(SUM)
    values = values * keeps.to(SUM) * _number(scale, WIDE)
    tl.store(_pointers(out, rows, cols, sizes, strides[1], NDIM), values.to(out.dtype.element_ty), mask=there)
