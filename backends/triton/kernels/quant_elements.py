"""Convert stored elements of quantized weights to the dtype of a matmul, with few instructions per element.

Every conversion is exact. The instructions are those of compute capability 9.0, on two numbers of 16 bits at a time:

- f8e4m3 becomes f16 by one instruction. Two f16 become bf16 by way of f32.
- i8 becomes bf16 by its bits: 0x4300 is 128 with a unit in the last place of 1, so 0x4300 | low 7 bits is 128 + the
  seven bits. The eighth bit means -128; 0x4300 | that bit is 128, or 256 where the bit is set.
- Four bits are in the same way 128 + q in bf16, and 1024 + q in f16 (0x6400).

Other dtypes and devices use Triton's conversions.
"""

import triton
import triton.language as tl


@triton.jit
def converted(stored, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return elements of a byte ("f8e4m3", "i8" or "u8") as numbers of DTYPE. `stored` has the dtype of storage."""
    if stored.dtype == DTYPE:
        return stored
    elif ELEMENTS.assembly and ELEMENTS.element == "f8e4m3" and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 a, b;
            .reg .b32 h, e, f;
            cvt.rn.f16x2.e4m3x2 h, $1;
            mov.b32 {a, b}, h;
            cvt.f32.f16 e, a;
            cvt.f32.f16 f, b;
            cvt.rn.bf16x2.f32 $0, f, e;
            }
            """,
            "=r,h",
            [stored],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif ELEMENTS.assembly and ELEMENTS.element == "i8" and tl.bfloat16 == DTYPE:
        # 0xea is the truth table of (a & b) | c.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, low, sign;
            cvt.u32.u16 a, $1;
            prmt.b32 a, a, 0, 0x4140;
            lop3.b32 low, a, 0x007f007f, 0x43004300, 0xea;
            lop3.b32 sign, a, 0x00800080, 0x43004300, 0xea;
            sub.rn.bf16x2 $0, low, sign;
            }
            """,
            "=r,h",
            [stored],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return stored.to(DTYPE)


@triton.jit
def quarter(words, zero, NTH: tl.constexpr, ELEMENTS: tl.constexpr, DTYPE: tl.constexpr):
    """Return element number NTH (0 to 3) of each word of four elements of four bits, minus its zero point.

    `words` [rows, words] are i16. `zero` [rows, words] is `zero_of` the zero points.
    """
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
