"""The matmul kernel for quantized weights, on tensor cores.

It has the form of `linear_tile`: the weight is the left operand, and programs may split the K axis. Elements are
converted exactly to the dtype of x, in registers, and multiplied without their scales. A scale for a block of columns
multiplies the sum over that block, a scale for a row the sum over the row. So a weight takes one or two instructions
more than in bf16. Elements of f4e2m1 are multiplied by the scales of small groups where that is exact. Elements and x
in f8e4m3, or both in i8, are multiplied by tensor cores as they are.

Tensor cores add up f8e4m3 with fewer bits than float32. Each 128 columns are therefore added in float32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.linear.parts import finish
from ingot.backends.triton.kernels.quant.elements import (
    converted,
    factors_of,
    operand_of,
    outer_scales,
    quarter,
    scale_value,
)


@triton.jit
def quant_tile(
    x,
    x_scales,
    weight,
    scales,
    zeros,
    outer,
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
    MANY: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute a matmul with fused ops: y [rows, N] from x [rows, K] and a quantized weight.

    Grid: cdiv(N, BLOCK_N), SPLITS. Without MANY, x has up to TOKENS rows. With MANY it has any number: a program
    computes all splits of TOKENS rows, and the grid is cdiv(N, BLOCK_N), 1, cdiv(rows, TOKENS).

    A block has BLOCK_K columns: one or several parts of COLUMNS columns, each with its own scales. A chunk of four-bit
    elements has COLUMNS columns.

    ELEMENTS describes how the weight is stored, with its `scales`, `zeros` and `outer` scales (`Elements`). `x_scales`
    are those of x, if x is rounded: f32 [groups, TOKENS], with MANY f32 [groups, rows], or a stored f32[1]. DTYPE is
    the dtype to which elements are converted, that of x. Four-bit elements are multiplied with x in the order that
    `prepare_rows` writes.

    The other parameters are described in `linear_tile`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, TOKENS)
    begin = split * SHARE
    # Rows past the last one repeat it and are not stored.
    row = tl.minimum(n, N - 1) if N % BLOCK_N != 0 else n
    words = weight.to(tl.pointer_type(tl.int16)) if ELEMENTS.chunk > 0 else weight
    gate_rows = words + (tile.to(tl.int64) * BLOCK_N + FIRST) * ELEMENTS.words
    up_rows = words + (tile.to(tl.int64) * BLOCK_N + UP) * ELEMENTS.words
    local = row - tile * BLOCK_N
    if DEPENDENT:
        if LINES > 0:
            _fetch(gate_rows, local, begin, ELEMENTS, LINES)
            if GATED:
                _fetch(up_rows, local, begin, ELEMENTS, LINES)
        gdc_wait()
    if MANY:
        t = tl.program_id(2).to(tl.int64) * TOKENS + t
    token = tl.minimum(t, rows - 1)
    # The address of the scales of tokens, and the step to those of the next group. Scales past the last row are
    # arbitrary, as are the sums that they multiply.
    of_tokens = x_scales + (token if MANY else t) if ELEMENTS.x_scales == "token" else x_scales
    of_groups = rows if MANY else TOKENS
    result = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    up = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    if MANY and SPLITS > 1:
        # As programs of other step sizes share the splits, and the last one adds them in this order.
        for nth in range(SPLITS):
            part, up_part = of_split(
                x, of_tokens, of_groups, scales, zeros, gate_rows, up_rows, token, row, local, nth * SHARE,
                K, X_STRIDE, FIRST, UP, GATED, TOKENS, BLOCK_N, BLOCK_K, SPLITS, SHARE, COLUMNS, ELEMENTS, DTYPE,
            )  # fmt: skip
            result += part
            up += up_part
    else:
        result, up = of_split(
            x, of_tokens, of_groups, scales, zeros, gate_rows, up_rows, token, row, local, begin,
            K, X_STRIDE, FIRST, UP, GATED, TOKENS, BLOCK_N, BLOCK_K, SPLITS, SHARE, COLUMNS, ELEMENTS, DTYPE,
        )  # fmt: skip
    if MANY or SPLITS == 1:
        _finish(
            result, up, of_tokens, scales, outer, y, bias, residual, row, n, t, rows,
            N, RESIDUAL_STRIDE, FIRST, UP, GATED, ACTIVATION, BIAS, RESIDUAL, ELEMENTS,
        )  # fmt: skip
    else:
        PARTS: tl.constexpr = 2 if GATED else 1
        SUMS: tl.constexpr = BLOCK_N * TOKENS
        # Sums of a token are adjacent, and those past the last row of x are neither written nor read.
        own = partial + tile * (PARTS * SUMS) + t[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        held = tl.broadcast_to((t < rows)[None, :], (BLOCK_N, TOKENS))
        step_size = tl.num_programs(0) * (PARTS * SUMS)
        tl.store(own + split * step_size, result, mask=held)
        if GATED:
            tl.store(own + split * step_size + SUMS, up, mask=held)
        tl.debug_barrier()  # all threads store their sums before one of them counts the arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            result = tl.zeros((BLOCK_N, TOKENS), tl.float32)
            up = tl.zeros((BLOCK_N, TOKENS), tl.float32)
            # In a fixed order, so that bits do not depend on arrival.
            for other in tl.static_range(SPLITS):
                result += tl.load(own + other * step_size, mask=held, other=0.0, cache_modifier=".cg")
                if GATED:
                    up += tl.load(own + other * step_size + SUMS, mask=held, other=0.0, cache_modifier=".cg")
            _finish(
                result, up, of_tokens, scales, outer, y, bias, residual, row, n, t, rows,
                N, RESIDUAL_STRIDE, FIRST, UP, GATED, ACTIVATION, BIAS, RESIDUAL, ELEMENTS,
            )  # fmt: skip
            tl.store(arrivals + tile, 0)


@triton.jit
def of_split(
    x,
    of_tokens,
    of_groups,
    scales,
    zeros,
    gate_rows,
    up_rows,
    token,
    row,
    local,
    begin,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    UP: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the sums over SHARE columns from `begin` on, [BLOCK_N, TOKENS] each: those of the gate, and of up.

    They include the scales of columns, but not those that all columns share.
    """
    result = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    up = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    WHOLE: tl.constexpr = SPLITS * SHARE == K
    # Scales and zero points are loaded while the columns before theirs are multiplied. Waits for them took 37 % of the
    # time of a matmul with a gate, of one token, in int4_g128 (samples of an H200's program counters).
    # The last split may begin after the last column. It has no terms, but a number after the scales may be NaN.
    first = tl.minimum(begin, K - 1)
    of_x = _x_scales(of_tokens, first, of_groups, TOKENS, ELEMENTS)
    of_gate, gate_zero = _of_columns(scales, zeros, row + FIRST, first, K, BLOCK_N, COLUMNS, ELEMENTS)
    of_up, up_zero = of_gate, gate_zero
    if GATED:
        of_up, up_zero = _of_columns(scales, zeros, row + UP, first, K, BLOCK_N, COLUMNS, ELEMENTS)
    for step in range(0, SHARE, BLOCK_K):
        for nth in tl.static_range(BLOCK_K // COLUMNS):
            start = begin + step + nth * COLUMNS
            following = tl.minimum(start + COLUMNS, K - 1)
            next_x = _x_scales(of_tokens, following, of_groups, TOKENS, ELEMENTS)
            next_gate, next_gate_zero = _of_columns(
                scales, zeros, row + FIRST, following, K, BLOCK_N, COLUMNS, ELEMENTS
            )
            result = _add_block(
                result, x, of_x, gate_rows, of_gate, gate_zero, token, local, start,
                K, X_STRIDE, TOKENS, BLOCK_N, COLUMNS, WHOLE, ELEMENTS, DTYPE,
            )  # fmt: skip
            if GATED:
                next_up, next_up_zero = _of_columns(scales, zeros, row + UP, following, K, BLOCK_N, COLUMNS, ELEMENTS)
                up = _add_block(
                    up, x, of_x, up_rows, of_up, up_zero, token, local, start,
                    K, X_STRIDE, TOKENS, BLOCK_N, COLUMNS, WHOLE, ELEMENTS, DTYPE,
                )  # fmt: skip
                of_up, up_zero = next_up, next_up_zero
            of_x, of_gate, gate_zero = next_x, next_gate, next_gate_zero
    return result, up


@triton.jit
def _finish(
    result,
    up,
    of_tokens,
    scales,
    outer,
    y,
    bias,
    residual,
    row,
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
    ELEMENTS: tl.constexpr,
):
    """Multiply sums of all columns by the scales that these share, and finish the tile (`finish`)."""
    result = scaled_sums(result, of_tokens, scales, outer, row + FIRST, ELEMENTS)
    if GATED:
        up = scaled_sums(up, of_tokens, scales, outer, row + UP, ELEMENTS)
    finish(
        result, up, y, bias, residual, n, t, rows,
        N, RESIDUAL_STRIDE, FIRST, UP, GATED, ACTIVATION, BIAS, RESIDUAL,
    )  # fmt: skip


@triton.jit
def scaled_sums(sums, of_tokens, scales, outer, row, ELEMENTS: tl.constexpr):
    """Return `sums` [BLOCK_N, TOKENS] of all columns, multiplied by the scales that these share.

    `row` [BLOCK_N] are the rows of the weight. `of_tokens` is the address of the scales of x.
    """
    if ELEMENTS.scale_columns == 0:
        sums *= _scales(scales, row, 0, ELEMENTS)[:, None]
    if ELEMENTS.fold > 0:
        sums *= 2.0**ELEMENTS.fold
    if ELEMENTS.outer_rows >= 0:
        sums *= outer_scales(outer, row, ELEMENTS)[:, None]
    if ELEMENTS.x_scales == "tensor":
        sums *= tl.load(of_tokens)
    elif ELEMENTS.x_scales == "token" and ELEMENTS.x_columns == 0:
        sums *= tl.load(of_tokens)[None, :]
    return sums


@triton.jit
def _add_block(
    result,
    x,
    of_x,
    base,
    scale,
    zero,
    token,
    local,
    start,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return `result` [BLOCK_N, TOKENS] plus the sums over COLUMNS columns, from `start` on, with their scales.

    `base` points to the first row of the block in the weight, and `local` are the rows counted from it. `scale` and
    `zero` are `_of_columns` of these rows and columns, and `of_x` [TOKENS] are the scales of x. `token` are the rows of
    x. WHOLE says that no column is past K.
    """
    # Scales of columns, and matmuls of eight bits, whose sums are kept short.
    OF_SUMS: tl.constexpr = ELEMENTS.scale_columns > 0 and ELEMENTS.fold < 0
    APART: tl.constexpr = OF_SUMS or ELEMENTS.x_columns > 0 or x.dtype.element_ty.primitive_bitwidth == 8
    k = tl.arange(0, COLUMNS)
    x_rows = x + token[:, None] * X_STRIDE + start + k[None, :]
    if ELEMENTS.chunk > 0:
        tl.static_assert(ELEMENTS.chunk == COLUMNS)
        part = tl.zeros((BLOCK_N, TOKENS), tl.float32) if APART else result
        QUARTER: tl.constexpr = COLUMNS // 4
        j = tl.arange(0, QUARTER)
        if ELEMENTS.fold >= 0:
            operand = _side_by_side(scale, QUARTER, ELEMENTS, DTYPE)
        else:
            operand = tl.broadcast_to(operand_of(zero, ELEMENTS, DTYPE)[:, None], (BLOCK_N, QUARTER))
        at = base + local[:, None] * ELEMENTS.words + start // 4 + j[None, :]
        if WHOLE:
            words = tl.load(at, eviction_policy="evict_first")
            tokens = tl.load(x_rows)
        else:
            words = tl.load(at, mask=start < K, other=0, eviction_policy="evict_first")
            tokens = tl.load(x_rows, mask=start < K, other=0.0)
        # One matmul of the four quarters. They are brought side by side without moving a register, while each of four
        # matmuls would wait for the tensor cores.
        first = tl.join(quarter(words, operand, 0, ELEMENTS, DTYPE), quarter(words, operand, 2, ELEMENTS, DTYPE))
        second = tl.join(quarter(words, operand, 1, ELEMENTS, DTYPE), quarter(words, operand, 3, ELEMENTS, DTYPE))
        weights = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 3, 1)), (BLOCK_N, COLUMNS))
        part = tl.dot(weights, tl.trans(tokens), part, input_precision="ieee")
    else:
        at = base + local[:, None] * ELEMENTS.words + start + k[None, :]
        if WHOLE:
            stored = tl.load(at, eviction_policy="evict_first")
            tokens = tl.load(x_rows)
        else:
            inside = (start + k < K)[None, :]
            stored = tl.load(at, mask=inside, other=_zero(base.dtype), eviction_policy="evict_first")
            tokens = tl.load(x_rows, mask=inside, other=_zero(x.dtype))
        weights = converted(stored, ELEMENTS, DTYPE)
        if ELEMENTS.zeros:
            weights -= zero.to(DTYPE)[:, None]
        if not APART:
            part = tl.dot(weights, tl.trans(tokens), result, input_precision="ieee")
        elif tl.int8 == DTYPE:
            part = tl.dot(weights, tl.trans(tokens), out_dtype=tl.int32).to(tl.float32)
        else:
            part = tl.dot(weights, tl.trans(tokens), input_precision="ieee", out_dtype=tl.float32)
    if not APART:
        return complete(part, ELEMENTS)
    # Terms past column K are zeros, whatever scale multiplies them.
    if OF_SUMS:
        part *= scale[:, None]
    if ELEMENTS.x_columns > 0:
        part *= of_x[None, :]
    return result + part


@triton.jit
def complete(sums, ELEMENTS: tl.constexpr):
    """Return `sums`, the result of a matmul, when the matmul is complete.

    Without a use of the sums in the loop, Triton 3.6 waits for a matmul one iteration later. Converted weights, which
    tensor cores read from registers, are overwritten before (triton-lang/triton, issue 9433): results were NaN on an
    H200. The assembly is a use without an instruction.
    """
    if ELEMENTS.assembly:
        return tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return sums


@triton.jit
def _of_columns(
    scales, zeros, row, column, K: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, ELEMENTS: tl.constexpr
):
    """Return the scales and zero points of the rows `row` of the weight at column `column`, [BLOCK_N] each.

    A scale is 1 if all columns share it. A zero point is the number that is subtracted if none is stored. Scales that
    are folded into elements are those of COLUMNS columns, as they are stored: a tuple of one [BLOCK_N] for each group.
    """
    scale = tl.full((BLOCK_N,), 1.0, tl.float32)
    if ELEMENTS.fold >= 0:
        scale = ()
        # Each group has a load of its own. Triton lets every thread load the scales of its rows then, while those of
        # one wide load would go through shared memory.
        for nth in tl.static_range(COLUMNS // ELEMENTS.scale_columns):
            place = tl.minimum(column + nth * ELEMENTS.scale_columns, K - 1) // ELEMENTS.scale_columns
            scale = scale + (tl.load(scales + row * ELEMENTS.scale_stride + place),)
    elif ELEMENTS.scale_columns > 0:
        scale = _scales(scales, row, column, ELEMENTS)
    if ELEMENTS.zeros:
        return scale, tl.load(zeros + _block(row, column, ELEMENTS))
    else:
        return scale, tl.full((BLOCK_N,), ELEMENTS.offset, tl.int16)


@triton.jit
def _side_by_side(scales, WORDS: tl.constexpr, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the `factors_of` stored scales of groups, for each of WORDS words of a row: [BLOCK_N, WORDS].

    `scales` is a tuple, [BLOCK_N] for each group of columns. No register is moved.
    """
    GROUPS: tl.constexpr = len(scales)
    rows: tl.constexpr = scales[0].shape[0]
    parts = ()
    for nth in tl.static_range(GROUPS):
        factor = factors_of(scales[nth], ELEMENTS, DTYPE)
        parts = parts + (tl.broadcast_to(factor[:, None], (rows, WORDS // GROUPS)),)
    for level in tl.static_range(GROUPS.bit_length() - 1):
        wider = ()
        for nth in tl.static_range(GROUPS >> (level + 1)):
            pair = tl.permute(tl.join(parts[2 * nth], parts[2 * nth + 1]), (0, 2, 1))
            wider = wider + (tl.reshape(pair, (rows, WORDS // (GROUPS >> (level + 1)))),)
        parts = wider
    return parts[0]


@triton.jit
def _x_scales(of_tokens, column, of_groups, TOKENS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return the scales of x at column `column`, [TOKENS]. `of_tokens` points to those of the first group of columns,
    with `of_groups` from one group to the next. They are 1 if all columns share a scale."""
    if ELEMENTS.x_columns > 0:
        return tl.load(of_tokens + column // ELEMENTS.x_columns * of_groups)
    else:
        return tl.full((TOKENS,), 1.0, tl.float32)


@triton.constexpr_function
def _zero(pointer):
    """Return the zero that masked loads through a pointer of this type take."""
    return 0.0 if pointer.element_ty.is_floating() else 0


@triton.jit
def _block(row, column, ELEMENTS: tl.constexpr):
    """Return the place of the scale of each row `row` of the weight, at column `column`."""
    place = column // ELEMENTS.scale_columns if ELEMENTS.scale_columns > 0 else 0
    if ELEMENTS.scale_rows == 0:
        return row * 0 + place
    return row // ELEMENTS.scale_rows * ELEMENTS.scale_stride + place


@triton.jit
def _scales(scales, row, column, ELEMENTS: tl.constexpr):
    """Return the scale of each row `row` of the weight at column `column`, as float32."""
    return scale_value(tl.load(scales + _block(row, column, ELEMENTS)), ELEMENTS)


@triton.jit
def _fetch(base, local, start, ELEMENTS: tl.constexpr, LINES: tl.constexpr):
    """Prefetch LINES lines of 128 bytes of the rows `local` after `base` into the L2 cache, from column `start` on."""
    LINE: tl.constexpr = 1024 // base.dtype.element_ty.primitive_bitwidth
    first = start // 4 if ELEMENTS.chunk > 0 else start
    word = tl.minimum(first + tl.arange(0, LINES) * LINE, ELEMENTS.words - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [(base + local[:, None] * ELEMENTS.words + word[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
