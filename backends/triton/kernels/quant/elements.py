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
def quarter(words, operand, NTH: tl.constexpr, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return element number NTH (0 to 3) of each word of four elements of four bits.

    `words` [rows, words] are i16. `operand` [rows, words] is `operand_of` zero points, which are subtracted from
    integers. f4e2m1 is multiplied by it: it may also be the `factors_of` scales.
    """
    if ELEMENTS.element == "f4e2m1":
        return e2m1(words, operand, NTH, ELEMENTS, DTYPE)
    if ELEMENTS.assembly and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; shr.u32 a, $1, "
            + _SHIFTS[NTH]
            + "; lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; sub.rn.bf16x2 $0, a, $2; }",
            "=r,r,r",
            [words, operand],
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
            [words, operand],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return ((words >> (4 * NTH)) & 15).to(DTYPE) - operand


@triton.jit
def e2m1(words, factors, NTH: tl.constexpr, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return the f4e2m1 number NTH (0 to 3) of each word, times a factor.

    `words` [rows, words] are i16. `factors` [rows, words] are in DTYPE, with the power of two of `_moved_by`.
    """
    # Exponent and mantissa move to bits 6 to 8 of bf16, whose exponent is then 126 too small, or to bits 9 to 11 of
    # f16, 14 too small. The sign moves to bit 15. 0xea is the truth table of (a & b) | c.
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
    elif ELEMENTS.assembly and tl.float16 == DTYPE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; "
            + _moved(4 * NTH, 9, "a")
            + _moved(4 * NTH + 3, 15, "b")
            + "and.b32 a, a, 0x0e000e00; lop3.b32 a, b, 0x80008000, a, 0xea; mul.rn.f16x2 $0, a, $2; }",
            "=r,r,r",
            [words, factors],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        bits = (words >> (4 * NTH)).to(tl.int32)
        exponent, mantissa = (bits >> 1) & 3, bits & 1
        doubled = tl.where(exponent == 0, mantissa, (2 + mantissa) << (tl.maximum(exponent, 1) - 1)).to(tl.float32)
        return tl.where((bits & 8) != 0, -0.5 * doubled, 0.5 * doubled).to(DTYPE) * factors


@triton.jit
def factors_of(scales, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return stored scales as the numbers of DTYPE by which `quarter` multiplies elements.

    These are scales times 2**-ELEMENTS.fold, and also times the power of two of `_moved_by`.
    """
    if ELEMENTS.scale_kind == "e8m0" and tl.bfloat16 == DTYPE:
        return factor_bits(scales.to(tl.int16), ELEMENTS).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        ADDED: tl.constexpr = _moved_by(ELEMENTS.assembly, DTYPE) - ELEMENTS.fold
        return (scale_value(scales, ELEMENTS) * (2.0**ADDED)).to(DTYPE)


@triton.jit
def factor_bits(scales, ELEMENTS: tl.constexpr):
    """Return the bits of `factors_of` scales of the kind "e8m0" in bf16. `scales` are integers of at least 16 bits."""
    ADDED: tl.constexpr = _moved_by(ELEMENTS.assembly, tl.bfloat16) - ELEMENTS.fold
    exponent = scales + ADDED
    if ADDED < 0:
        exponent = tl.maximum(exponent, 1)  # from here on, factors would be subnormal
    return tl.where(exponent < 255, exponent << 7, 0x7FC0)


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
def operand_of(zero, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return what `quarter` subtracts from integers, or multiplies f4e2m1 by, which has no zero point.

    `zero` are the zero points (0 to 15), as integers. The result includes the 128 or 1024 that the conversion of an
    integer adds, or is the power of two of `_moved_by`.
    """
    if ELEMENTS.element == "f4e2m1":
        return tl.full(zero.shape, 2.0 ** _moved_by(ELEMENTS.assembly, DTYPE), DTYPE)
    added: tl.constexpr = _added(ELEMENTS.assembly, DTYPE)
    return (zero.to(tl.int16) + added).to(DTYPE)


@triton.constexpr_function
def _added(assembly, dtype):
    if not assembly:
        return 0
    return {"bf16": 128, "fp16": 1024}.get(dtype.name, 0)


@triton.constexpr_function
def _moved_by(assembly, dtype):
    """Return the power of two by which the exponent of moved bits of an f4e2m1 is too small."""
    if not assembly:
        return 0
    return {"bf16": 126, "fp16": 14}.get(dtype.name, 0)


_SHIFTS = tl.constexpr(("0", "4", "8", "12"))
