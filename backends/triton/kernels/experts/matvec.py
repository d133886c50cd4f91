"""The experts of few tokens, without tensor cores: each choice of a token multiplies rows of its expert with one row.

Few tokens seldom choose the same expert, so each choice reads its own rows. Which rows they are is known only after the
router. The kernel of gate and up loads its first weights after it has waited for the router; many programs on a
multiprocessor hide these loads. It lets its dependent launch begin only then. So the kernel of down knows the experts
when it begins, and loads its first weights before gate and up have ended.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.experts.parts import joined, weighed
from ingot.backends.triton.kernels.linear.matvec import chunk, partial_sums

# Steps whose weights are in flight in `experts_down_rows`. For one token and the experts of Qwen3-30B-A3B on an H200,
# three to eight are as fast as two, and one is slower.
_AHEAD = tl.constexpr(2)


@triton.jit
def experts_up_rows(
    x,
    weights,
    chosen,
    gate_up,
    bias,
    hidden,
    TOP_K: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    WEIGH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BEGIN: tl.constexpr,
    WITHIN: tl.constexpr,
    LOAD: tl.constexpr,
    STORED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the joined gate and up of each choice: `hidden` [rows * TOP_K, F] from x [rows, K].

    Grid: cdiv(F, BLOCK_N), rows * TOP_K. `chosen` i32[rows, TOP_K] are the experts. Rows e * 2 * F and on of `gate_up`
    are the gate of expert e, and the F rows after these its up. `bias` [experts, 2 * F] may be None. With WEIGH, the
    choice's weight multiplies x. BEGIN, WITHIN, LOAD and STORED are the operand loader of the weight's packing
    (`ingot.backends.triton.operands`).
    """
    choice = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    local = tl.arange(0, BLOCK_N)
    n = first + local
    k = tl.arange(0, BLOCK_K)
    WHOLE: tl.constexpr = F % BLOCK_N == 0 and K % BLOCK_K == 0
    DTYPE: tl.constexpr = x.dtype.element_ty
    within = WITHIN(local, k, STORED)
    if DEPENDENT:
        gdc_wait()
        # Not earlier, as in other kernels: the next one reads `chosen` before it waits.
        gdc_launch_dependents()
    expert_row = tl.load(chosen + choice).to(tl.int64) * (2 * F)
    # Weights are read once, so they are evicted first.
    rows, up_rows = BEGIN(gate_up, expert_row + first, STORED), BEGIN(gate_up, expert_row + F + first, STORED)
    tile = LOAD(rows, within, 0, k, n, F, K, STORED, WHOLE, "evict_first", DTYPE)
    up_tile = LOAD(up_rows, within, 0, k, n, F, K, STORED, WHOLE, "evict_first", DTYPE)
    source = x + (choice // TOP_K).to(tl.int64) * X_STRIDE
    if WEIGH:
        weight = tl.load(weights + choice)
    sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    up_sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        gate_weights, up_weights = tile, up_tile
        if start + BLOCK_K < K:
            tile = LOAD(rows, within, start + BLOCK_K, k, n, F, K, STORED, WHOLE, "evict_first", DTYPE)
            up_tile = LOAD(up_rows, within, start + BLOCK_K, k, n, F, K, STORED, WHOLE, "evict_first", DTYPE)
        value = chunk(source, k, start, K, BLOCK_K)
        if WEIGH:
            value = weighed(value, weight)
        value = value.to(tl.float32)
        sums += partial_sums(gate_weights.to(tl.float32) * value[None, :], BLOCK_N, BLOCK_K)
        up_sums += partial_sums(up_weights.to(tl.float32) * value[None, :], BLOCK_N, BLOCK_K)
    gate, up = tl.sum(sums, 1), tl.sum(up_sums, 1)
    inside = n < F
    if bias is not None:
        gate += tl.load(bias + expert_row + n, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + expert_row + F + n, mask=inside, other=0.0).to(tl.float32)
    value = joined(gate, up, ACTIVATION, LIMIT, ALPHA)
    tl.store(hidden + choice.to(tl.int64) * F + n, value.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def experts_down_rows(
    hidden,
    weights,
    chosen,
    down,
    bias,
    residual,
    y,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    WEIGH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BEGIN: tl.constexpr,
    WITHIN: tl.constexpr,
    LOAD: tl.constexpr,
    STORED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the weighted sum over the choices of each token: y [rows, N] from `hidden` [rows * TOP_K, K].

    Grid: cdiv(N, BLOCK_N), rows. A program goes through all choices of a token in order and adds in registers, so the
    order of the sum is fixed and nothing is stored in between. Rows e * N and on of `down` are those of expert e.
    `bias` [experts, N] may be None. With WEIGH, `weights` f32[rows, TOP_K] multiply the results, else they are 1. The
    loader's functions are described in `experts_up_rows`.

    `residual` [rows, N] is added to the float32 sum, which is rounded once, as in `linear_matvec`. It may be None. Its
    rows are RESIDUAL_STRIDE elements apart.

    A step is a block of columns of one choice. The weights of the first steps are loaded before the wait. `chosen` must
    be complete then, which `experts_up_rows` sees to.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    token = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    local = tl.arange(0, BLOCK_N)
    n = first + local
    k = tl.arange(0, BLOCK_K)
    WHOLE: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    DTYPE: tl.constexpr = hidden.dtype.element_ty
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TOTAL: tl.constexpr = TOP_K * STEPS
    within = WITHIN(local, k, STORED)
    inside = n < N
    experts = ()
    for nth in tl.static_range(TOP_K):
        # Not from the L1 cache: another multiprocessor wrote them, and this kernel has not waited for it.
        experts = experts + (tl.load(chosen + token * TOP_K + nth, cache_modifier=".cg").to(tl.int64),)
    tiles = ()
    for step in tl.static_range(min(_AHEAD, TOTAL)):
        rows = BEGIN(down, experts[step // STEPS] * N + first, STORED)
        tile = LOAD(rows, within, step % STEPS * BLOCK_K, k, n, N, K, STORED, WHOLE, "evict_first", DTYPE)
        tiles = tiles + (tile,)
    if DEPENDENT:
        gdc_wait()
    if residual is not None:  # loaded before the loop, which hides its latency
        added = tl.load(residual + token.to(tl.int64) * RESIDUAL_STRIDE + n, mask=inside, other=0.0)
    sums = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.float32)
    weight = 1.0
    for step in tl.static_range(TOTAL):
        tile_weights = tiles[0]
        tiles = tiles[1:]
        if step + _AHEAD < TOTAL:
            rows = BEGIN(down, experts[(step + _AHEAD) // STEPS] * N + first, STORED)
            start = (step + _AHEAD) % STEPS * BLOCK_K
            tiles = tiles + (LOAD(rows, within, start, k, n, N, K, STORED, WHOLE, "evict_first", DTYPE),)
        choice = token * TOP_K + step // STEPS
        if WEIGH:
            weight = tl.load(weights + choice)
        value = chunk(hidden + choice.to(tl.int64) * K, k, step % STEPS * BLOCK_K, K, BLOCK_K).to(tl.float32) * weight
        sums += partial_sums(tile_weights.to(tl.float32) * value[None, :], BLOCK_N, BLOCK_K)
    result = tl.sum(sums, 1)
    if bias is not None:
        for nth in tl.static_range(TOP_K):
            if WEIGH:
                weight = tl.load(weights + token * TOP_K + nth)
            result += weight * tl.load(bias + experts[nth] * N + n, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        result += added.to(tl.float32)
    tl.store(y + token.to(tl.int64) * N + n, result.to(y.dtype.element_ty), mask=inside)
