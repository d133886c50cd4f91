"""Keys and values between the dtype that kernels compute in and that of the cache (`ingot.ir.cache.dtype`).

Where the two are one dtype, nothing here leaves a trace in machine code.
"""

import triton
import triton.language as tl

# The largest number of f8e4m3 (OCP 8-bit floating point, arXiv 2209.05433).
_MOST = tl.constexpr(448.0)


@triton.jit
def as_cached(x, kv, scale: tl.constexpr):
    """Keys or values as the cache that `kv` points to holds them: divided, saturated and rounded. NaN stays NaN."""
    dtype: tl.constexpr = kv.dtype.element_ty
    if x.dtype != dtype:
        x = x.to(tl.float32)
        if scale != 1.0:
            x = tl.div_rn(x, tl.full(x.shape, scale, tl.float32))
        # Comparisons with NaN are false, so that it passes.
        x = tl.where(x > _MOST, _MOST, tl.where(x < -_MOST, -_MOST, x)).to(dtype)
    return x


@triton.jit
def as_computed(x, dtype: tl.constexpr):
    """Keys or values of a cache in `dtype`, which holds every number of f8e4m3. Scales are left to be multiplied."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x
