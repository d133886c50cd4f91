"""The rounding of activations by the format of a weight, as `ingot.ir.formats.activations` defines it."""

import triton
import triton.language as tl

# The smallest normal float32: a group of zeros has no scale.
_LEAST = tl.constexpr(2.0**-126)
# 1.5 * 2**23: adding and subtracting it rounds to an integer, ties to even.
_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def magnitude(value, AXIS: tl.constexpr):
    """Return the largest magnitude of `value` along an axis, without NaN."""
    return tl.max(tl.where(value == value, tl.abs(value), 0.0), AXIS)


@triton.jit
def scale_of(most, ROUNDED: tl.constexpr):
    """Return the scales of groups with the largest magnitudes `most`, a tensor."""
    if ROUNDED.bound > 0:
        most = tl.minimum(most, ROUNDED.bound)
    scale = tl.maximum(tl.div_rn(most, tl.zeros_like(most) + ROUNDED.high), _LEAST)
    if ROUNDED.exponent >= 0:
        # The power of two in the largest number, divided by that in `high`. It is a normal number, as `scale` is one.
        bits = ((scale * ROUNDED.high).to(tl.int32, bitcast=True) >> 23) - ROUNDED.exponent
        scale = (bits << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def nearest(value, ROUNDED: tl.constexpr):
    """Return the numbers of the element type that are nearest to `value`, as float32. NaN stays NaN in f8e4m3."""
    value = tl.where(value > ROUNDED.high, ROUNDED.high, tl.where(value < -ROUNDED.high, -ROUNDED.high, value))
    if ROUNDED.element == "f8e4m3":
        return value.to(tl.float8e4nv).to(tl.float32)
    else:
        tl.static_assert(ROUNDED.element == "i8")
        return tl.where(value == value, (value + _WHOLE) - _WHOLE, 0.0)
