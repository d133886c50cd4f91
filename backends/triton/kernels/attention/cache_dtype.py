"""Conversions of keys and values between the dtype of a kernel and the dtype of the cache (`ingot.ir.cache.dtype`).

If both are the same dtype, these functions add no machine code.
"""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.conversions import i8_as_f16

# The largest numbers of caches in f8e4m3 and i8 (`HIGHEST` of `ingot.ir.cache.dtype`).
_MOST_F8 = tl.constexpr(448.0)
_MOST_I8 = tl.constexpr(127.0)
# Float32 has no fraction bits from 2^23 on, so adding 1.5 * 2^23 and taking it away rounds to nearest, ties to even.
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def _saturated(x, MOST: tl.constexpr):
    """Return x limited to the range from -MOST to MOST. NaN passes, because comparisons with it are false."""
    return tl.where(x > MOST, MOST, tl.where(x < -MOST, -MOST, x))


# The least scale of a row: the smallest normal float32, so that rows of zeros can be divided by it.
LEAST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """Return x, in float32, as the nearest numbers of the dtype f8e4m3 or i8, in that dtype.

    NaN stays NaN in f8e4m3 and becomes 0 in i8.
    """
    if dtype == tl.int8:
        x = _saturated(x, _MOST_I8)
        whole = (x + _ROUNDING) - _ROUNDING
        return tl.where(x == x, whole, 0.0).to(dtype)
    else:
        return _saturated(x, _MOST_F8).to(dtype)


@triton.jit
def row_scales(x, kv, CACHE: tl.constexpr):
    """Return the scales f32[N] of keys or values x [N, D], or None unless the cache `kv` has scales per token.

    A scale is the largest magnitude divided by the largest number of the cache's dtype. It is NaN if the row has NaN or
    infinity.
    """
    scales = None
    if CACHE.per_token:
        x = x.to(tl.float32)
        most = tl.max(tl.abs(x), 1)
        # The maximum may drop NaN. x - x would find it too, but ptxas fuses the subtraction with a multiplication that
        # x is the result of. The difference is then the rounding error of x, and not 0.
        finite = tl.min((tl.abs(x) < float("inf")).to(tl.int32), 1) != 0
        highest = tl.full(most.shape, _MOST_I8 if kv.dtype.element_ty == tl.int8 else _MOST_F8, tl.float32)
        scales = tl.where(finite, tl.maximum(tl.div_rn(most, highest), LEAST_SCALE), float("nan"))
    return scales


@triton.jit
def as_cached(x, kv, scale: tl.constexpr, scales):
    """Return keys or values x [N, D] as the cache `kv` stores them: divided, saturated, and rounded to its dtype.

    They are divided by the rows' `scales` [N], or by `scale` if `scales` is None. NaN stays NaN in f8e4m3 and becomes 0
    in i8. If `x` has the dtype of the cache already, it is returned unchanged.
    """
    dtype: tl.constexpr = kv.dtype.element_ty
    if x.dtype != dtype:
        x = x.to(tl.float32)
        if scales is not None:
            x = tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape))
        elif scale != 1.0:
            x = tl.div_rn(x, tl.full(x.shape, scale, tl.float32))
        x = _rounded(x, dtype)
    return x


@triton.jit
def store_scales(rows, scales, mask, OFFSET: tl.constexpr):
    """Store the scales f32[N] of rows of a cache, unless they are None. `mask` [N] masks rows.

    `rows` [N] point to the keys of the rows. A scale is OFFSET bytes after its key.
    """
    if scales is not None:
        tl.store((rows + OFFSET).to(tl.pointer_type(tl.float32), bitcast=True), scales, mask=mask)


@triton.jit
def key_scales_of(rows, mask, CACHE: tl.constexpr):
    """Load the scales f32[N] of cached keys. Return None unless the cache has scales per token.

    `rows` [N] point to the keys. `mask` [N] masks rows: masked-out ones get 0.
    """
    scales = None
    if CACHE.per_token:
        at = (rows + CACHE.key_scale).to(tl.pointer_type(tl.float32), bitcast=True)
        scales = tl.load(at, mask=mask, other=0.0)
    return scales


@triton.jit
def value_scales_of(rows, mask, CACHE: tl.constexpr):
    """Load the scales f32[N] of cached values, as `key_scales_of` loads those of their keys."""
    scales = None
    if CACHE.per_token:
        at = (rows + CACHE.value_scale).to(tl.pointer_type(tl.float32), bitcast=True)
        scales = tl.load(at, mask=mask, other=0.0)
    return scales


@triton.jit
def as_computed(x, dtype: tl.constexpr, ASSEMBLY: tl.constexpr = False):
    """Return cached keys or values `x` in `dtype`, without rounding.

    Each dtype that is computed in holds all numbers of f8e4m3 and i8. The caller multiplies by the cache's scale.
    ASSEMBLY says whether the target is a GPU that converts f8e4m3.
    """
    if ASSEMBLY and x.dtype == tl.int8 and dtype == tl.float16:
        x = i8_as_f16(x)
    elif x.dtype != dtype:
        x = x.to(dtype)
    return x


# Queries have the largest magnitude 2^14 to 2^15 of f16, so that elements down to 2^-28 of it keep all bits of bf16.
_QUERY_EXPONENT = tl.constexpr(14)
_EXPONENT_BITS = tl.constexpr(0x7F800000)


@triton.jit
def query_scales_of(query, tail, kv):
    """Return the scales f32[M] by which `as_multiplied` divides M queries, or None if they keep their dtype.

    Queries in bf16 are multiplied with an 8-bit cache in f16: a GPU converts f8e4m3 to f16 with one instruction for two
    elements, and to bf16 by way of float32. Scales are powers of two. `query` [M, D] and `tail` [M, E], or None, are
    the columns of the queries.
    """
    scales = None
    if query.dtype == tl.bfloat16 and kv.dtype.element_ty.primitive_bitwidth == 8:
        most = tl.max(tl.abs(query.to(tl.float32)), 1)
        if tail is not None:
            most = tl.maximum(most, tl.max(tl.abs(tail.to(tl.float32)), 1))
        exponent = most.to(tl.int32, bitcast=True) & _EXPONENT_BITS
        exponent = tl.maximum(exponent - (_QUERY_EXPONENT << 23), 1 << 23)
        scales = exponent.to(tl.float32, bitcast=True)
    return scales


@triton.jit
def as_multiplied(query, scales):
    """Return columns [M, D] of queries, divided by their `scales` [M], in f16. If `scales` is None, return `query`."""
    if scales is not None:
        query = tl.div_rn(query.to(tl.float32), tl.broadcast_to(scales[:, None], query.shape)).to(tl.float16)
    return query


@triton.constexpr_function
def values_dtype(given, multiplied, cache):
    """Return the dtype in which values are multiplied with weights, unless they are pairs.

    `given` is the dtype of queries, and `multiplied` their dtype after `as_multiplied`. With scales per token, weights
    are multiplied by the scales of values, whose range f16 does not have.
    """
    return given if cache.per_token else multiplied
