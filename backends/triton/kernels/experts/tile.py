"""The experts of several tokens, on tensor cores: a program multiplies a tile of an expert's rows with its tokens.

As in `linear_tile`, the weight is the left operand. A program takes a block of choices of one expert
(`experts_groups.py`), so these share the reading of the expert's rows. Which expert that is, the router decides in the
same step, so no weight is fetched before the wait for it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.experts.groups import find_block
from ingot.backends.triton.kernels.experts.parts import joined, weighed


@triton.jit
def place_of(program, blocks, TILES: tl.constexpr, TOGETHER: tl.constexpr):
    """Return the (block of choices, tile of rows) of a program, for a grid of `blocks` * TILES programs.

    TOGETHER successive programs take the same tile number in successive blocks, most often those of one expert.
    """
    first = program // (TOGETHER * TILES) * TOGETHER
    within = program % (TOGETHER * TILES)
    together = tl.minimum(blocks - first, TOGETHER)
    return first + within % together, within // together


@triton.jit
def experts_up_tile(
    x,
    weights,
    order,
    counts,
    gate_up,
    bias,
    hidden,
    blocks,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    WEIGH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVICTION: tl.constexpr,
    BEGIN: tl.constexpr,
    WITHIN: tl.constexpr,
    LOAD: tl.constexpr,
    STORED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the joined gate and up of each choice: `hidden` [choices, F] from x [rows, K].

    Grid: `blocks` * cdiv(F, BLOCK_N). Row i of `hidden` belongs to the choice `order[i]`. `order` and `counts` are
    those of `group_choices`. A block has TOKENS choices. EVICTION is the cache policy of the weight. The other
    parameters are described in `experts_up_rows`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    block, tile = place_of(tl.program_id(0), blocks, (F + BLOCK_N - 1) // BLOCK_N, TOGETHER)
    expert, begin, size = find_block(counts, block, EXPERTS, BLOCK_EXPERTS, TOKENS)
    if size > 0:
        local = tl.arange(0, BLOCK_N)
        n = tile * BLOCK_N + local
        k = tl.arange(0, BLOCK_K)
        t = tl.arange(0, TOKENS)
        held = t < size
        WHOLE_K: tl.constexpr = K % BLOCK_K == 0
        WHOLE: tl.constexpr = WHOLE_K and F % BLOCK_N == 0
        DTYPE: tl.constexpr = x.dtype.element_ty
        expert_row = expert.to(tl.int64) * (2 * F)
        gate_rows = BEGIN(gate_up, expert_row + tile * BLOCK_N, STORED)
        up_rows = BEGIN(gate_up, expert_row + F + tile * BLOCK_N, STORED)
        within = WITHIN(local, k, STORED)
        choice = tl.load(order + begin + t, mask=held, other=0)
        x_rows = x + (choice // TOP_K).to(tl.int64)[:, None] * X_STRIDE + k[None, :]
        if WEIGH:
            weight = tl.load(weights + choice)
        gate = tl.zeros((BLOCK_N, TOKENS), tl.float32)
        up = tl.zeros((BLOCK_N, TOKENS), tl.float32)
        for start in range(0, K, BLOCK_K):
            # Weights first: their addresses are known before those of the tokens, which wait for the order.
            gate_weights = LOAD(gate_rows, within, start, k, n, F, K, STORED, WHOLE, EVICTION, DTYPE)
            up_weights = LOAD(up_rows, within, start, k, n, F, K, STORED, WHOLE, EVICTION, DTYPE)
            if WHOLE_K:
                tokens = tl.load(x_rows + start, mask=held[:, None], other=0.0)
            else:
                tokens = tl.load(x_rows + start, mask=held[:, None] & (start + k < K)[None, :], other=0.0)
            if WEIGH:
                tokens = weighed(tokens, weight[:, None])
            gate = tl.dot(gate_weights, tl.trans(tokens), gate, input_precision="ieee")
            up = tl.dot(up_weights, tl.trans(tokens), up, input_precision="ieee")
        inside = n < F
        if bias is not None:
            gate += tl.load(bias + expert_row + n, mask=inside, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + expert_row + F + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        value = joined(gate, up, ACTIVATION, LIMIT, ALPHA)
        at = hidden + (begin + t).to(tl.int64)[None, :] * F + n[:, None]
        tl.store(at, value.to(hidden.dtype.element_ty), mask=inside[:, None] & held[None, :])


@triton.jit
def experts_down_tile(
    hidden,
    order,
    counts,
    down,
    bias,
    made,
    blocks,
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVICTION: tl.constexpr,
    BEGIN: tl.constexpr,
    WITHIN: tl.constexpr,
    LOAD: tl.constexpr,
    STORED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the result of each choice: `made` [choices, N], in the order of choices, from `hidden` [choices, K].

    Grid: `blocks` * cdiv(N, BLOCK_N). Row i of `hidden` belongs to the choice `order[i]`. `add_choices` adds the
    results of a token. The other parameters are described in `experts_up_tile` and `experts_down_rows`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    block, tile = place_of(tl.program_id(0), blocks, (N + BLOCK_N - 1) // BLOCK_N, TOGETHER)
    expert, begin, size = find_block(counts, block, EXPERTS, BLOCK_EXPERTS, TOKENS)
    if size > 0:
        local = tl.arange(0, BLOCK_N)
        n = tile * BLOCK_N + local
        k = tl.arange(0, BLOCK_K)
        t = tl.arange(0, TOKENS)
        held = t < size
        WHOLE_K: tl.constexpr = K % BLOCK_K == 0
        WHOLE: tl.constexpr = WHOLE_K and N % BLOCK_N == 0
        DTYPE: tl.constexpr = hidden.dtype.element_ty
        expert_row = expert.to(tl.int64) * N
        rows = BEGIN(down, expert_row + tile * BLOCK_N, STORED)
        within = WITHIN(local, k, STORED)
        choice = tl.load(order + begin + t, mask=held, other=0)
        hidden_rows = hidden + (begin + t).to(tl.int64)[:, None] * K + k[None, :]
        result = tl.zeros((BLOCK_N, TOKENS), tl.float32)
        for start in range(0, K, BLOCK_K):
            tile_weights = LOAD(rows, within, start, k, n, N, K, STORED, WHOLE, EVICTION, DTYPE)
            if WHOLE_K:
                tokens = tl.load(hidden_rows + start, mask=held[:, None], other=0.0)
            else:
                tokens = tl.load(hidden_rows + start, mask=held[:, None] & (start + k < K)[None, :], other=0.0)
            result = tl.dot(tile_weights, tl.trans(tokens), result, input_precision="ieee")
        inside = n < N
        if bias is not None:
            result += tl.load(bias + expert_row + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        at = made + choice.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(at, result.to(made.dtype.element_ty), mask=inside[:, None] & held[None, :])
