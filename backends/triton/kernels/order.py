"""Integers with the order of float32 numbers, for kernels that choose the greatest of several."""

import triton
import triton.language as tl

GREATEST = tl.constexpr(0x7FFFFFFF)
# Below the integers of all numbers: `order_of` returns none so low.
LEAST = tl.constexpr(-0x80000000)


@triton.jit
def order_of(value):
    """Return an int32 for each float32 of `value`, in the same order. Both zeros are equal, and NaN is the greatest."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    # The bits of negative floats, read as integers, are in reverse order.
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(value != value, GREATEST, order)
