"""Words of a quantized weight times x: the arithmetic of the kernel for one token, `quant_matvec`.

A word has 32 bits: four elements of a byte, or eight of four bits. A chunk is four words, the 16 bytes that one thread
loads at once. Integers are multiplied as integers: x is written as a fixed-point number with one exponent for a chunk,
and this number as bytes (limbs). One instruction, dp4a, multiplies four bytes by four others and adds all exactly. So
an element of four bits takes about one instruction, a third of what a conversion to float32 takes.

x of 16 bits has two limbs, a signed one and a lower one without a sign. x loses 2**-16 of the largest number of its
chunk, 1/128 of the unit in which that number is written in bf16. x of 32 bits has three signed limbs and loses 2**-23,
less than a sum in float32 would. x that is rounded to i8 has one limb, its code. Elements of f8e4m3 are converted to
float32, exactly.
"""

import triton
import triton.language as tl

# Fixed-point numbers have the magnitude 2**22 at most, so that adding 1.5 * 2**23 rounds them to integers, and the
# bits of the sum less those of 1.5 * 2**23 are the integer. The lower 16 bits of 1.5 * 2**23 are 0.
_ROUNDER = tl.constexpr(12582912.0)
_ROUNDER_BITS = tl.constexpr(0x4B400000)
# Added to an integer, it makes each of three signed limbs an unsigned byte, 128 larger.
_LIMBS = tl.constexpr(0x808080)
# All bytes of it are 128 (as i32): the difference of a limb and the byte that holds it.
_BYTES = tl.constexpr(-0x7F7F7F80)
# The exponents (with bias 127) of a chunk: smaller numbers count as 2**-105, whose scale is a normal float32.
_LEAST_EXPONENT = tl.constexpr(22)
_NOT_FINITE = tl.constexpr(255)


@triton.jit
def fixed_point(bits, LIMBS: tl.constexpr):
    """Return (scale, factor) of the fixed-point numbers of chunks, f32 each.

    `bits` [chunks] are the largest bits of the magnitudes of a chunk, as i32. A number times `scale` is rounded to an
    integer, and an integer times `factor` is the number. `factor` is NaN for a chunk with numbers that are not finite.
    Integers are less than 2**15 in magnitude with two limbs, if numbers have up to 15 significant bits, and at most
    2**22 with three.
    """
    BITS: tl.constexpr = 14 if LIMBS == 2 else 21
    exponent = tl.maximum(bits >> 23, _LEAST_EXPONENT)
    scale = ((254 + BITS - exponent) << 23).to(tl.float32, bitcast=True)
    factor = ((exponent - BITS) << 23).to(tl.float32, bitcast=True)
    return scale, tl.where(exponent == _NOT_FINITE, float("nan"), factor)


@triton.jit
def limbs_of(value, scale, LIMBS: tl.constexpr):
    """Return integers whose lower bytes are the limbs of `value * scale`. Each of three limbs is 128 larger."""
    whole = (value * scale + _ROUNDER).to(tl.int32, bitcast=True)
    if LIMBS == 2:
        return whole
    else:
        return whole - (_ROUNDER_BITS - _LIMBS)


