"""Parts that the matmul kernels share: the norm before, the gate or activation after, and the prefetch of weights."""

import triton
import triton.language as tl


@triton.jit
def scaled(value, inverse, gain, DTYPE: tl.constexpr):
    """Return `value * inverse * gain` in float32: an rms_norm of `value` with `inverse` = 1 / rms and weight `gain`.

    If the weight has the dtype of x (DTYPE), `value * inverse` is first rounded to it. A wider weight has no such
    rounding.
    """
    normed = value * inverse
    if gain.dtype == DTYPE:
        normed = normed.to(DTYPE).to(tl.float32)
    return normed * gain.to(tl.float32)


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return `activation(gate) * up` in float32.

    ACTIVATION is "silu", "gelu", "gelu_tanh", "relu", "relu_squared" or "sigmoid".
    """
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "relu":
        return tl.where(gate < 0.0, 0.0, gate) * up  # NaN stays NaN
    elif ACTIVATION == "relu_squared":
        positive = tl.where(gate < 0.0, 0.0, gate)
        return positive * positive * up
    elif ACTIVATION == "sigmoid":
        return tl.sigmoid(gate) * up
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(z)) / 2 is sigmoid(2 z). The constants are sqrt(2 / pi) and 0.044715 (arXiv 1606.08415).
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
    """Prefetch LINES lines of 128 bytes of the weight's rows FIRST + n into the L2 cache, from column `start` on.

    It does not wait for the data. It prefetches nothing past the N rows and K columns. FETCH and STORED are from the
    operand loader of the weight's packing (`ingot.backends.triton.operands`).
    """
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
    """Finish a tile of a matmul: add the bias, apply the gate or activation, add the residual, and store it in y.

    `result` holds the sums for columns `n` and rows `t` of y. With GATED, `result` is the gate, and `up` the sums to
    multiply with it. Rows past `rows` are not stored. FIRST is the weight's first row for `result`, and UP the first
    for `up`.
    """
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
