"""The experts of few tokens with quantized weights, without tensor cores: each choice multiplies rows of its expert.

As in `matvec.py`, the kernel of down loads its first weights before gate and up have ended. Elements take few
instructions, and a program prepares the row of x itself, as in `quant_matvec`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.experts.parts import joined
from ingot.backends.triton.kernels.quant.elements import outer_scales, scale_value
from ingot.backends.triton.kernels.quant.matvec import (
    block_added,
    row_block,
    scales_of_rows,
    totals,
)
from ingot.backends.triton.kernels.quant.row import of_row, prepared


@triton.jit
def quant_experts_up_rows(
    x,
    chosen,
    weight,
    scales,
    zeros,
    outer,
    bias,
    hidden,
    TOP_K: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    SIZES: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ROUNDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the joined gate and up of each choice: `hidden` [rows * TOP_K, F] from x [rows, K].

    Grid: cdiv(F, ROWS), rows * TOP_K. A program computes ROWS columns: it multiplies a row of the gate and one of up by
    turns, and HELD of them are in registers before they are needed. `weight`, `scales`, `zeros` and `outer` store a
    matrix [2 * F, K] for each expert; SIZES says how many elements an expert has of each. Those that the format lacks
    are not read. The other parameters are described in `experts_up_rows` and `quant_matvec`.
    """
    PER_WORD: tl.constexpr = 8 if ELEMENTS.chunk > 0 else 4
    CHUNKS: tl.constexpr = BLOCK_K // (4 * PER_WORD)
    PARTS: tl.constexpr = 2 * ROWS
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    X_BITS: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
    choice = tl.program_id(1)
    first = tl.program_id(0) * ROWS
    n = first + tl.arange(0, ROWS)
    row = tl.minimum(n, F - 1)
    if DEPENDENT:
        gdc_wait()
        # Not earlier, as in other kernels: the next one reads `chosen` before it waits.
        gdc_launch_dependents()
    expert = tl.load(chosen + choice).to(tl.int64)
    words = weight + expert * SIZES.weight
    of_scales, of_zeros = scales + expert * SIZES.scales, zeros + expert * SIZES.scales
    held = ()
    for nth in tl.static_range(HELD):
        ahead = tl.minimum(first + nth % PARTS // 2, F - 1)
        held = held + (
            row_block(
                words, of_scales, of_zeros, ahead, nth // PARTS * BLOCK_K, F if nth % 2 == 1 else 0,
                K, CHUNKS, PER_WORD, ELEMENTS,
            ),
        )  # fmt: skip
    of_outer = outer + expert * SIZES.outer
    own_bias = bias if bias is None else bias + expert * (2 * F)
    gate_scale, gate_bias = scales_of_rows(of_scales, of_outer, own_bias, row, bias is not None, ELEMENTS)
    up_scale, up_bias = scales_of_rows(of_scales, of_outer, own_bias, row + F, bias is not None, ELEMENTS)
    source = x + (choice // TOP_K).to(tl.int64) * X_STRIDE
    inverse, x_scale = of_row(source, None, None, K, 0.0, False, BLOCK_K, ROUNDED)
    sums = (tl.zeros((CHUNKS,), tl.float32),) * PARTS
    for block in range(BLOCKS):
        start = block * BLOCK_K
        ready = prepared(
            source, None, None, inverse, x_scale, start, K, False, CHUNKS, PER_WORD, ELEMENTS, ROUNDED
        )  # fmt: skip
        for part in tl.static_range(PARTS):
            added = block_added(sums[part], held[0], ready, CHUNKS, X_BITS, ELEMENTS, ROUNDED)
            sums = sums[:part] + (added,) + sums[part + 1 :]
            ahead = tl.minimum(first + (part + HELD) % PARTS // 2, F - 1)
            held = held[1:] + (
                row_block(
                    words, of_scales, of_zeros, ahead, start + (part + HELD) // PARTS * BLOCK_K,
                    F if (part + HELD) % 2 == 1 else 0, K, CHUNKS, PER_WORD, ELEMENTS,
                ),
            )  # fmt: skip
    gates, ups = (), ()
    for nth in tl.static_range(ROWS):
        gates = gates + (sums[2 * nth],)
        ups = ups + (sums[2 * nth + 1],)
    if ROUNDED.element == "i8" and ELEMENTS.element != "f8e4m3" and ROUNDED.columns == 0:
        gate_scale, up_scale = gate_scale * x_scale, up_scale * x_scale
    gate, up = totals(gates, ROWS) * gate_scale, totals(ups, ROWS) * up_scale
    if bias is not None:
        gate += gate_bias
        up += up_bias
    value = joined(gate, up, ACTIVATION, LIMIT, ALPHA)
    tl.store(hidden + choice.to(tl.int64) * F + n, value.to(hidden.dtype.element_ty), mask=n < F)


@triton.jit
def quant_experts_down_rows(
    hidden,
    weights,
    chosen,
    weight,
    scales,
    zeros,
    outer,
    bias,
    residual,
    y,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    WEIGH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIZES: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ROUNDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the weighted sum over the choices of each token: y [rows, N] from `hidden` [rows * TOP_K, K].

    Grid: cdiv(N, ROWS), rows. A program goes through the choices of a token in order, in steps of BLOCK_K columns. The
    rows of the next step are loaded while those of a step are multiplied, also from one expert to the next. With WEIGH,
    `weights` f32[rows, TOP_K] multiply the results, else they are 1. `residual` is added as in `experts_down_rows`. The
    other parameters are described in `quant_experts_up_rows`.

    The first rows are loaded before the wait. `chosen` must be complete then, which `quant_experts_up_rows` sees to.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    PER_WORD: tl.constexpr = 8 if ELEMENTS.chunk > 0 else 4
    CHUNKS: tl.constexpr = BLOCK_K // (4 * PER_WORD)
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    X_BITS: tl.constexpr = hidden.dtype.element_ty.primitive_bitwidth
    token = tl.program_id(1)
    first = tl.program_id(0) * ROWS
    n = first + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1)
    experts = chosen + token * TOP_K
    # Not from the L1 cache: another multiprocessor wrote it, and this program has not waited yet. The wait below makes
    # results of previous kernels visible. So the loads of `chosen` in the loop, which follow it, may use the L1 cache.
    expert = tl.load(experts, cache_modifier=".cg").to(tl.int64)
    held = ()
    for nth in tl.static_range(ROWS):
        held = held + (
            row_block(
                weight + expert * SIZES.weight, scales + expert * SIZES.scales, zeros + expert * SIZES.scales,
                tl.minimum(first + nth, N - 1), 0, 0, K, CHUNKS, PER_WORD, ELEMENTS,
            ),
        )  # fmt: skip
    if DEPENDENT:
        gdc_wait()
    if residual is not None:  # loaded before the loop, which hides its latency
        added = tl.load(residual + token.to(tl.int64) * RESIDUAL_STRIDE + row)
    sums = (tl.zeros((CHUNKS,), tl.float32),) * ROWS
    for step in range(TOP_K * BLOCKS):
        nth_choice = step // BLOCKS
        expert = tl.load(experts + nth_choice).to(tl.int64)
        following = tl.minimum(step + 1, TOP_K * BLOCKS - 1)
        next_expert = tl.load(experts + following // BLOCKS).to(tl.int64)
        # Columns past the last one, after the last step, are not loaded.
        start = tl.where(step + 1 == TOP_K * BLOCKS, BLOCKS, following % BLOCKS) * BLOCK_K
        next_words, next_scales = weight + next_expert * SIZES.weight, scales + next_expert * SIZES.scales
        next_zeros = zeros + next_expert * SIZES.scales
        choice = token * TOP_K + nth_choice
        source = hidden + choice.to(tl.int64) * K
        inverse, x_scale = of_row(source, None, None, K, 0.0, False, BLOCK_K, ROUNDED)
        factor = 1.0
        if WEIGH:
            factor *= tl.load(weights + choice)
        if ROUNDED.element == "i8" and ELEMENTS.element != "f8e4m3" and ROUNDED.columns == 0:
            factor *= x_scale
        ready = prepared(
            source, None, None, inverse, x_scale, step % BLOCKS * BLOCK_K, K, False, CHUNKS, PER_WORD, ELEMENTS, ROUNDED
        )  # fmt: skip
        for nth in tl.static_range(ROWS):
            own = tl.minimum(first + nth, N - 1)
            row_factor = factor * _scale_of_row(
                scales + expert * SIZES.scales, outer + expert * SIZES.outer, own, ELEMENTS
            )
            part = block_added(tl.zeros((CHUNKS,), tl.float32), held[0], ready, CHUNKS, X_BITS, ELEMENTS, ROUNDED)
            sums = sums[:nth] + (sums[nth] + part * row_factor,) + sums[nth + 1 :]
            held = held[1:] + (
                row_block(next_words, next_scales, next_zeros, own, start, 0, K, CHUNKS, PER_WORD, ELEMENTS),
            )
    result = totals(sums, ROWS)
    if bias is not None:
        for nth in tl.static_range(TOP_K):
            share = 1.0
            if WEIGH:
                share = tl.load(weights + token * TOP_K + nth)
            result += share * tl.load(bias + tl.load(experts + nth).to(tl.int64) * N + row).to(tl.float32)
    if residual is not None:
        result += added.to(tl.float32)
    tl.store(y + token.to(tl.int64) * N + n, result.to(y.dtype.element_ty), mask=n < N)


@triton.jit
def _scale_of_row(scales, outer, row, ELEMENTS: tl.constexpr):
    """Return the scale that all columns of the row `row` of a weight share, as a float32 number."""
    scale = 1.0
    if ELEMENTS.scale_columns == 0:
        place = row // ELEMENTS.scale_rows * ELEMENTS.scale_stride if ELEMENTS.scale_rows > 0 else 0
        scale = scale_value(tl.load(scales + place), ELEMENTS)
    if ELEMENTS.outer_rows >= 0:
        scale *= outer_scales(outer, row, ELEMENTS)
    return scale