@triton.jit
def words_of_limbs(a, b, c, d, LIMBS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the words of four bytes that hold the limbs of the integers a, b, c and d: a tuple, the lowest first.

    With one limb, the integers are limbs. Others are `limbs_of` numbers.
    """
    if LIMBS == 1:
        return (bytes_of(a, b, c, d, 0, ASSEMBLY),)
    elif LIMBS == 2:
        return two_bytes_of(a, b, c, d, ASSEMBLY)
    else:
        return (
            bytes_of(a, b, c, d, 0, ASSEMBLY) ^ _BYTES,
            bytes_of(a, b, c, d, 1, ASSEMBLY) ^ _BYTES,
            bytes_of(a, b, c, d, 2, ASSEMBLY) ^ _BYTES,
        )


@triton.jit
def two_bytes_of(a, b, c, d, ASSEMBLY: tl.constexpr):
    """Return the words of the bytes number 0, and of the bytes number 1, of the integers a, b, c and d."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 e, f; prmt.b32 e, $2, $3, 0x5140; prmt.b32 f, $4, $5, 0x5140; "
            "prmt.b32 $0, e, f, 0x5410; prmt.b32 $1, e, f, 0x7632; }",
            "=&r,=r,r,r,r,r",
            [a, b, c, d],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return bytes_of(a, b, c, d, 0, False), bytes_of(a, b, c, d, 1, False)


@triton.jit
def bytes_of(a, b, c, d, NTH: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the words whose four bytes are the bytes number NTH of the integers a, b, c and d."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 e, f; prmt.b32 e, $1, $2, "
            + _PAIRS[NTH]
            + "; prmt.b32 f, $3, $4, "
            + _PAIRS[NTH]
            + "; prmt.b32 $0, e, f, 0x5410; }",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = ((a >> (8 * NTH)) & 255) | (((b >> (8 * NTH)) & 255) << 8)
        return low | (((c >> (8 * NTH)) & 255) << 16) | (((d >> (8 * NTH)) & 255) << 24)


# How prmt selects the bytes 0, 1 or 2 of two words into the lower half of a word.
_PAIRS = tl.constexpr(("0x0040", "0x0051", "0x0062"))


# As i32: the highest bit of each four bits, and the upper four bits of each byte.
_EIGHTS = tl.constexpr(-0x77777778)
_UPPER = tl.constexpr(-0x0F0F0F10)


@triton.jit
def bytes_of_fours(words, E2M1: tl.constexpr, CENTERED: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return the eight elements of four bits of `words` as the bytes of two words.

    Codes of integers are bytes as they are, those at even places first. With CENTERED, signed bytes are 16 times what a
    code is more than 8. With E2M1, bytes are 12 plus twice the f4e2m1 numbers, in their order.
    """
    if E2M1:
        return _doubled(words, 0, ASSEMBLY), _doubled(words, 16, ASSEMBLY)
    elif CENTERED:
        # A code with its highest bit inverted is what it is more than 8, as a signed number of four bits.
        return ((words << 4) ^ _EIGHTS) & _UPPER, (words ^ _EIGHTS) & _UPPER
    else:
        return words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F


@triton.jit
def _doubled(words, BEGIN: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return 12 plus twice the f4e2m1 numbers of the four codes from bit BEGIN on, as bytes."""
    words = words >> BEGIN
    if ASSEMBLY:
        # prmt looks bytes up by the lower three bits of a code. A fourth bit copies the sign of the byte to all its
        # bits, so a look-up among bytes of 0x80 makes masks of codes with a sign (but for their highest bit, which is 0
        # in both tables). 0xca is the truth table of a ? b : c.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 code, plus, minus, sign;
            and.b32 code, $1, 0x7777;
            prmt.b32 plus, 0x0f0e0d0c, 0x18141210, code;
            prmt.b32 minus, 0x090a0b0c, 0x00040608, code;
            prmt.b32 sign, 0x80808080, 0x80808080, $1;
            lop3.b32 $0, sign, minus, plus, 0xca;
            }
            """,
            "=r,r",
            [words],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        found = words * 0
        for nth in tl.static_range(4):
            code = words >> (4 * nth)
            exponent, mantissa = (code >> 1) & 3, code & 1
            number = tl.where(exponent == 0, mantissa, (2 + mantissa) << (tl.maximum(exponent, 1) - 1))
            found |= tl.where((code & 8) != 0, 12 - number, 12 + number) << (8 * nth)
        return found


@triton.jit
def dot_bytes(weights, x, sums, SIGNED: tl.constexpr, X_SIGNED: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Return `sums` plus the four bytes of `weights` times those of `x`, all i32.

    Bytes of `weights` are signed if SIGNED, those of `x` if X_SIGNED.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _DOTS[(2 if SIGNED else 0) + (1 if X_SIGNED else 0)],
            "=r,r,r,r",
            [weights, x, sums],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for nth in tl.static_range(4):
            left = (weights << (24 - 8 * nth)) >> 24
            right = (x << (24 - 8 * nth)) >> 24
            sums += (left if SIGNED else left & 255) * (right if X_SIGNED else right & 255)
        return sums


# The instruction by the signs of its operands.
_DOTS = tl.constexpr(
    (
        "dp4a.u32.u32 $0, $1, $2, $3;",
        "dp4a.u32.s32 $0, $1, $2, $3;",
        "dp4a.s32.u32 $0, $1, $2, $3;",
        "dp4a.s32.s32 $0, $1, $2, $3;",
    )
)


@triton.jit
def dot_f8e4m3(weights, x0, x1, x2, x3, sums, ASSEMBLY: tl.constexpr):
    """Return `sums` plus the four f8e4m3 numbers of the words `weights` (i32) times x, all f32."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 first, second;
            .reg .f32 e, f, g, h, s;
            mov.b32 {low, high}, $1;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mov.b32 {a, b}, first;
            mov.b32 {c, d}, second;
            cvt.f32.f16 e, a;
            cvt.f32.f16 f, b;
            cvt.f32.f16 g, c;
            cvt.f32.f16 h, d;
            fma.rn.f32 s, e, $2, $6;
            fma.rn.f32 s, f, $3, s;
            fma.rn.f32 s, g, $4, s;
            fma.rn.f32 $0, h, $5, s;
            }
            """,
            "=f,r,f,f,f,f,f",
            [weights, x0, x1, x2, x3, sums],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        sums += _f8e4m3(weights, 0) * x0
        sums += _f8e4m3(weights, 1) * x1
        sums += _f8e4m3(weights, 2) * x2
        return sums + _f8e4m3(weights, 3) * x3


@triton.jit
def _f8e4m3(words, NTH: tl.constexpr):
    return ((words >> (8 * NTH)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
