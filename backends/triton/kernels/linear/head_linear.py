"""The matmul kernels of `head_linear`: each head of x is multiplied with a matrix of its own.

The weight is the left operand: that side of a tensor-core instruction has 64 rows or more on Hopper, and tokens may be
few. A weight may be stored in any order of its axes, since it may be a transposed view.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.linear.operand_plain import fetch_plain


@triton.jit
def head_linear_few(
    x,
    weight,
    y,
    rows,
    H: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    W_HEAD: tl.constexpr,
    W_ROW: tl.constexpr,
    W_COLUMN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute up to TOKENS rows of y [rows, H, N] from x [rows, H, K] and the weight [H, N, K].

    Grid: cdiv(N, BLOCK_N), H. Program (i, h) computes BLOCK_N columns of head h, from i * BLOCK_N on. Weight bytes are
    the floor of such a step, so a program loads all of its weights before it waits for the previous kernel. BLOCK_K is
    at least K. One token (TOKENS = 1) is multiplied without tensor cores.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    head = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    at = weight + head.to(tl.int64) * W_HEAD + n[:, None] * W_ROW + k[None, :] * W_COLUMN
    # Weights are read once, so they are evicted first.
    if N % BLOCK_N == 0 and BLOCK_K == K:
        weights = tl.load(at, eviction_policy="evict_first")
    else:
        inside = (n < N)[:, None] & (k < K)[None, :]
        weights = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    if DEPENDENT:
        gdc_wait()
    if TOKENS == 1:
        token = tl.load(x + head * X_HEAD + k, mask=k < K, other=0.0).to(tl.float32)
        sums = tl.sum(weights.to(tl.float32) * token[None, :], 1)
        tl.store(y + head * N + n, sums.to(y.dtype.element_ty), mask=n < N)
    else:
        t = tl.arange(0, TOKENS)
        # Rows past the last one repeat it and are not stored.
        x_rows = x + tl.minimum(t, rows - 1)[:, None] * X_ROW + head * X_HEAD + k[None, :]
        tokens = tl.load(x_rows, mask=(k < K)[None, :], other=0.0)
        result = tl.dot(weights, tl.trans(tokens), input_precision="ieee")
        to = y + t[None, :] * (H * N) + head * N + n[:, None]
        tl.store(to, result.to(y.dtype.element_ty), mask=(n < N)[:, None] & (t < rows)[None, :])


@triton.jit
def head_linear_blocks(
    x,
    weight,
    y,
    rows,
    H: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    X_HEAD: tl.constexpr,
    W_HEAD: tl.constexpr,
    W_ROW: tl.constexpr,
    W_COLUMN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FETCH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute y [rows, H, N] from x [rows, H, K] and the weight [H, N, K].

    Grid: cdiv(N, BLOCK_N), cdiv(rows, TOKENS), H. A program computes a tile of BLOCK_N columns and TOKENS rows of one
    head. Its sums are one chain of tensor-core instructions along K, so a row has the same bits in tiles of all sizes,
    as long as the instruction is the same. With FETCH, a program prefetches its weights before it waits for the
    previous kernel.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    head = tl.program_id(2)
    first_n, first_row = tl.program_id(0) * BLOCK_N, tl.program_id(1) * TOKENS
    n = first_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    t = tl.arange(0, TOKENS)
    of_head = weight + head.to(tl.int64) * W_HEAD
    if DEPENDENT:
        if FETCH:
            BYTES: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
            # Lines of 128 bytes follow the axis of stride 1.
            if W_ROW == 1:
                columns = tl.arange(0, triton.next_power_of_2(K))
                fetch_plain(of_head, tl.minimum(columns, K - 1), first_n, N, W_COLUMN, (BLOCK_N * BYTES + 127) // 128)
            else:
                LINES: tl.constexpr = triton.next_power_of_2((K * BYTES + 127) // 128)
                fetch_plain(of_head, tl.minimum(n, N - 1), 0, K, W_ROW, LINES)
        gdc_wait()
    WHOLE_K: tl.constexpr = K % BLOCK_K == 0
    w_rows = of_head + n[:, None] * W_ROW
    # Rows past the last one repeat it and are not stored.
    x_rows = x + first_row.to(tl.int64) * X_ROW + head * X_HEAD
    x_rows = x_rows + tl.minimum(t, rows - 1 - first_row)[:, None] * X_ROW + k[None, :]
    result = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = w_rows + (start + k)[None, :] * W_COLUMN
        if WHOLE_K:
            tokens = tl.load(x_rows + start)
        else:
            tokens = tl.load(x_rows + start, mask=(start + k < K)[None, :], other=0.0)
        if WHOLE_K and N % BLOCK_N == 0:
            weights = tl.load(at)
        else:
            weights = tl.load(at, mask=(n < N)[:, None] & (start + k < K)[None, :], other=0.0)
        result = tl.dot(weights, tl.trans(tokens), result, input_precision="ieee")
    to = y + first_row.to(tl.int64) * (H * N) + head * N + t[None, :] * (H * N) + n[:, None]
    tl.store(to, result.to(y.dtype.element_ty), mask=(n < N)[:, None] & (first_row + t < rows)[None, :])
