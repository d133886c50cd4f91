"""One row of x times rows of an f8e4m3 weight on tensor cores, for the kernel `quant_matvec`.

An instruction m16n8k16 of a warp multiplies a matrix [16, 16] with one [16, 8]. Four lanes hold a row of the first one,
and four lanes a column of the second one. Each lane gives elements of its own chunk: of two rows of the weight to the
first matrix, and of x to the second. So sums on the diagonal are those of four lanes over their own columns, and other
sums are not used. Elements are converted from f8e4m3 to f16, exactly. Products and sums are float32.

A lane holds two sums of each row of the weight. Sums of all threads on the diagonal add up to the row of the result.
Without assembly, the first sum of a lane is that of its own chunk.
"""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.linear.parts import scaled
from ingot.backends.triton.kernels.quant.rounding import scale_of

# The bits of a float32 without its sign, and those of infinity: a NaN has more.
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def codes_of_row(
    source,
    gain,
    stored,
    order,
    K: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    CHUNKS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Load, norm and round a row of x: (codes, scale).

    `codes` are eight tensors i32 [CHUNKS], each with two adjacent codes as f16 numbers: the 16 columns of a chunk.
    `scale` is one number, or f32 [CHUNKS] if groups of columns have their own. A row that has a NaN, or a group of it,
    has the scale NaN.
    """
    column = (tl.arange(0, CHUNKS) * 16)[:, None] + tl.arange(0, 4)[None, :]
    values, gains = (), ()
    for word in tl.static_range(4):
        place = column + 4 * word
        inside = place < K
        if order is not None:
            place = tl.load(order + place, mask=inside, other=0)
        values = values + (tl.load(source + place, mask=inside, other=0.0).to(tl.float32),)
        if NORM:
            gains = gains + (tl.load(gain + place, mask=inside, other=0.0),)
    if NORM:
        squares = tl.zeros((CHUNKS,), tl.float32)
        for word in tl.static_range(4):
            squares += tl.sum(values[word] * values[word], 1)
        inverse = tl.rsqrt(tl.sum(squares) / K + EPS)
        normed = ()
        for word in tl.static_range(4):
            value = scaled(values[word], inverse, gains[word], source.dtype.element_ty)
            normed = normed + (value.to(source.dtype.element_ty).to(tl.float32),)
        values = normed
    if ROUNDED.stored:
        scale = tl.load(stored)
        each = tl.zeros((CHUNKS,), tl.float32) + scale
    else:
        # Magnitudes are compared as integers, in whose order a NaN is the largest.
        most = tl.zeros((CHUNKS,), tl.int32)
        for word in tl.static_range(4):
            most = tl.maximum(most, tl.max(values[word].to(tl.int32, bitcast=True) & _MAGNITUDE, 1))
        if ROUNDED.columns > 0:
            TOGETHER: tl.constexpr = ROUNDED.columns // 16
            GROUPS: tl.constexpr = CHUNKS // TOGETHER
            groups = tl.max(tl.reshape(most, (GROUPS, TOGETHER)), 1)
            most = tl.reshape(tl.broadcast_to(groups[:, None], (GROUPS, TOGETHER)), (CHUNKS,))
            scale = _scale_of_bits(most, ROUNDED)
            each = scale
        else:
            scale = _scale_of_bits(tl.max(most, 0), ROUNDED)
            each = tl.zeros((CHUNKS,), tl.float32) + scale
    reciprocal = tl.div_rn(tl.full((CHUNKS,), 1.0, tl.float32), each)
    codes = ()
    for word in tl.static_range(4):
        even, odd = tl.split(tl.reshape(values[word], (CHUNKS, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        codes = codes + (
            _two_codes(first, second, each, reciprocal, ROUNDED, ELEMENTS.assembly),
            _two_codes(third, fourth, each, reciprocal, ROUNDED, ELEMENTS.assembly),
        )
    return codes, scale


@triton.jit
def _scale_of_bits(most, ROUNDED: tl.constexpr):
    """Return the scales of groups whose largest magnitudes have the bits `most`."""
    scale = scale_of(most.to(tl.float32, bitcast=True), ROUNDED)
    return tl.where(most > _INFINITY, float("nan"), scale)


@triton.jit
def _two_codes(low, high, scale, reciprocal, ROUNDED: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return `low` and `high` over `scale`, rounded to f8e4m3, as two f16 numbers in an i32.

    `reciprocal` is 1 / scale, correctly rounded. One step of Newton's method then makes the product with it a correctly
    rounded quotient (P. Markstein, IA-64 and Elementary Functions, 2000). cvt limits numbers to the largest one.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .f32 a, b, c, d, n;
            .reg .b16 e;
            neg.f32 n, $3;
            mul.rn.f32 a, $1, $4;
            mul.rn.f32 b, $2, $4;
            fma.rn.f32 c, a, n, $1;
            fma.rn.f32 d, b, n, $2;
            fma.rn.f32 a, c, $4, a;
            fma.rn.f32 b, d, $4, b;
            cvt.rn.satfinite.e4m3x2.f32 e, b, a;
            cvt.rn.f16x2.e4m3x2 $0, e;
            }
            """,
            "=r,f,f,f,f",
            [low, high, scale, reciprocal],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return _f16_bits(_code(low, scale, ROUNDED)) | (_f16_bits(_code(high, scale, ROUNDED)) << 16)


@triton.jit
def _code(value, scale, ROUNDED: tl.constexpr):
    value = tl.div_rn(value, scale)
    value = tl.where(value > ROUNDED.high, ROUNDED.high, tl.where(value < -ROUNDED.high, -ROUNDED.high, value))
    return value.to(tl.float8e4nv)


@triton.jit
def _f16_bits(code):
    return code.to(tl.float32).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def pair_added(sums, left, right, codes, ASSEMBLY: tl.constexpr):
    """Return the four tensors `sums` f32 [chunks] plus the codes of x times two rows of the weight.

    `left` and `right` are i32 [4 * chunks], 16 f8e4m3 elements of each chunk. The first two sums are those of `left`.
    Threads must hold different chunks: a warp adds up those of its lanes.
    """
    CHUNKS: tl.constexpr = left.shape[0] // 4
    a, b = _words(left, CHUNKS), _words(right, CHUNKS)
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _PAIR,
            "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
            [
                a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3],
                codes[0], codes[1], codes[2], codes[3], codes[4], codes[5], codes[6], codes[7],
                sums[0], sums[1], sums[2], sums[3],
            ],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        first, second = sums[0], sums[2]
        for word in tl.static_range(4):
            for nth in tl.static_range(4):
                bits = (codes[2 * word + nth // 2] >> (16 * (nth % 2))).to(tl.int16)
                number = bits.to(tl.float16, bitcast=True).to(tl.float32)
                first += _element(a[word], nth) * number
                second += _element(b[word], nth) * number
        return first, sums[1], second, sums[3]


@triton.jit
def _words(stored, CHUNKS: tl.constexpr):
    even, odd = tl.split(tl.reshape(stored, (CHUNKS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _element(words, NTH: tl.constexpr):
    return ((words >> (8 * NTH)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.constexpr_function
def _pair_assembly():
    """Return the instructions of `pair_added`. Words of rows are $4 to $11, x is $12 to $19, sums $20 to $23."""
    lines = [
        "{ .reg .b16 l, h; .reg .b32 a<4>; .reg .f32 c<4>;",
        *(f"mov.f32 c{nth}, ${20 + nth};" for nth in range(4)),
    ]
    for word in range(4):
        for row in range(2):
            lines += [
                f"mov.b32 {{l, h}}, ${4 + 4 * row + word};",
                f"cvt.rn.f16x2.e4m3x2 a{row}, l;",
                f"cvt.rn.f16x2.e4m3x2 a{2 + row}, h;",
            ]
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            f"{{c0, c1, c2, c3}}, {{a0, a1, a2, a3}}, {{${12 + 2 * word}, ${13 + 2 * word}}}, {{c0, c1, c2, c3}};"
        )
    lines += [*(f"mov.f32 ${nth}, c{nth};" for nth in range(4)), "}"]
    return "\n".join(lines)


_PAIR = tl.constexpr(_pair_assembly())


@triton.jit
def diagonal(first, second, ASSEMBLY: tl.constexpr):
    """Return the sum that is on the diagonal, of the two that a lane holds for a row of the weight, else 0."""
    if ASSEMBLY:
        # Lane 4 g + t has the columns 2 t and 2 t + 1 of row g.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 lane, row, place;
            .reg .pred second, own;
            .reg .f32 found;
            mov.u32 lane, %laneid;
            shr.u32 row, lane, 2;
            and.b32 place, row, 1;
            setp.ne.u32 second, place, 0;
            selp.f32 found, $2, $1, second;
            shr.u32 row, row, 1;
            and.b32 place, lane, 3;
            setp.eq.u32 own, row, place;
            selp.f32 $0, found, 0f00000000, own;
            }
            """,
            "=f,f,f",
            [first, second],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return first + second
