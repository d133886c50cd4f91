"""What the kernels of linear share: the norm in front, the gate or the activation after it, the fetch of weights ahead
of time."""

import triton
import triton.language as tl


@triton.jit
def scaled(value, inverse, gain, DTYPE: tl.constexpr):
    """rms_norm's quotient times its weight in float32: the quotient is rounded to DTYPE, x's, where the weight is of
    that dtype too, and not rounded where the weight is wider."""
    normed = value * inverse
    if gain.dtype == DTYPE:
        normed = normed.to(DTYPE).to(tl.float32)
    return normed * gain.to(tl.float32)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """`activation(gate) * up` in float32."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "relu":
        return tl.where(gate < 0.0, 0.0, gate) * up  # NaN stays NaN
    elif ACTIVATION == "relu_squared":
        positive = tl.where(gate < 0.0, 0.0, gate)
        return positive * positive * up
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(z)) / 2 is sigmoid(2 z); the constants are sqrt(2 / pi) and that of arXiv 1606.08415.
        return gate * tl.sigmoid(2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)) * up


@triton.jit
def fetch_ahead(
    weight,
    n,
    start,
    N: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    FETCH: tl.constexpr,
    STORED: tl.constexpr,
    LINES: tl.constexpr,
):
    """Ask for LINES of 128 bytes of each of the results' rows n, which lie from row FIRST of the weight on, to come
    into the L2 cache, from column `start` on, and wait for nothing. What is behind its N rows and K columns is not
    asked for."""
    FETCH(weight, tl.minimum(n, N - 1).to(tl.int64) + FIRST, start, K, STORED, LINES)


@triton.jit
def finish(
    result,
    up,
    y,
    bias,
    residual,
    n,
    t,
    rows,
    N: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    UP: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Store y[t, n] of a tile [n, t] from the products: bias, gate or activation, residual."""
    inside = (n < N)[:, None] & (t < rows)[None, :]
    if BIAS:
        result += tl.load(bias + FIRST + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            up += tl.load(bias + UP + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        result = gated(result, up, ACTIVATION)
    elif ACTIVATION is not None:
        result = gated(result, 1.0, ACTIVATION)
    if RESIDUAL:
        at = residual + t[None, :] * RESIDUAL_STRIDE + n[:, None]
        result += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + t[None, :] * N + n[:, None], result.to(y.dtype.element_ty), mask=inside)
