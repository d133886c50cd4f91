"""Convert elements of eight bits to f16 or bf16 with few instructions of NVIDIA GPUs. Every conversion is exact.

- f8e4m3 becomes f16 by one instruction for two elements (compute capability 8.9). Two f16 become bf16 by way of f32.
- i8 becomes f16 by its bits: 0x6400 is 1024 with a unit in the last place of 1. A number x with its sign bit inverted
  is x + 128, so 0x6400 | that is 1024 + 128 + x.
- i8 becomes bf16 by its bits (compute capability 9.0): 0x4300 is 128 with a unit in the last place of 1, so 0x4300 |
  low 7 bits is 128 + the seven bits. The eighth bit means -128; 0x4300 | that bit is 128, or 256 where the bit is set.

Callers use Triton's conversions for other dtypes and devices.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _two_and_two(first, second):
    """Return the assembly that converts four i8 to f16. `first` and `second` select bytes, as `prmt` does."""
    return f"""
    {{
    .reg .b32 a, first, second, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 a, $2, 0x80808080;
    prmt.b32 first, a, 0x64646464, {first:#06x};
    prmt.b32 second, a, 0x64646464, {second:#06x};
    sub.rn.f16x2 $0, first, bias;
    sub.rn.f16x2 $1, second, bias;
    }}
    """


@triton.jit
def i8_as_f16(x):
    """Return numbers of i8 in f16."""
    return tl.inline_asm_elementwise(
        _two_and_two(0x4140, 0x4342), "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4
    )


@triton.jit
def i8_pairs_as_f16(words):
    """Return the first and the second elements, in f16, of pairs of i8. `words` i16 has a pair in each word."""
    return tl.inline_asm_elementwise(
        _two_and_two(0x4240, 0x4341), "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def f8_pairs_as_f16(words):
    """Return the first and the second elements, in f16, of pairs of f8e4m3. `words` i16 has a pair in each word."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        .reg .b16 first, second;
        prmt.b32 a, $2, 0, 0x3120;
        mov.b32 {first, second}, a;
        cvt.rn.f16x2.e4m3x2 $0, first;
        cvt.rn.f16x2.e4m3x2 $1, second;
        }
        """,
        "=r,=r,r",
        [words],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def f8_as_bf16(x):
    """Return numbers of f8e4m3 in bf16."""
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
        [x],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def i8_as_bf16(x):
    """Return numbers of i8 in bf16."""
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
        [x],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )
