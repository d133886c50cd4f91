"""What the kernels of linear share: the norm in front, the gate behind, the fetch of weights ahead of time."""

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
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # (1 + tanh(z)) / 2 is sigmoid(2 z); the constants are sqrt(2 / pi) and that of arXiv 1606.08415.
        return gate * tl.sigmoid(2.0 * 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)) * up


@triton.jit
def fetch_ahead(weight, n, start, N: tl.constexpr, K: tl.constexpr, W_STRIDE: tl.constexpr, LINES: tl.constexpr):
    """Ask for LINES of 128 bytes of each of the rows n, from column `start` on, to come into the L2 cache, and wait for
    nothing. `weight` is at row 0; what lies outside of its N rows and K columns is not asked for."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    row = tl.minimum(n, N - 1).to(tl.int64)
    column = tl.minimum(start + tl.arange(0, LINES) * LINE, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [(weight + row[:, None] * W_STRIDE + column[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def weight_block(rows, n, k, start, N: tl.constexpr, K: tl.constexpr, WHOLE: tl.constexpr):
    """A block of the weight at column `start`, for a tile; zeros outside of the matrix unless it is WHOLE there."""
    if WHOLE:
        return tl.load(rows + start, eviction_policy="evict_first")
    inside = (n < N)[:, None] & (start + k < K)[None, :]
    return tl.load(rows + start, mask=inside, other=0.0, eviction_policy="evict_first")


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
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Store y[t, n] of a tile [n, t] from the products: bias, gate, residual."""
    inside = (n < N)[:, None] & (t < rows)[None, :]
    if BIAS:
        result += tl.load(bias + FIRST + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        if BIAS:
            up += tl.load(bias + UP + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        result = gated(result, up, ACTIVATION)
    if RESIDUAL:
        at = residual + t[None, :] * RESIDUAL_STRIDE + n[:, None]
        result += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + t[None, :] * N + n[:, None], result.to(y.dtype.element_ty), mask=inside)
