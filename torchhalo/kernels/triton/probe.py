"""The smallest Triton kernel: if it compiles, others do."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def probe(out):
    tl.store(out, 0.0)
