"""What the kernels of edges share: where windows meet, and where elements lie.

Tensors have the dims n (batch), c (channels), a (the cut one), b and e, and their strides come in that order.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def there(at, tap, stride, padding, dilation, stop, MIRRORED: tl.constexpr):
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
def line_of(tensor, strides, n, a, b):
    """Where a line along e begins."""
    return tensor + n.to(tl.int64) * strides[0] + a.to(tl.int64) * strides[2] + b.to(tl.int64) * strides[3]


@triton.jit
def tile_of(strides, e, c):
    """Where on a line its elements are, for all channels."""
    return e[:, None].to(tl.int64) * strides[4] + c[None, :].to(tl.int64) * strides[1]
