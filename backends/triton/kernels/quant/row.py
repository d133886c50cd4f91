"""A row of x for the kernel `quant_matvec`: normed, rounded, and as words of the weight multiply it."""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.linear.parts import scaled
from ingot.backends.triton.kernels.quant.rounding import magnitude, nearest, scale_of
from ingot.backends.triton.kernels.quant.words import dot_bytes, fixed_point, limbs_of, words_of_limbs


@triton.jit
def of_row(
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
            value = _values(source, gain, None, inverse, start + k, K, NORM)
            most = tl.maximum(most, tl.where(value == value, tl.abs(value), 0.0))
            wrong += tl.where(value == value, 0.0, value)
        scale = scale_of(tl.max(most, 0), ROUNDED) + tl.sum(wrong)
    return inverse, scale


@triton.jit
def _values(source, gain, order, inverse, column, K: tl.constexpr, NORM: tl.constexpr):
    """Return the columns `column` of x, normed and rounded to its dtype with NORM, as float32. Past K they are 0."""
    inside = column < K
    if order is not None:
        column = tl.load(order + column, mask=inside, other=0)
    value = tl.load(source + column, mask=inside, other=0.0)
    dtype: tl.constexpr = value.dtype
    value = value.to(tl.float32)
    if NORM:
        value = scaled(value, inverse, tl.load(gain + column, mask=inside, other=0.0), dtype)
        value = value.to(dtype).to(tl.float32)
    return value


@triton.jit
def prepared(
    source,
    gain,
    order,
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
    For integer elements, they are packed limbs (`limbs_for`). The limbs of a chunk, or of each half, have `sums` if the
    elements have an offset that they do not include. `factor` [CHUNKS] makes a sum over integers one over
    x.
    """
    CODES: tl.constexpr = ROUNDED.element == "i8" and ELEMENTS.element != "f8e4m3"
    LIMBS: tl.constexpr = limbs_for(source.dtype.element_ty.primitive_bitwidth, ROUNDED.element == "none", CODES)
    CENTERED: tl.constexpr = centered(ELEMENTS.chunk, ELEMENTS.offset, ELEMENTS.zeros)
    SUMMED: tl.constexpr = not CENTERED and (ELEMENTS.element == "f4e2m1" or ELEMENTS.zeros or ELEMENTS.offset > 0)
    HALVES: tl.constexpr = halves(ELEMENTS.scale_columns, PER_WORD)
    column = start + (tl.arange(0, CHUNKS) * (4 * PER_WORD))[:, None] + tl.arange(0, PER_WORD)[None, :]
    values = ()
    for word in tl.static_range(4):
        values = values + (_values(source, gain, order, inverse, column + word * PER_WORD, K, NORM),)
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
            scale, factor = fixed_point(most, LIMBS)
        ones = tl.full((CHUNKS,), 0x01010101, tl.int32)
        sums = (tl.zeros((CHUNKS,), tl.int32),) * (LIMBS * HALVES)
        for word in tl.static_range(4):
            if CODES:
                integers = values[word].to(tl.int32)  # at most 127, their own limb
            else:
                integers = limbs_of(values[word], scale[:, None], LIMBS)
            # Words of bytes have the elements in their order, or the even ones and then the odd ones.
            if ELEMENTS.element == "f4e2m1":
                groups = tl.split(tl.permute(tl.reshape(integers, (CHUNKS, 2, 4)), (0, 2, 1)))
            elif PER_WORD == 8:
                groups = tl.split(tl.reshape(integers, (CHUNKS, 4, 2)))
            else:
                groups = (integers,)
            for group in tl.static_range(PER_WORD // 4):
                left, right = tl.split(tl.reshape(groups[group], (CHUNKS, 2, 2)))
                a, c = tl.split(left)
                b, d = tl.split(right)
                words = words_of_limbs(a, b, c, d, LIMBS, ELEMENTS.assembly)
                numbers = numbers + words
                if SUMMED:
                    for limb in tl.static_range(LIMBS):
                        sums = _bytes_added(
                            sums, word // (4 // HALVES) * LIMBS + limb, ones, words[limb], LIMBS != 2 or limb == 1,
                            ELEMENTS.assembly,
                        )  # fmt: skip
        if ELEMENTS.element == "f4e2m1":
            factor *= 0.5
        elif CENTERED:
            factor *= 0.0625
        return numbers, sums, factor


@triton.constexpr_function
def limbs_for(bits, plain, codes):
    """Return how many limbs x has. It has `bits` bits. It is `plain` if it is not rounded, and may be `codes` of i8."""
    if codes:
        return 1
    return 2 if bits == 16 and plain else 3


@triton.constexpr_function
def centered(chunk, offset, zeros):
    """Return whether four-bit elements are multiplied as signed numbers, 8 less than their codes."""
    return chunk > 0 and offset == 8 and not zeros


@triton.jit
def _bytes_added(sums, NTH: tl.constexpr, ones, words, SIGNED: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the tuple `sums` with the bytes of `words` added to number NTH."""
    return sums[:NTH] + (dot_bytes(ones, words, sums[NTH], True, SIGNED, ASSEMBLY),) + sums[NTH + 1 :]


@triton.constexpr_function
def halves(columns, per_word):
    """Return 2 if the halves of a chunk have their own scales, else 1. Groups have `columns` columns."""
    return 2 if columns == 2 * per_word else 1


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
