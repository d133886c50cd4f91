"""The batch-invariant matmul kernel for many tokens: each row has the same bits as from `linear_tile`.

Both kernels sum in the same order. The weight is the left operand. Within a split of the K axis, tensor-core
instructions add one after the other, from the first column on; then the sums of the splits are added in order. The
numbers of rows and columns of a tile only decide which results are computed together.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.linear.parts import finish


@triton.jit
def linear_blocks(
    x,
    weight,
    y,
    bias,
    residual,
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
    TOGETHER: tl.constexpr,
    BEGIN: tl.constexpr,
    WITHIN: tl.constexpr,
    LOAD: tl.constexpr,
    STORED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute a batch-invariant matmul of many rows, with fused ops: y [rows, N] from x [rows, K] and the weight.

    Grid: cdiv(rows, TOKENS) * cdiv(N, BLOCK_N) tiles. TOGETHER successive tiles read the same rows of the weight, so
    these stay in the L2 cache. The other parameters are described in `linear_tile`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    BLOCKS_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first_block = tl.program_id(0) // (TOGETHER * BLOCKS_N) * TOGETHER
    place = tl.program_id(0) % (TOGETHER * BLOCKS_N)
    together = tl.minimum(tl.cdiv(rows, TOKENS) - first_block, TOGETHER)
    first_row = (first_block + place % together) * TOKENS
    tile = place // together
    local = tl.arange(0, BLOCK_N)
    n = tile * BLOCK_N + local
    k = tl.arange(0, BLOCK_K)
    nth = tl.arange(0, TOKENS)
    gate_rows = BEGIN(weight, tile.to(tl.int64) * BLOCK_N + FIRST, STORED)
    up_rows = BEGIN(weight, tile.to(tl.int64) * BLOCK_N + UP, STORED)
    if DEPENDENT:
        gdc_wait()
    WHOLE_K: tl.constexpr = SPLITS * SHARE == K
    WHOLE: tl.constexpr = WHOLE_K and N % BLOCK_N == 0
    DTYPE: tl.constexpr = x.dtype.element_ty
    within = WITHIN(local, k, STORED)
    # Rows past the last one repeat it and are not stored.
    x_rows = x + first_row.to(tl.int64) * X_STRIDE
    x_rows = x_rows + tl.minimum(nth, rows - 1 - first_row)[:, None] * X_STRIDE + k[None, :]
    result = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    up = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    for split in range(SPLITS):
        begin = split * SHARE
        part = tl.zeros((BLOCK_N, TOKENS), tl.float32)
        up_part = tl.zeros((BLOCK_N, TOKENS), tl.float32)
        for step in range(0, SHARE, BLOCK_K):
            start = begin + step
            if WHOLE_K:
                tokens = tl.load(x_rows + start)
            else:
                tokens = tl.load(x_rows + start, mask=(start + k < K)[None, :], other=0.0)
            weights = LOAD(gate_rows, within, start, k, n, N, K, STORED, WHOLE, "", DTYPE)
            part = tl.dot(weights, tl.trans(tokens), part, input_precision="ieee")
            if GATED:
                up_weights = LOAD(up_rows, within, start, k, n, N, K, STORED, WHOLE, "", DTYPE)
                up_part = tl.dot(up_weights, tl.trans(tokens), up_part, input_precision="ieee")
        if SPLITS == 1:
            result, up = part, up_part
        else:
            result += part
            up += up_part
    finish(
        result, up, y, bias, residual, n, (first_row + nth).to(tl.int64), rows,
        N, RESIDUAL_STRIDE, FIRST, UP, GATED, ACTIVATION, BIAS, RESIDUAL,
    )  # fmt: skip
