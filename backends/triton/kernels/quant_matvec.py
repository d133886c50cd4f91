"""The matmul kernel for one token and a quantized weight, without tensor cores.

As in `linear_matvec`, a program multiplies rows of the weight with a row of x, and its loads of the weight never pause.
Elements take few instructions (`quant_words`). A program prepares x itself, in registers: it norms and rounds x, and
takes as many rows of the weight as make that cheap.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.linear_parts import gated, scaled
from ingot.backends.triton.kernels.quant_words import (
    bytes_of,
    dot_bytes,
    dot_f8e4m3,
    fixed_point,
    limbs_of,
    signed,
)
from ingot.backends.triton.kernels.rounding import magnitude, nearest, scale_of


@triton.jit
def quant_matvec(
    x,
    gain,
    stored,
    weight,
    scales,
    zeros,
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
    BLOCK_K: tl.constexpr,
    HELD: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ROUNDED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute a matmul of few rows, with fused ops: y [rows, N] from x [rows, K] and a quantized weight.

    Grid: cdiv(N, ROWS), rows. A program computes ROWS columns of y. For each block of BLOCK_K columns of the weight, it
    prepares x and then multiplies one row of the weight after the other, of gate and up by turns with a gate. HELD rows
    are in registers before they are needed; the first ones are loaded before the previous kernel has ended.

    ELEMENTS and ROUNDED describe the weight and the rounding of x (`quant_constants`), whose stored scale is `stored`
    f32[1]. The other parameters are described in `linear_matvec`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    PER_WORD: tl.constexpr = 8 if ELEMENTS.chunk > 0 else 4
    CHUNKS: tl.constexpr = BLOCK_K // (4 * PER_WORD)
    PARTS: tl.constexpr = 2 * ROWS if GATED else ROWS
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TOGETHER: tl.constexpr = ELEMENTS.scale_rows % ROWS == 0 and FIRST % ROWS == 0 and UP % ROWS == 0
    first = tl.program_id(0) * ROWS
    base = _addresses(weight, scales, zeros, first, FIRST, K, CHUNKS, PER_WORD, ELEMENTS)
    up_base = _addresses(weight, scales, zeros, first, UP, K, CHUNKS, PER_WORD, ELEMENTS) if GATED else base
    held = ()
    for nth in tl.static_range(HELD):
        held = held + (
            _stored(
                up_base if GATED and nth % 2 == 1 else base, first, nth // PARTS * BLOCK_K,
                nth % PARTS // (PARTS // ROWS), N, K, ROWS, TOGETHER, CHUNKS, PER_WORD, ELEMENTS,
            ),
        )  # fmt: skip
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(1)
    source = x + row * X_STRIDE
    inverse, x_scale = _of_row(source, gain, stored, K, EPS, NORM, BLOCK_K, ROUNDED)
    sums = (tl.zeros((CHUNKS,), tl.float32),) * PARTS
    for block in range(BLOCKS):
        start = block * BLOCK_K
        prepared = _prepared(
            source, gain, inverse, x_scale, start, K, NORM, CHUNKS, PER_WORD, ELEMENTS, ROUNDED
        )  # fmt: skip
        for part in tl.static_range(PARTS):
            added = _added(sums[part], held[0], prepared, CHUNKS, ELEMENTS, ROUNDED)
            sums = sums[:part] + (added,) + sums[part + 1 :]
            held = held[1:] + (
                _stored(
                    up_base if GATED and (part + HELD) % 2 == 1 else base, first,
                    start + (part + HELD) // PARTS * BLOCK_K, (part + HELD) % PARTS // (PARTS // ROWS),
                    N, K, ROWS, TOGETHER, CHUNKS, PER_WORD, ELEMENTS,
                ),
            )  # fmt: skip
    # Sums of all rows are added between threads at once.
    gates, ups = (), ()
    for nth in tl.static_range(ROWS):
        gates = gates + (sums[2 * nth if GATED else nth],)
        ups = ups + (sums[2 * nth + 1 if GATED else nth],)
    n = first + tl.arange(0, ROWS)
    inside = n < N
    at = tl.minimum(n, N - 1)
    result = _scaled_rows(_total(gates, ROWS), scales, at + FIRST, x_scale, ELEMENTS, ROUNDED)
    if BIAS:
        result += tl.load(bias + FIRST + n, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = _scaled_rows(_total(ups, ROWS), scales, at + UP, x_scale, ELEMENTS, ROUNDED)
        if BIAS:
            up += tl.load(bias + UP + n, mask=inside, other=0.0).to(tl.float32)
        result = gated(result, up, ACTIVATION)
    elif ACTIVATION is not None:
        result = gated(result, 1.0, ACTIVATION)
    if RESIDUAL:
        result += tl.load(residual + row * RESIDUAL_STRIDE + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + n, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _total(parts, COUNT: tl.constexpr):
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
def _addresses(
    weight,
    scales,
    zeros,
    first,
    BEGIN: tl.constexpr,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    PER_WORD: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Return the addresses of the first block of row BEGIN + `first` of the weight: (words, scales, zero points, row).

    Those of words are [4 * CHUNKS]. The others are pointers to the scales of the block of rows that the row is in.
    """
    row = first.to(tl.int64) + BEGIN
    words = weight.to(tl.pointer_type(tl.int32)) + row * (K // PER_WORD) + tl.arange(0, 4 * CHUNKS)
    place = row // ELEMENTS.scale_rows * ELEMENTS.scale_stride if ELEMENTS.scale_rows > 0 else 0
    return words, scales + place, zeros + place if ELEMENTS.zeros else 0, row


@triton.jit
def _stored(
    base,
    first,
    start,
    NTH: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHUNKS: tl.constexpr,
    PER_WORD: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Load a block of row number NTH after `base` (`_addresses`), from column `start` on: (words, scales, zero points).

    Words are i32 [4 * CHUNKS], and the others [CHUNKS], or 0 if columns do not have their own. Columns from K on are
    zeros. Rows past the last one repeat it. TOGETHER says that all rows of a program share scales, if any do.
    """
    WORDS: tl.constexpr = K // PER_WORD
    nth = NTH
    if N % ROWS != 0:
        nth = tl.minimum(first + NTH, N - 1) - first
    begin = start // PER_WORD
    inside = begin + tl.arange(0, 4 * CHUNKS) < WORDS
    words = tl.load(base[0] + (begin + nth * WORDS), mask=inside, other=0, eviction_policy="evict_first")
    if ELEMENTS.scale_columns == 0:
        return words, 0, 0
    else:
        if ELEMENTS.scale_rows == 1:
            place = nth * ELEMENTS.scale_stride
        elif TOGETHER or ELEMENTS.scale_rows == 0:
            place = 0
        else:
            row = base[3]
            place = ((row + nth) // ELEMENTS.scale_rows - row // ELEMENTS.scale_rows) * ELEMENTS.scale_stride
        column = tl.minimum(start + tl.arange(0, CHUNKS) * (4 * PER_WORD), K - 1)
        place += column // ELEMENTS.scale_columns
        if ELEMENTS.zeros:
            return words, tl.load(base[1] + place), tl.load(base[2] + place)
        else:
            return words, tl.load(base[1] + place), 0


@triton.jit
def _of_row(
    source,
    gain,
    stored,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Return what the whole row of x decides: the norm's 1 / rms, and the scale of x. They are 1 if there is none."""
    k = tl.arange(0, WIDTH)
    inverse = 1.0
    if NORM:
        squares = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, K, WIDTH):
            value = tl.load(source + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            squares += value * value
        inverse = tl.rsqrt(tl.sum(squares) / K + EPS)
    scale = 1.0
    if ROUNDED.stored:
        scale = tl.load(stored)
    elif ROUNDED.element != "none" and ROUNDED.columns == 0:
        most = tl.zeros((WIDTH,), tl.float32)
        wrong = tl.zeros((WIDTH,), tl.float32)  # NaN where x is
        for start in range(0, K, WIDTH):
            value = _values(source, gain, inverse, start + k, K, NORM)
            most = tl.maximum(most, tl.where(value == value, tl.abs(value), 0.0))
            wrong += tl.where(value == value, 0.0, value)
        scale = scale_of(tl.max(most, 0), ROUNDED) + tl.sum(wrong)
    return inverse, scale


@triton.jit
def _values(source, gain, inverse, column, K: tl.constexpr, NORM: tl.constexpr):
    """Return the columns `column` of x, normed and rounded to its dtype with NORM, as float32. Past K they are 0."""
    value = tl.load(source + column, mask=column < K, other=0.0)
    dtype: tl.constexpr = value.dtype
    value = value.to(tl.float32)
    if NORM:
        value = scaled(value, inverse, tl.load(gain + column, mask=column < K, other=0.0), dtype)
        value = value.to(dtype).to(tl.float32)
    return value


@triton.jit
def _prepared(
    source,
    gain,
    inverse,
    x_scale,
    start,
    K: tl.constexpr,
    NORM: tl.constexpr,
    CHUNKS: tl.constexpr,
    PER_WORD: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Return the columns of x from `start` on as words of the weight multiply them: (numbers, their sums, factor).

    `numbers` are the tensors [CHUNKS] that belong to the first word of each chunk, then those of the second, and so on.
    For integer elements, they are packed limbs, and the limbs have `sums`. An integer times `factor` [CHUNKS] is x.
    """
    CODES: tl.constexpr = ROUNDED.element == "i8" and ELEMENTS.element != "f8e4m3"
    LIMBS: tl.constexpr = 1 if CODES else 3
    column = start + (tl.arange(0, CHUNKS) * (4 * PER_WORD))[:, None] + tl.arange(0, PER_WORD)[None, :]
    values = ()
    for word in tl.static_range(4):
        values = values + (_values(source, gain, inverse, column + word * PER_WORD, K, NORM),)
    factor = tl.full((CHUNKS,), 1.0, tl.float32)
    if ROUNDED.element != "none":
        scale = factor * x_scale
        if ROUNDED.columns > 0:
            scale = _group_scales(values, CHUNKS, ROUNDED.columns // (4 * PER_WORD), ROUNDED)
            if CODES:
                factor = scale
        over = tl.broadcast_to(scale[:, None], (CHUNKS, PER_WORD))
        rounded = ()
        for word in tl.static_range(4):
            codes = nearest(tl.div_rn(values[word], over), ROUNDED)
            rounded = rounded + (codes if CODES else codes * over,)
        values = rounded
    numbers = ()
    if ELEMENTS.element == "f8e4m3":
        for word in tl.static_range(4):
            even, odd = tl.split(tl.reshape(values[word], (CHUNKS, 2, 2)))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            numbers = numbers + (first, second, third, fourth)
        return numbers, (), factor
    else:
        if not CODES:
            most = tl.zeros((CHUNKS,), tl.int32)
            for word in tl.static_range(4):
                most = tl.maximum(most, tl.max(values[word].to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1))
            scale, factor = fixed_point(most)
        ones = tl.full((CHUNKS,), 0x01010101, tl.int32)
        sums = (tl.zeros((CHUNKS,), tl.int32),) * LIMBS
        for word in tl.static_range(4):
            if CODES:
                integers = values[word].to(tl.int32)  # at most 127, their own limb
            else:
                integers = limbs_of(values[word], scale[:, None])
            # The bytes of a word are its elements, or its even elements and then its odd ones.
            if PER_WORD == 8:
                even, odd = tl.split(tl.reshape(integers, (CHUNKS, 4, 2)))
                groups = (even, odd)
            else:
                groups = (integers,)
            for limb in tl.static_range(LIMBS):
                for group in tl.static_range(PER_WORD // 4):
                    left, right = tl.split(tl.reshape(groups[group], (CHUNKS, 2, 2)))
                    a, c = tl.split(left)
                    b, d = tl.split(right)
                    words = bytes_of(a, b, c, d, limb, ELEMENTS.assembly)
                    if not CODES:
                        words = signed(words)
                    numbers = numbers + (words,)
                    sums = (
                        sums[:limb] + (dot_bytes(ones, words, sums[limb], True, ELEMENTS.assembly),) + sums[limb + 1 :]
                    )
        return numbers, sums, factor


@triton.jit
def _group_scales(values, CHUNKS: tl.constexpr, TOGETHER: tl.constexpr, ROUNDED: tl.constexpr):
    """Return the scale of each chunk, which TOGETHER adjacent chunks share. NaN in a group makes its scale NaN."""
    most = tl.zeros((CHUNKS,), tl.float32)
    wrong = tl.zeros((CHUNKS,), tl.float32)
    for word in tl.static_range(4):
        most = tl.maximum(most, magnitude(values[word], 1))
        wrong += tl.sum(tl.where(values[word] == values[word], 0.0, values[word]), 1)
    GROUPS: tl.constexpr = CHUNKS // TOGETHER
    most = tl.max(tl.reshape(most, (GROUPS, TOGETHER)), 1)
    scale = scale_of(most, ROUNDED) + tl.sum(tl.reshape(wrong, (GROUPS, TOGETHER)), 1)
    return tl.reshape(tl.broadcast_to(scale[:, None], (GROUPS, TOGETHER)), (CHUNKS,))


@triton.jit
def _added(sums, stored, prepared, CHUNKS: tl.constexpr, ELEMENTS: tl.constexpr, ROUNDED: tl.constexpr):
    """Return `sums` [CHUNKS] plus x times a row's chunks (`_stored`); x is `_prepared`."""
    numbers, x_sums, factor = prepared
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
        part = _integers(words, numbers, x_sums, stored[2], CHUNKS, ELEMENTS, ROUNDED.element == "i8") * factor
    if ELEMENTS.scale_columns > 0:
        part *= stored[1].to(tl.float32)
    return sums + part


@triton.jit
def _integers(words, numbers, x_sums, zero, CHUNKS: tl.constexpr, ELEMENTS: tl.constexpr, CODES: tl.constexpr):
    """Return the sums of integers times integers, as float32 [CHUNKS]. See `_added`."""
    LIMBS: tl.constexpr = 1 if CODES else 3
    SIGNED: tl.constexpr = ELEMENTS.element == "i8"
    found = ()
    for limb in tl.static_range(LIMBS):
        part = tl.zeros((CHUNKS,), tl.int32)
        if ELEMENTS.zeros:
            part -= zero.to(tl.int32) * x_sums[limb]
        elif ELEMENTS.offset > 0:
            part -= ELEMENTS.offset * x_sums[limb]
        for word in tl.static_range(4):
            if ELEMENTS.chunk > 0:
                even, odd = words[word] & 0x0F0F0F0F, (words[word] >> 4) & 0x0F0F0F0F
                part = dot_bytes(even, numbers[2 * (word * LIMBS + limb)], part, SIGNED, ELEMENTS.assembly)
                part = dot_bytes(odd, numbers[2 * (word * LIMBS + limb) + 1], part, SIGNED, ELEMENTS.assembly)
            else:
                part = dot_bytes(words[word], numbers[word * LIMBS + limb], part, SIGNED, ELEMENTS.assembly)
        found = found + (part,)
    if LIMBS == 1:
        return found[0].to(tl.float32)
    else:
        # The lower two limbs have sums of less than 2**27.
        return found[2].to(tl.float32) * 65536.0 + (found[1] * 256 + found[0]).to(tl.float32)


@triton.jit
def _scaled_rows(sums, scales, rows, x_scale, ELEMENTS: tl.constexpr, ROUNDED: tl.constexpr):
    """Return the sums of the rows `rows` of the weight, times the scales that all their columns share."""
    if ELEMENTS.scale_columns == 0:
        place = rows // ELEMENTS.scale_rows * ELEMENTS.scale_stride if ELEMENTS.scale_rows > 0 else rows * 0
        sums *= tl.load(scales + place).to(tl.float32)
    if ROUNDED.element == "i8" and ELEMENTS.element != "f8e4m3" and ROUNDED.columns == 0:
        sums *= x_scale
    return sums
