"""The matmul kernel for one token and a quantized weight.

As in `linear_matvec`, a program multiplies rows of the weight with a row of x, and its loads of the weight never pause.
Elements take few instructions (`quant_words`). A program prepares x itself, in registers: it norms and rounds x, and
takes as many rows of the weight as make that cheap. Lanes multiply, or tensor cores if weight and x are f8e4m3
(`quant.cores`).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.linear.parts import gated
from ingot.backends.triton.kernels.quant.cores import codes_of_row, diagonal, pair_added
from ingot.backends.triton.kernels.quant.elements import outer_scales, scale_value
from ingot.backends.triton.kernels.quant.row import centered, halves, limbs_for, of_row, prepared
from ingot.backends.triton.kernels.quant.words import bytes_of_fours, dot_bytes, dot_f8e4m3


@triton.jit
def quant_matvec(
    x,
    gain,
    stored,
    order,
    weight,
    scales,
    zeros,
    outer,
    y,
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
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    FETCHED: tl.constexpr,
    CORES: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ROUNDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute a matmul of few rows, with fused ops: y [rows, N] from x [rows, K] and a quantized weight.

    Grid: PROGRAMS, rows. A program computes groups of ROWS columns of y: group `program_id(0)` and each PROGRAMS-th
    after it. For each block of BLOCK_K columns of the weight, it multiplies one row of the weight after the other, of
    gate and up by turns with a gate. It prepares x once if a row is one block, else for each block. HELD rows are in
    registers before they are needed; the first ones are loaded before the previous kernel has ended. So are FETCHED
    more rows, into the L2 cache.

    With CORES, tensor cores multiply two rows at once. A row is then one block, and each thread has chunks of its own.

    ELEMENTS and ROUNDED describe the weight and the rounding of x (`quant_constants`), whose stored scale is `stored`
    f32[1]. `order` i32[K] lists the column of x for each column of the weight, or is None. The other parameters are
    described in `linear_matvec`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    PER_WORD: tl.constexpr = 8 if ELEMENTS.chunk > 0 else 4
    CHUNKS: tl.constexpr = BLOCK_K // (4 * PER_WORD)
    PARTS: tl.constexpr = 2 * ROWS if GATED else ROWS
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    X_BITS: tl.constexpr = x.dtype.element_ty.primitive_bitwidth
    group = tl.program_id(0)
    held = ()
    for nth in tl.static_range(HELD):
        ahead, start = _place_ahead(group, 0, nth, N, K, PARTS, ROWS, PROGRAMS, BLOCK_K)
        held = held + (
            row_block(
                weight, scales, zeros, ahead, start, UP if GATED and nth % 2 == 1 else FIRST,
                K, CHUNKS, PER_WORD, ELEMENTS,
            ),
        )  # fmt: skip
    if DEPENDENT:
        if FETCHED > 0:
            _fetch_rows(weight, group, N, K, FIRST, UP, GATED, PARTS, ROWS, PROGRAMS, BLOCK_K, HELD, FETCHED, PER_WORD)
        if NORM:
            _fetch(gain, K)
        gdc_wait()
    row = tl.program_id(1)
    source = x + row * X_STRIDE
    if CORES:
        tl.static_assert(BLOCKS == 1 and PARTS % 2 == 0 and HELD % 2 == 0)
        ready, x_scale = codes_of_row(source, gain, stored, order, K, EPS, NORM, CHUNKS, ELEMENTS, ROUNDED)
    else:
        inverse, x_scale = of_row(source, gain, stored, K, EPS, NORM, BLOCK_K, ROUNDED)
        if BLOCKS == 1:
            ready = prepared(
                source, gain, order, inverse, x_scale, 0, K, NORM, CHUNKS, PER_WORD, ELEMENTS, ROUNDED
            )  # fmt: skip
    for group in range(tl.program_id(0), (N + ROWS - 1) // ROWS, PROGRAMS):
        # The operands of the end are loaded here, so that nothing waits for memory there.
        n = group * ROWS + tl.arange(0, ROWS)
        inside = n < N
        row_scale, added_bias = scales_of_rows(scales, outer, bias, tl.minimum(n, N - 1) + FIRST, BIAS, ELEMENTS)
        up_scale, up_bias = row_scale, added_bias
        if GATED:
            up_scale, up_bias = scales_of_rows(scales, outer, bias, tl.minimum(n, N - 1) + UP, BIAS, ELEMENTS)
        rest = 0.0
        if RESIDUAL:
            rest = tl.load(residual + row * RESIDUAL_STRIDE + n, mask=inside, other=0.0).to(tl.float32)
        sums = (tl.zeros((CHUNKS,), tl.float32),) * (2 * PARTS if CORES else PARTS)
        for block in range(BLOCKS):
            if BLOCKS > 1:
                ready = prepared(
                    source, gain, order, inverse, x_scale, block * BLOCK_K,
                    K, NORM, CHUNKS, PER_WORD, ELEMENTS, ROUNDED,
                )  # fmt: skip
            previous = held[0]
            for part in tl.static_range(PARTS):
                if CORES:
                    if part % 2 == 1:
                        pair = two_rows_added(
                            (sums[2 * part - 2], sums[2 * part - 1], sums[2 * part], sums[2 * part + 1]),
                            previous, held[0], ready, x_scale, CHUNKS, ELEMENTS, ROUNDED,
                        )  # fmt: skip
                        sums = sums[: 2 * part - 2] + pair + sums[2 * part + 2 :]
                    else:
                        previous = held[0]
                else:
                    added = block_added(sums[part], held[0], ready, CHUNKS, X_BITS, ELEMENTS, ROUNDED)
                    sums = sums[:part] + (added,) + sums[part + 1 :]
                ahead, start = _place_ahead(
                    group, 0 if BLOCKS == 1 else block, part + HELD, N, K, PARTS, ROWS, PROGRAMS, BLOCK_K
                )  # fmt: skip
                held = held[1:] + (
                    row_block(
                        weight, scales, zeros, ahead, start, UP if GATED and (part + HELD) % 2 == 1 else FIRST,
                        K, CHUNKS, PER_WORD, ELEMENTS,
                    ),
                )  # fmt: skip
        if CORES:
            own = ()
            for part in tl.static_range(PARTS):
                own = own + (diagonal(sums[2 * part], sums[2 * part + 1], ELEMENTS.assembly),)
            sums = own
        # Sums of all rows are added between threads at once.
        gates, ups = (), ()
        for nth in tl.static_range(ROWS):
            gates = gates + (sums[2 * nth if GATED else nth],)
            ups = ups + (sums[2 * nth + 1 if GATED else nth],)
        CODES: tl.constexpr = CORES or (ROUNDED.element == "i8" and ELEMENTS.element != "f8e4m3")
        if CODES and ROUNDED.columns == 0:
            row_scale, up_scale = row_scale * x_scale, up_scale * x_scale
        result = totals(gates, ROWS) * row_scale
        if BIAS:
            result += added_bias
        if GATED:
            up = totals(ups, ROWS) * up_scale
            if BIAS:
                up += up_bias
            result = gated(result, up, ACTIVATION)
        elif ACTIVATION is not None:
            result = gated(result, 1.0, ACTIVATION)
        if RESIDUAL:
            result += rest
        tl.store(y + row * N + n, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _place_ahead(
    group,
    block,
    NTH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return what a program multiplies NTH rows after the first one of a block of a group: (row, first column).

    A block has PARTS rows: those of gate and up by turns with a gate. They are followed by those of the next block, and
    the last block by the first one of the program's next group. The column is not less than K if there is nothing.
    """
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    ahead = block + NTH // PARTS
    first = (group + ahead // BLOCKS * PROGRAMS) * ROWS
    start = tl.where(first < N, ahead % BLOCKS, BLOCKS) * BLOCK_K
    return tl.minimum(first + NTH % PARTS // (PARTS // ROWS), N - 1), start


@triton.jit
def totals(parts, COUNT: tl.constexpr):
    """Return the sums of COUNT tensors of one axis, a power of two, in their order."""
    LEVELS: tl.constexpr = COUNT.bit_length() - 1
    for level in tl.static_range(LEVELS):
        pairs = ()
        for nth in tl.static_range(COUNT >> (level + 1)):
            pairs = pairs + (tl.join(parts[nth], parts[nth + (COUNT >> (level + 1))]),)
        parts = pairs
    found = tl.sum(parts[0], 0)
    return tl.reshape(found, (COUNT,)) if COUNT > 1 else found + tl.zeros((1,), tl.float32)


@triton.jit
def row_block(
    weight,
    scales,
    zeros,
    row,
    start,
    BEGIN: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    PER_WORD: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Load a block of row BEGIN + `row` of the weight, from column `start` on: (words, scales, zero points).

    Words are i32 [4 * CHUNKS]. The others are [CHUNKS], or [2 * CHUNKS] if each half of a chunk has its own, or 0.
    Columns from K on are not loaded, and zeros. `row` is not known at compile time, so that Triton translates this
    function once, and not for each row of a program.
    """
    WORDS: tl.constexpr = K // PER_WORD
    at = row.to(tl.int64) + BEGIN
    word = start // PER_WORD + tl.arange(0, 4 * CHUNKS)
    words = tl.load(
        weight.to(tl.pointer_type(tl.int32)) + at * WORDS + word,
        mask=word < WORDS,
        other=0,
        eviction_policy="evict_first",
    )
    if ELEMENTS.scale_columns == 0:
        return words, 0, 0
    else:
        place = at // ELEMENTS.scale_rows * ELEMENTS.scale_stride if ELEMENTS.scale_rows > 0 else at * 0
        HALVES: tl.constexpr = halves(ELEMENTS.scale_columns, PER_WORD)
        column = tl.minimum(start + tl.arange(0, CHUNKS * HALVES) * (4 * PER_WORD // HALVES), K - 1)
        column = column // ELEMENTS.scale_columns
        if ELEMENTS.zeros:
            return words, tl.load(scales + place + column), tl.load(zeros + place + column)
        else:
            return words, tl.load(scales + place + column), 0


@triton.jit
def block_added(
    sums,
    stored,
    ready,
    CHUNKS: tl.constexpr,
    X_BITS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Return `sums` [CHUNKS] plus x times a row's chunks (`row_block`); x has X_BITS bits and is `prepared`."""
    HALVES: tl.constexpr = halves(ELEMENTS.scale_columns, 8 if ELEMENTS.chunk > 0 else 4)
    numbers, x_sums, factor = ready
    even, odd = tl.split(tl.reshape(stored[0], (CHUNKS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    words = (first, second, third, fourth)
    if ELEMENTS.element == "f8e4m3":
        part = tl.zeros((CHUNKS,), tl.float32)
        for word in tl.static_range(4):
            part = dot_f8e4m3(
                words[word], numbers[4 * word], numbers[4 * word + 1], numbers[4 * word + 2], numbers[4 * word + 3],
                part, ELEMENTS.assembly,
            )  # fmt: skip
    else:
        LIMBS: tl.constexpr = limbs_for(X_BITS, ROUNDED.element == "none", ROUNDED.element == "i8")
        if HALVES == 2:
            scale, last_scale = tl.split(tl.reshape(scale_value(stored[1], ELEMENTS), (CHUNKS, 2)))
            zero, last_zero = 0, 0
            if ELEMENTS.zeros:
                zero, last_zero = tl.split(tl.reshape(stored[2], (CHUNKS, 2)))
            part = _integers(words, numbers, x_sums, zero, 0, 2, CHUNKS, ELEMENTS, LIMBS) * scale
            part += _integers(words, numbers, x_sums, last_zero, 2, 2, CHUNKS, ELEMENTS, LIMBS) * last_scale
        else:
            part = _integers(words, numbers, x_sums, stored[2], 0, 4, CHUNKS, ELEMENTS, LIMBS)
        part *= factor
    if ELEMENTS.scale_columns > 0 and HALVES == 1:
        part *= scale_value(stored[1], ELEMENTS)
    return sums + part


@triton.jit
def two_rows_added(
    sums, left, right, codes, x_scale, CHUNKS: tl.constexpr, ELEMENTS: tl.constexpr, ROUNDED: tl.constexpr
):
    """Return the four tensors `sums` [CHUNKS] plus the codes of x times the chunks of two rows (`row_block`).

    See `pair_added`. The four chunks that a warp adds up have one scale.
    """
    if ELEMENTS.scale_columns == 0 and ROUNDED.columns == 0:
        return pair_added(sums, left[0], right[0], codes, ELEMENTS.assembly)
    else:
        nothing = (tl.zeros((CHUNKS,), tl.float32),) * 4
        found = pair_added(nothing, left[0], right[0], codes, ELEMENTS.assembly)
        factor, other = tl.full((CHUNKS,), 1.0, tl.float32), tl.full((CHUNKS,), 1.0, tl.float32)
        if ELEMENTS.scale_columns > 0:
            factor *= scale_value(left[1], ELEMENTS)
            other *= scale_value(right[1], ELEMENTS)
        if ROUNDED.columns > 0:
            factor *= x_scale
            other *= x_scale
        return (
            sums[0] + found[0] * factor,
            sums[1] + found[1] * factor,
            sums[2] + found[2] * other,
            sums[3] + found[3] * other,
        )


@triton.jit
def _integers(
    words,
    numbers,
    x_sums,
    zero,
    BEGIN: tl.constexpr,
    COUNT: tl.constexpr,
    CHUNKS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    LIMBS: tl.constexpr,
):
    """Return the sums of integers times integers over COUNT words of each chunk, from word BEGIN on: f32 [CHUNKS].

    See `block_added`. `zero` are the zero points of these words.
    """
    CENTERED: tl.constexpr = centered(ELEMENTS.chunk, ELEMENTS.offset, ELEMENTS.zeros)
    SIGNED: tl.constexpr = CENTERED or ELEMENTS.element == "i8"
    found = ()
    for limb in tl.static_range(LIMBS):
        part = tl.zeros((CHUNKS,), tl.int32)
        if ELEMENTS.zeros:
            part -= zero.to(tl.int32) * x_sums[BEGIN // 2 * LIMBS + limb]
        elif ELEMENTS.element == "f4e2m1":
            part -= 12 * x_sums[BEGIN // 2 * LIMBS + limb]
        elif ELEMENTS.offset > 0 and not CENTERED:
            part -= ELEMENTS.offset * x_sums[BEGIN // 2 * LIMBS + limb]
        for word in tl.static_range(BEGIN, BEGIN + COUNT):
            if ELEMENTS.chunk > 0:
                left, right = bytes_of_fours(words[word], ELEMENTS.element == "f4e2m1", CENTERED, ELEMENTS.assembly)
                part = dot_bytes(
                    left, numbers[2 * word * LIMBS + limb], part, SIGNED, LIMBS != 2 or limb == 1, ELEMENTS.assembly
                )  # fmt: skip
                part = dot_bytes(
                    right, numbers[(2 * word + 1) * LIMBS + limb], part, SIGNED, LIMBS != 2 or limb == 1,
                    ELEMENTS.assembly,
                )  # fmt: skip
            else:
                part = dot_bytes(
                    words[word], numbers[word * LIMBS + limb], part, SIGNED, LIMBS != 2 or limb == 1, ELEMENTS.assembly
                )  # fmt: skip
        found = found + (part,)
    if LIMBS == 1:
        return found[0].to(tl.float32)
    elif LIMBS == 2:
        return (found[1] * 256 + found[0]).to(tl.float32)
    else:
        # The lower two limbs have sums of less than 2**27.
        return found[2].to(tl.float32) * 65536.0 + (found[1] * 256 + found[0]).to(tl.float32)


@triton.jit
def scales_of_rows(scales, outer, bias, rows, BIAS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return the scales that all columns of the rows `rows` of the weight share, and their bias or 0, as float32."""
    scale = tl.full(rows.shape, 1.0, tl.float32)
    if ELEMENTS.scale_columns == 0:
        place = rows // ELEMENTS.scale_rows * ELEMENTS.scale_stride if ELEMENTS.scale_rows > 0 else rows * 0
        scale *= scale_value(tl.load(scales + place), ELEMENTS)
    if ELEMENTS.outer_rows >= 0:
        scale *= outer_scales(outer, rows, ELEMENTS)
    if BIAS:
        return scale, tl.load(bias + rows).to(tl.float32)
    else:
        return scale, 0.0


@triton.jit
def _fetch_rows(
    weight,
    group,
    N: tl.constexpr,
    K: tl.constexpr,
    FIRST: tl.constexpr,
    UP: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    FETCHED: tl.constexpr,
    PER_WORD: tl.constexpr,
):
    """Prefetch the FETCHED blocks of rows after the first HELD ones of a program into the L2 cache.

    FETCHED is a power of two. It does not wait for the data. It prefetches nothing past the program's last row.
    """
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    LINE: tl.constexpr = 32 * PER_WORD  # columns in 128 bytes
    LINES: tl.constexpr = _lines(BLOCK_K, LINE)
    each = tl.arange(0, FETCHED * LINES)
    nth = HELD + each // LINES
    ahead = nth // PARTS
    first = (group + ahead // BLOCKS * PROGRAMS) * ROWS
    row = first + nth % PARTS // (PARTS // ROWS)
    column = ahead % BLOCKS * BLOCK_K + each % LINES * LINE
    inside = (row < N) & (column < K)
    if GATED:
        row += tl.where(nth % 2 == 1, UP, FIRST)
    else:
        row += FIRST
    # Without a line of its own, a thread prefetches one that the program has loaded.
    row = tl.where(inside, row, tl.minimum(group * ROWS, N - 1) + FIRST)
    place = row.to(tl.int64) * (K // PER_WORD) + tl.where(inside, column // PER_WORD, 0)
    _prefetch((weight.to(tl.pointer_type(tl.int32)) + place).to(tl.int64))


@triton.jit
def _fetch(vector, SIZE: tl.constexpr):
    """Prefetch a vector of SIZE elements into the L2 cache. It does not wait for the data."""
    LINE: tl.constexpr = 1024 // vector.dtype.element_ty.primitive_bitwidth
    element = tl.minimum(tl.arange(0, _lines(SIZE, LINE)) * LINE, SIZE - 1)
    _prefetch((vector + element).to(tl.int64))


@triton.jit
def _prefetch(address):
    """Prefetch the lines of the addresses `address` (i64) into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [address],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.constexpr_function
def _lines(size, line):
    """Return the lines of `line` elements that hold `size` elements, rounded up to a power of two."""
    return 1 << (-(-size // line) - 1).bit_length()
