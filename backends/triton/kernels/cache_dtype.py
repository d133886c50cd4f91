"""Conversions of keys and values between the dtype of a kernel and the dtype of the cache (`ingot.ir.cache.dtype`).

If both are the same dtype, these functions add no machine code.
"""

import triton
import triton.language as tl

# The largest number of f8e4m3 (OCP 8-bit floating point, arXiv 2209.05433).
_MOST = tl.constexpr(448.0)


@triton.jit
def as_cached(x, kv, scale: tl.constexpr):
    """Return keys or values `x` as the cache stores them: divided by `scale`, saturated, and rounded to its dtype.

    `kv` points to the cache. NaN stays NaN. If `x` has the dtype of the cache already, it is returned unchanged.
    """
    dtype: tl.constexpr = kv.dtype.element_ty
    if x.dtype != dtype:
        x = x.to(tl.float32)
        if scale != 1.0:
            x = tl.div_rn(x, tl.full(x.shape, scale, tl.float32))
        # Comparisons with NaN are false, so NaN passes.
        x = tl.where(x > _MOST, _MOST, tl.where(x < -_MOST, -_MOST, x)).to(dtype)
    return x


@triton.jit
def as_computed(x, dtype: tl.constexpr):
    """Return cached keys or values `x` in `dtype`, without rounding. bfloat16, for example, holds every float8 number.

    The caller multiplies by the cache's scale.
    """
    if x.dtype != dtype:
        x = x.to(dtype)
    return x
