"""The experts of several tokens with quantized weights, on tensor cores.

Programs take blocks of choices of one expert, as in `experts_tile`, and multiply them as `quant_tile` does: elements
are converted exactly, and scales multiply sums. `prepare_rows` rounds and reorders x before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.experts.groups import find_block
from ingot.backends.triton.kernels.experts.parts import joined
from ingot.backends.triton.kernels.experts.tile import place_of
from ingot.backends.triton.kernels.quant.columns import place_in_row, row_size
from ingot.backends.triton.kernels.quant.tile import of_split, scaled_sums


@triton.jit
def quant_experts_up_tile(
    x,
    x_scales,
    order,
    counts,
    weight,
    scales,
    zeros,
    outer,
    bias,
    hidden,
    rows,
    blocks,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    SHARE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZES: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the joined gate and up of each choice: `hidden` [choices, F] from x [rows, K].

    Grid: `blocks` * cdiv(F, BLOCK_N). `weight`, `scales`, `zeros` and `outer` store a matrix [2 * F, K] for each
    expert; SIZES says how many elements an expert has of each. Those that the format lacks are not read. `x_scales` are
    f32 [groups, rows], if x is rounded. With CHUNK, the columns of `hidden` are written in the order in which a matmul
    with four-bit elements reads them (`prepare_rows`).

    The other parameters are described in `experts_up_tile` and `quant_tile`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    block, tile = place_of(tl.program_id(0), blocks, (F + BLOCK_N - 1) // BLOCK_N, TOGETHER)
    found, begin, size = find_block(counts, block, EXPERTS, BLOCK_EXPERTS, TOKENS)
    if size > 0:
        expert = found.to(tl.int64)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        t = tl.arange(0, TOKENS)
        # Rows and choices past the last one repeat it and are not stored.
        row = tl.minimum(n, F - 1) if F % BLOCK_N != 0 else n
        choice = tl.load(order + begin + tl.minimum(t, size - 1))
        token = (choice // TOP_K).to(tl.int64)
        of_tokens = x_scales + token if ELEMENTS.x_scales == "token" else x_scales
        words = weight + expert * SIZES.weight
        if ELEMENTS.chunk > 0:
            words = weight.to(tl.pointer_type(tl.int16)) + expert * (SIZES.weight // 2)
        gate_rows = words + tile.to(tl.int64) * (BLOCK_N * ELEMENTS.words)
        own_scales, own_outer = scales + expert * SIZES.scales, outer + expert * SIZES.outer
        gate, up = of_split(
            x, of_tokens, rows, own_scales, zeros + expert * SIZES.scales, gate_rows, gate_rows + F * ELEMENTS.words,
            token, row, row - tile * BLOCK_N, 0,
            K, X_STRIDE, 0, F, True, TOKENS, BLOCK_N, BLOCK_K, 1, SHARE, COLUMNS, ELEMENTS, DTYPE,
        )  # fmt: skip
        gate = scaled_sums(gate, of_tokens, own_scales, own_outer, row, ELEMENTS)
        up = scaled_sums(up, of_tokens, own_scales, own_outer, row + F, ELEMENTS)
        if bias is not None:
            own_bias = bias + expert * (2 * F) + row
            gate += tl.load(own_bias).to(tl.float32)[:, None]
            up += tl.load(own_bias + F).to(tl.float32)[:, None]
        value = joined(gate, up, ACTIVATION, LIMIT, ALPHA)
        place = place_in_row(n, CHUNK)
        at = hidden + (begin + t).to(tl.int64)[None, :] * row_size(F, CHUNK) + place[:, None]
        tl.store(at, value.to(hidden.dtype.element_ty), mask=(n < F)[:, None] & (t < size)[None, :])


@triton.jit
def quant_experts_down_tile(
    hidden,
    x_scales,
    order,
    counts,
    weight,
    scales,
    zeros,
    outer,
    bias,
    made,
    choices,
    blocks,
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    SHARE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZES: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the result of each choice: `made` [choices, N], in the order of choices, from `hidden` [choices, K].

    Grid: `blocks` * cdiv(N, BLOCK_N). Row i of `hidden` belongs to the choice `order[i]`, and `x_scales` are f32
    [groups, choices], if `hidden` is rounded. The other parameters are described in `quant_experts_up_tile`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    block, tile = place_of(tl.program_id(0), blocks, (N + BLOCK_N - 1) // BLOCK_N, TOGETHER)
    found, begin, size = find_block(counts, block, EXPERTS, BLOCK_EXPERTS, TOKENS)
    if size > 0:
        expert = found.to(tl.int64)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        t = tl.arange(0, TOKENS)
        row = tl.minimum(n, N - 1) if N % BLOCK_N != 0 else n
        place = begin + tl.minimum(t, size - 1)
        choice = tl.load(order + place)
        token = place.to(tl.int64)
        of_tokens = x_scales + token if ELEMENTS.x_scales == "token" else x_scales
        words = weight + expert * SIZES.weight
        if ELEMENTS.chunk > 0:
            words = weight.to(tl.pointer_type(tl.int16)) + expert * (SIZES.weight // 2)
        base = words + tile.to(tl.int64) * (BLOCK_N * ELEMENTS.words)
        own_scales = scales + expert * SIZES.scales
        result, _ = of_split(
            hidden, of_tokens, choices, own_scales, zeros + expert * SIZES.scales, base, base,
            token, row, row - tile * BLOCK_N, 0,
            K, K, 0, 0, False, TOKENS, BLOCK_N, BLOCK_K, 1, SHARE, COLUMNS, ELEMENTS, DTYPE,
        )  # fmt: skip
        result = scaled_sums(result, of_tokens, own_scales, outer + expert * SIZES.outer, row, ELEMENTS)
        if bias is not None:
            result += tl.load(bias + expert * N + row).to(tl.float32)[:, None]
        at = made + choice.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(at, result.to(made.dtype.element_ty), mask=(n < N)[:, None] & (t < size)[None, :])
