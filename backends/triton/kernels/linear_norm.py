"""The rms_norm in front of a product of several rows, as a launch of its own.

The programs of the product share its rows: each would read all of x twice to norm it by itself.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.linear_parts import scaled


@triton.jit
def normalize_rows(
    x,
    gain,
    y,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program i: row i of y [rows, K] is that of x, normed; BLOCK_K >= K."""
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    inside = k < K
    factor = tl.load(gain + k, mask=inside, other=0.0)
    if DEPENDENT:
        gdc_wait()
    value = tl.load(x + row * X_STRIDE + k, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value) / K + EPS)
    tl.store(y + row * K + k, scaled(value, inverse, factor, x.dtype.element_ty).to(y.dtype.element_ty), mask=inside)
