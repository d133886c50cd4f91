"""Convert stored elements of quantized weights to the dtype of a matmul, with few instructions per element.

Every conversion is exact. The instructions are those of compute capability 9.0, on two numbers of 16 bits at a time:

- Elements of eight bits are converted as in `ingot.backends.triton.kernels.conversions`.
- Four bits are in the same way 128 + q in bf16 (0x4300), and 1024 + q in f16 (0x6400).
- f4e2m1 has a sign and the bits of a bf16 or f16 with a small exponent, also of its subnormal 0.5. A multiplication by
  a power of two makes it the number.

Other dtypes and devices use Triton's conversions.
"""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.conversions import f8_as_bf16, i8_as_bf16


@triton.jit
def converted(stored, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return elements of a byte ("f8e4m3", "i8" or "u8") as numbers of DTYPE. `stored` has the dtype of storage."""
    if stored.dtype == DTYPE:
        return stored
    elif ELEMENTS.assembly and ELEMENTS.element == "f8e4m3" and tl.bfloat16 == DTYPE:
        return f8_as_bf16(stored)
    elif ELEMENTS.assembly and ELEMENTS.element == "i8" and tl.bfloat16 == DTYPE:
        return i8_as_bf16(stored)
    else:
        return stored.to(DTYPE)


@triton.jit
def quarter(words, zero, NTH: tl.constexpr, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return element number NTH (0 to 3) of each word of four elements of four bits, minus its zero point.

    `words` [rows, words] are i16. `zero` [rows, words] is `zero_of` the zero points. f4e2m1 has none: with folded
    scales, `zero` are the `factors_of` scales, by which elements are multiplied.
    """
    if ELEMENTS.element == "f4e2m1" and ELEMENTS.fold >= 0:
        return _e2m1_scaled(words, zero, NTH, ELEMENTS, DTYPE)
    if ELEMENTS.element == "f4e2m1":
        return _e2m1(words, NTH, ELEMENTS, DTYPE)
    if ELEMENTS.assembly and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; shr.u32 a, $1, "
            + _SHIFTS[NTH]
            + "; lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; sub.rn.bf16x2 $0, a, $2; }",
            "=r,r,r",
            [words, zero],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif ELEMENTS.assembly and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; shr.u32 a, $1, "
            + _SHIFTS[NTH]
            + "; lop3.b32 a, a, 0x000f000f, 0x64006400, 0xea; sub.rn.f16x2 $0, a, $2; }",
            "=r,r,r",
            [words, zero],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return ((words >> (4 * NTH)) & 15).to(DTYPE) - zero


@triton.jit
def _e2m1(words, NTH: tl.constexpr, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the f4e2m1 number NTH (0 to 3) of each word. `words` [rows, words] are i16."""
    # Exponent and mantissa move to bits 6 to 8 of bf16, whose exponent is then 126 too small, or to bits 9 to 11 of
    # f16, 14 too small. The sign moves to bit 15. 0xea is the truth table of (a & b) | c.
    if ELEMENTS.assembly and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c; mov.b32 c, 0x7e807e80; "
            + _moved(4 * NTH, 6, "a")
            + _moved(4 * NTH + 3, 15, "b")
            + "and.b32 a, a, 0x01c001c0; lop3.b32 a, b, 0x80008000, a, 0xea; mul.rn.bf16x2 $0, a, c; }",
            "=r,r",
            [words],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif ELEMENTS.assembly and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c; mov.b32 c, 0x74007400; "
            + _moved(4 * NTH, 9, "a")
            + _moved(4 * NTH + 3, 15, "b")
            + "and.b32 a, a, 0x0e000e00; lop3.b32 a, b, 0x80008000, a, 0xea; mul.rn.f16x2 $0, a, c; }",
            "=r,r",
            [words],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        bits = (words >> (4 * NTH)).to(tl.int32)
        exponent, mantissa = (bits >> 1) & 3, bits & 1
        doubled = tl.where(exponent == 0, mantissa, (2 + mantissa) << (tl.maximum(exponent, 1) - 1)).to(tl.float32)
        return tl.where((bits & 8) != 0, -0.5 * doubled, 0.5 * doubled).to(DTYPE)


@triton.jit
def _e2m1_scaled(words, factors, NTH: tl.constexpr, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the f4e2m1 number NTH (0 to 3) of each word, times its scale and 2**-ELEMENTS.fold.

    `factors` [rows, words] are `factors_of` the scales, in DTYPE.
    """
    if ELEMENTS.assembly and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; "
            + _moved(4 * NTH, 6, "a")
            + _moved(4 * NTH + 3, 15, "b")
            + "and.b32 a, a, 0x01c001c0; lop3.b32 a, b, 0x80008000, a, 0xea; mul.rn.bf16x2 $0, a, $2; }",
            "=r,r,r",
            [words, factors],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return _e2m1(words, NTH, ELEMENTS, DTYPE) * factors


@triton.jit
def factors_of(scales, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return stored scales as the numbers of DTYPE by which `quarter` multiplies elements.

    These are scales times 2**-ELEMENTS.fold, and also times 2**126 if `quarter` moves the bits of elements.
    """
    ADDED: tl.constexpr = (126 if ELEMENTS.assembly and tl.bfloat16 == DTYPE else 0) - ELEMENTS.fold
    if ELEMENTS.scale_kind == "e8m0" and tl.bfloat16 == DTYPE:
        exponent = scales.to(tl.int16) + ADDED
        if ADDED < 0:
            exponent = tl.maximum(exponent, 1)  # from here on, factors would be subnormal
        return tl.where(exponent < 255, exponent << 7, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return (scale_value(scales, ELEMENTS) * (2.0**ADDED)).to(DTYPE)


@triton.constexpr_function
def _moved(place, wanted, register):
    """Return the instruction that moves the bit `place` of both halves of the operand $1 to the bit `wanted`."""
    return f"{'shl' if wanted > place else 'shr'}.b32 {register}, $1, {abs(wanted - place)}; "


@triton.jit
def scale_value(stored, ELEMENTS: tl.constexpr):
    """Return stored scales as float32."""
    if ELEMENTS.scale_kind == "e8m0":
        bits = stored.to(tl.int32) << 23
        return tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)  # 2**-127 is subnormal
    else:
        return stored.to(tl.float32)


@triton.jit
def outer_scales(outer, row, ELEMENTS: tl.constexpr):
    """Return the scale of the second level of each row `row` of the weight, as float32."""
    return tl.load(outer + (row // ELEMENTS.outer_rows if ELEMENTS.outer_rows > 0 else row * 0)).to(tl.float32)


@triton.jit
def zero_of(zero, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return zero points (0 to 15) as `quarter` subtracts them.

    They include the 128 or 1024 that its conversion adds. `zero` are integers.
    """
    added: tl.constexpr = _added(ELEMENTS.assembly, DTYPE)
    return (zero.to(tl.int16) + added).to(DTYPE)


@triton.constexpr_function
def _added(assembly, dtype):
    if not assembly:
        return 0
    return {"bf16": 128, "fp16": 1024}.get(dtype.name, 0)


_SHIFTS = tl.constexpr(("0", "4", "8", "12"))
