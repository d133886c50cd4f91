"""The matmul kernel for a step of few tokens, on tensor cores: each program multiplies a tile of the weight with x.

The weight is the left operand: that side of a tensor-core instruction has 64 rows or more, and tokens are few. Weights
are read once; each tile of weight rows reads x once from the L2 cache. If the weight has too few row tiles to fill the
device, programs split the K axis (split-K). The last program of a tile to end then adds their sums.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.linear.parts import fetch_ahead, finish


@triton.jit
def linear_tile(
    x,
    weight,
    y,
    bias,
    residual,
    partial,
    arrivals,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    UP: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
    LINES: tl.constexpr,
    BEGIN: tl.constexpr,
    WITHIN: tl.constexpr,
    LOAD: tl.constexpr,
    FETCH: tl.constexpr,
    STORED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute a matmul of up to TOKENS rows, with fused ops: y [rows, N] from x [rows, K] and the weight.

    Grid: cdiv(N, BLOCK_N), SPLITS. Program (i, j) computes BLOCK_N columns of y, from i * BLOCK_N on. It sums over
    SHARE columns of the weight, from j * SHARE on. Rows past the end of x are not stored. The rows of the weight begin
    at FIRST. The fused ops, in order:

    - BIAS: `bias` is added to the sums
    - GATED: y is activation(gate) * up. The weight's rows of gate begin at FIRST, its rows of up at UP
    - ACTIVATION: the function for the gate, or for y without GATED; None if there is none
    - RESIDUAL: `residual` is added

    With several SPLITS along K, `partial` f32[SPLITS, cdiv(N, BLOCK_N), 1 or 2, BLOCK_N, TOKENS] receives the sums of
    each split. `arrivals` counts the programs of each tile that have stored their sums.

    Before it waits for the previous kernel, a program prefetches LINES lines of 128 bytes of each of its weight rows.
    BEGIN, WITHIN, LOAD, FETCH and STORED are the operand loader: functions that read a weight in its packing (storage
    order). See `ingot.backends.triton.operands`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    local = tl.arange(0, BLOCK_N)
    n = tile * BLOCK_N + local
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, TOKENS)
    begin = split * SHARE
    gate_rows = BEGIN(weight, tile.to(tl.int64) * BLOCK_N + FIRST, STORED)
    up_rows = BEGIN(weight, tile.to(tl.int64) * BLOCK_N + UP, STORED)
    if DEPENDENT:
        if LINES > 0:
            fetch_ahead(weight, n, begin, N, K, FIRST, FETCH, STORED, LINES)
            if GATED:
                fetch_ahead(weight, n, begin, N, K, UP, FETCH, STORED, LINES)
        gdc_wait()
    WHOLE_K: tl.constexpr = SPLITS * SHARE == K
    WHOLE: tl.constexpr = WHOLE_K and N % BLOCK_N == 0
    DTYPE: tl.constexpr = x.dtype.element_ty
    within = WITHIN(local, k, STORED)
    x_rows = x + tl.minimum(t, rows - 1)[:, None] * X_STRIDE + k[None, :]
    result = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    up = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    for step in range(0, SHARE, BLOCK_K):
        start = begin + step
        if WHOLE_K:
            tokens = tl.load(x_rows + start)
        else:
            tokens = tl.load(x_rows + start, mask=(start + k < K)[None, :], other=0.0)
        # Weights are read once, so they are evicted first.
        weights = LOAD(gate_rows, within, start, k, n, N, K, STORED, WHOLE, "evict_first", DTYPE)
        result = tl.dot(weights, tl.trans(tokens), result, input_precision="ieee")
        if GATED:
            up_weights = LOAD(up_rows, within, start, k, n, N, K, STORED, WHOLE, "evict_first", DTYPE)
            up = tl.dot(up_weights, tl.trans(tokens), up, input_precision="ieee")
    if SPLITS == 1:
        finish(
            result, up, y, bias, residual, n, t, rows,
            N, RESIDUAL_STRIDE, FIRST, UP, GATED, ACTIVATION, BIAS, RESIDUAL,
        )  # fmt: skip
    else:
        PARTS: tl.constexpr = 2 if GATED else 1
        SUMS: tl.constexpr = BLOCK_N * TOKENS
        own = partial + tile * (PARTS * SUMS) + local[:, None] * TOKENS + t[None, :]
        step_size = tl.num_programs(0) * (PARTS * SUMS)
        tl.store(own + split * step_size, result)
        if GATED:
            tl.store(own + split * step_size + SUMS, up)
        tl.debug_barrier()  # all threads store their sums before one of them counts the arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            result = tl.zeros((BLOCK_N, TOKENS), tl.float32)
            up = tl.zeros((BLOCK_N, TOKENS), tl.float32)
            # In a fixed order, so that bits do not depend on arrival; unrolled, so that all loads are in flight.
            for other in tl.static_range(SPLITS):
                result += tl.load(own + other * step_size, cache_modifier=".cg")
                if GATED:
                    up += tl.load(own + other * step_size + SUMS, cache_modifier=".cg")
            finish(
                result, up, y, bias, residual, n, t, rows,
                N, RESIDUAL_STRIDE, FIRST, UP, GATED, ACTIVATION, BIAS, RESIDUAL,
            )  # fmt: skip
            tl.store(arrivals + tile, 0)
