"""Parts that the kernels of a mixture's experts share: how an expert joins its gate and up, and where its rows are."""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.linear.parts import gated


@triton.jit
def joined(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return the gate and up of experts, joined in float32, as the op `experts` defines it.

    ACTIVATION is "silu", "gelu" or "gelu_tanh", or "clamped" with its constants LIMIT and ALPHA.
    """
    if ACTIVATION == "clamped":
        # Comparisons leave NaN as it is.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        return gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)
    else:
        return gated(gate, up, ACTIVATION)


@triton.jit
def weighed(value, weight):
    """Return `value`, a part of a row of x, times the row's `weight`, in the dtype of x."""
    return (value.to(tl.float32) * weight).to(value.dtype)
