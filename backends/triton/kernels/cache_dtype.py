"""Conversions of keys and values between the dtype of a kernel and the dtype of the cache (`ingot.ir.cache.dtype`).

If both are the same dtype, these functions add no machine code.
"""

import triton
import triton.language as tl

# The largest numbers of caches in f8e4m3 and i8 (`HIGHEST` of `ingot.ir.cache.dtype`).
_MOST_F8 = tl.constexpr(448.0)
_MOST_I8 = tl.constexpr(127.0)
# Float32 has no fraction bits from 2^23 on, so adding 1.5 * 2^23 and taking it away rounds to nearest, ties to even.
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def _saturated(x, MOST: tl.constexpr):
    """Return x limited to the range from -MOST to MOST. NaN passes, because comparisons with it are false."""
    return tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))


@triton.jit
def as_cached(x, kv, scale: tl.constexpr):
    """Return keys or values `x` as the cache stores them: divided by `scale`, saturated, and rounded to its dtype.

    `kv` points to the cache. NaN stays NaN in f8e4m3 and becomes 0 in i8. If `x` has the dtype of the cache already, it
    is returned unchanged.
    """
    dtype: tl.constexpr = kv.dtype.element_ty
    if x.dtype != dtype:
        x = x.to(tl.float32)
        if scale != 1.0:
            x = tl.div_rn(x, tl.full(x.shape, scale, tl.float32))
        if dtype == tl.int8:
            x = _saturated(x, _MOST_I8)
            whole = (x + _ROUNDING) - _ROUNDING
            x = tl.where(x == x, whole, 0.0).to(dtype)
        else:
            x = _saturated(x, _MOST_F8).to(dtype)
    return x


@triton.jit
def as_computed(x, dtype: tl.constexpr):
    """Return cached keys or values `x` in `dtype`, without rounding.

    Each dtype that is computed in holds all numbers of f8e4m3 and i8. The caller multiplies by the cache's scale.
    """
    if x.dtype != dtype:
        x = x.to(dtype)
    return x
