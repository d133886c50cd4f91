"""The matmul kernel for one token, without tensor cores: each program multiplies rows of the weight with a row of x.

One token reads every weight once and computes little, so speed depends on weight loads that never pause. A program
loads its first tile of weights before it waits for the previous kernel, and each next tile before it uses the current
one.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.linear.parts import fetch_ahead, gated, scaled


@triton.jit
def chunk(pointer, k, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K elements of a vector, from `start` on. The vector is at `pointer` and has K elements.

    Elements past its end are zeros.
    """
    if K % BLOCK_K == 0:
        return tl.load(pointer + start + k)
    return tl.load(pointer + start + k, mask=start + k < K, other=0.0)


@triton.jit
def partial_sums(product, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sum each eight adjacent columns of `product` [BLOCK_N, BLOCK_K]. Return [BLOCK_N, BLOCK_K // 8].

    A thread holds eight adjacent elements (one load is 16 bytes of bf16), so no data moves between threads.
    """
    return tl.sum(tl.reshape(product, (BLOCK_N, BLOCK_K // 8, 8)), 2)


@triton.jit
def linear_matvec(
    x,
    weight,
    y,
    gain,
    bias,
    residual,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    UP: tl.constexpr,
    EPS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    AHEAD: tl.constexpr,
    WAVE: tl.constexpr,
    ROW_LINES: tl.constexpr,
    BEGIN: tl.constexpr,
    WITHIN: tl.constexpr,
    LOAD: tl.constexpr,
    FETCH: tl.constexpr,
    STORED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute a matmul of few rows, with fused ops: y [rows, N] from x [rows, K] and the weight.

    Grid: cdiv(N, BLOCK_N), rows. The rows of the weight begin at FIRST. The fused ops, in order:

    - NORM: x is normed, by an rms_norm with the weight `gain`
    - BIAS: `bias` is added to the sums
    - GATED: y is activation(gate) * up. The weight's rows of gate begin at FIRST, its rows of up at UP
    - ACTIVATION: the function for the gate, or for y without GATED; None if there is none
    - RESIDUAL: `residual` is added

    A program prefetches LINES lines of 128 bytes of each of its weight rows, after the first tile. It does so before it
    waits for the previous kernel. The first WAVE programs start early. They also prefetch the rows of AHEAD later
    programs, ROW_LINES lines per row.

    BEGIN, WITHIN, LOAD, FETCH and STORED are the operand loader: functions that read a weight in its packing (storage
    order). See `ingot.backends.triton.operands`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(1)
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    local = tl.arange(0, BLOCK_N)
    n = tl.program_id(0) * BLOCK_N + local
    k = tl.arange(0, BLOCK_K)
    WHOLE: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    DTYPE: tl.constexpr = x.dtype.element_ty
    # Weights are read once, so they are evicted first.
    within = WITHIN(local, k, STORED)
    rows = BEGIN(weight, first + FIRST, STORED)
    tile = LOAD(rows, within, 0, k, n, N, K, STORED, WHOLE, "evict_first", DTYPE)
    if GATED:
        up_rows = BEGIN(weight, first + UP, STORED)
        up_tile = LOAD(up_rows, within, 0, k, n, N, K, STORED, WHOLE, "evict_first", DTYPE)
    if DEPENDENT:
        if LINES > 0:
            fetch_ahead(weight, n, BLOCK_K, N, K, FIRST, FETCH, STORED, LINES)
            if GATED:
                fetch_ahead(weight, n, BLOCK_K, N, K, UP, FETCH, STORED, LINES)
        if AHEAD > 0 and tl.program_id(0) < WAVE:
            for later in tl.static_range(1, AHEAD + 1):
                later_n = n + later * WAVE * BLOCK_N
                fetch_ahead(weight, later_n, 0, N, K, FIRST, FETCH, STORED, ROW_LINES)
                if GATED:
                    fetch_ahead(weight, later_n, 0, N, K, UP, FETCH, STORED, ROW_LINES)
        gdc_wait()
    source = x + row * X_STRIDE
    inverse = 1.0
    if NORM:
        squares = tl.zeros((BLOCK_K,), tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            value = chunk(source, k, start, K, BLOCK_K).to(tl.float32)
            squares += value * value
        inverse = tl.rsqrt(tl.sum(squares) / K + EPS)
    sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        weights = tile
        if start + BLOCK_K < K:
            tile = LOAD(rows, within, start + BLOCK_K, k, n, N, K, STORED, WHOLE, "evict_first", DTYPE)
        if GATED:
            up_weights = up_tile
            if start + BLOCK_K < K:
                up_tile = LOAD(up_rows, within, start + BLOCK_K, k, n, N, K, STORED, WHOLE, "evict_first", DTYPE)
        value = chunk(source, k, start, K, BLOCK_K).to(tl.float32)
        if NORM:
            value = scaled(value, inverse, chunk(gain, k, start, K, BLOCK_K), x.dtype.element_ty)
        sums += partial_sums(weights.to(tl.float32) * value[None, :], BLOCK_N, BLOCK_K)
        if GATED:
            up_sums += partial_sums(up_weights.to(tl.float32) * value[None, :], BLOCK_N, BLOCK_K)
    result = tl.sum(sums, 1)
    inside = n < N
    if BIAS:
        result += tl.load(bias + FIRST + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(up_sums, 1)
        if BIAS:
            up += tl.load(bias + UP + n, mask=inside, other=0.0).to(tl.float32)
        result = gated(result, up, ACTIVATION)
    elif ACTIVATION is not None:
        result = gated(result, 1.0, ACTIVATION)
    if RESIDUAL:
        result += tl.load(residual + row * RESIDUAL_STRIDE + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + n, result.to(y.dtype.element_ty), mask=inside)
