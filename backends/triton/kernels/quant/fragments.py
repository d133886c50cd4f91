"""Weights of f4e2m1 times few tokens, by the tensor-core instruction of a warp, from the registers that loads fill.

An instruction m16n8k16 multiplies 16 rows and 16 columns of a weight with the same columns of 8 tokens. Lane 4 g + t of
a warp has four columns of the rows g and g + 8, and of token g. These can be any columns, if all lanes with the same t
have the same ones. So a lane loads the 32 adjacent elements of a row that 16 bytes store. They have one scale, and are
used in the order in which they are stored. No operand goes through shared memory, and warps do not wait for each other.

Tensors have a row for each thread, and four columns, which are adjacent registers. The columns 0 and 1 of sums belong
to row g and the tokens 2 t and 2 t + 1. The columns 2 and 3 belong to row g + 8.

An f4e2m1 has a sign and the bits of a bf16 whose exponent is 126 too small. Four bits times 65 are the four bits twice,
six places apart, without a carry. So one multiplication brings the sign and the other bits to their places.
"""

import triton
import triton.language as tl


@triton.jit
def fragments(words, others, factors, other_factors, ASSEMBLY: tl.constexpr):
    """Return elements times factors as eight tensors i32 [threads, 4]: the left operands of eight instructions.

    `words` i32 [threads, 4] are 32 elements of row g, and `others` those of row g + 8. `factors` i32 [threads] are two
    equal bf16 numbers for each, the scales as `factors_of` returns them.
    """
    # Operands of assembly have one shape.
    wide = tl.broadcast_to(factors[:, None], words.shape)
    other_wide = tl.broadcast_to(other_factors[:, None], words.shape)
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _CONVERT,
            _CONSTRAINTS_OF_CONVERT,
            [words, others, wide, other_wide],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=4,
        )
    else:
        return (
            _fragment(words, others, wide, other_wide, 0),
            _fragment(words, others, wide, other_wide, 1),
            _fragment(words, others, wide, other_wide, 2),
            _fragment(words, others, wide, other_wide, 3),
            _fragment(words, others, wide, other_wide, 4),
            _fragment(words, others, wide, other_wide, 5),
            _fragment(words, others, wide, other_wide, 6),
            _fragment(words, others, wide, other_wide, 7),
        )


@triton.constexpr_function
def _convert():
    """Return the instructions of `fragments`. Words are $32 to $39, factors $40 and $44."""
    lines = ["{ .reg .b32 w, a;"]
    for word in range(4):
        for other in range(2):
            source = f"${32 + 4 * other + word}"
            for place in range(4):
                # The elements number `place` and `place` + 4. Those of the upper byte of each half are moved down.
                if place == 2:
                    lines.append(f"shr.b32 w, {source}, 8;")
                mask, factor = (0x000F000F, 65 << 6) if place % 2 == 0 else (0x00F000F0, 65 << 2)
                target = f"${4 * (2 * word + place // 2) + other + 2 * (place % 2)}"
                lines += [
                    f"and.b32 a, {source if place < 2 else 'w'}, 0x{mask:08x};",
                    f"mul.lo.u32 a, a, {factor};",
                    "and.b32 a, a, 0x81c081c0;",
                    f"mul.rn.bf16x2 {target}, a, ${40 + 4 * other};",
                ]
    return "\n".join([*lines, "}"])


_CONVERT = tl.constexpr(_convert())
_CONSTRAINTS_OF_CONVERT = tl.constexpr(",".join(["=&r"] * 32 + ["r"] * 16))


@triton.jit
def _fragment(words, others, factors, other_factors, NTH: tl.constexpr):
    """Return the left operand of instruction NTH, without assembly."""
    column = tl.arange(0, 4)[None, :]
    own = tl.where(column % 2 == 0, _nth(words, NTH // 2)[:, None], _nth(others, NTH // 2)[:, None])
    factor = tl.where(column % 2 == 0, factors, other_factors)
    shift = 4 * (2 * (NTH % 2) + column // 2)
    return _bf16_bits(_e2m1(own >> shift), factor) | (_bf16_bits(_e2m1(own >> (shift + 16)), factor) << 16)


@triton.jit
def _nth(words, NTH: tl.constexpr):
    """Return column NTH of a tensor of four columns."""
    return tl.sum(tl.where(tl.arange(0, 4)[None, :] == NTH, words, 0), 1)


@triton.jit
def _e2m1(bits):
    exponent, mantissa = (bits >> 1) & 3, bits & 1
    doubled = tl.where(exponent == 0, mantissa, (2 + mantissa) << (tl.maximum(exponent, 1) - 1)).to(tl.float32)
    return tl.where((bits & 8) != 0, -0.5 * doubled, 0.5 * doubled)


@triton.jit
def _bf16_bits(numbers, factors):
    """Return the bits of `numbers` f32 times the lower bf16 of `factors`, which must be exact in bf16."""
    scaled = numbers * (factors << 16).to(tl.float32, bitcast=True)
    return (scaled.to(tl.int32, bitcast=True) >> 16) & 0xFFFF


@triton.jit
def products_added(sums, left, x0, x1, x2, x3, ASSEMBLY: tl.constexpr):
    """Return `sums` f32 [threads, 4] plus the matmul of `fragments` and x.

    `left` are the eight tensors of `fragments`. x0 to x3 i32 [threads, 4] are the same 32 columns of token g in bf16:
    of each 8 columns, number i + 4 follows number i.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            _MULTIPLY,
            _CONSTRAINTS_OF_MULTIPLY,
            [left[0], left[1], left[2], left[3], left[4], left[5], left[6], left[7], x0, x1, x2, x3, sums],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        sums = _multiplied(_multiplied(sums, left[0], x0, 0), left[1], x0, 2)
        sums = _multiplied(_multiplied(sums, left[2], x1, 0), left[3], x1, 2)
        sums = _multiplied(_multiplied(sums, left[4], x2, 0), left[5], x2, 2)
        return _multiplied(_multiplied(sums, left[6], x3, 0), left[7], x3, 2)


@triton.constexpr_function
def _multiply():
    """Return the instructions of `products_added`. Left operands are $4 to $35, x is $36 to $51, and sums from $52."""
    lines = ["{ .reg .f32 c<4>;", *(f"mov.f32 c{nth}, ${52 + nth};" for nth in range(4))]
    for nth in range(8):
        left = ", ".join(f"${4 + 4 * nth + register}" for register in range(4))
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            f"{{c0, c1, c2, c3}}, {{{left}}}, {{${36 + 2 * nth}, ${37 + 2 * nth}}}, {{c0, c1, c2, c3}};"
        )
    return "\n".join([*lines, *(f"mov.f32 ${nth}, c{nth};" for nth in range(4)), "}"])


_MULTIPLY = tl.constexpr(_multiply())
_CONSTRAINTS_OF_MULTIPLY = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 48 + ["f"] * 4))


@triton.jit
def _multiplied(sums, left, x, BEGIN: tl.constexpr):
    """Return `sums` plus what one instruction adds, without assembly: `left` times two columns of x, from BEGIN on."""
    THREADS: tl.constexpr = sums.shape[0]
    low, high = _nth(x, BEGIN), _nth(x, BEGIN + 1)
    rows = _of_row(_nth(left, 0), _nth(left, 2), low, high)
    others = _of_row(_nth(left, 1), _nth(left, 3), low, high)
    added = tl.join(tl.reshape(rows, (THREADS, 2)), tl.reshape(others, (THREADS, 2)))
    return sums + tl.reshape(tl.permute(added, (0, 2, 1)), (THREADS, 4))


@triton.jit
def _of_row(left, other_left, x, other_x):
    """Return the sums of all lanes' columns: [warps, row g, token], from their operands i32 [threads]."""
    WARPS: tl.constexpr = left.shape[0] // 32
    products = tl.zeros((WARPS, 8, 8, 4), tl.float32)
    for upper in tl.static_range(2):
        products += _half(left, upper, (WARPS, 8, 1, 4)) * _half(x, upper, (WARPS, 1, 8, 4))
        products += _half(other_left, upper, (WARPS, 8, 1, 4)) * _half(other_x, upper, (WARPS, 1, 8, 4))
    return tl.sum(products, 3)


@triton.jit
def _half(pairs, UPPER: tl.constexpr, SHAPE: tl.constexpr):
    """Return the lower or upper bf16 numbers of `pairs` i32 [threads] as float32 of a shape."""
    bits = (pairs >> 16) << 16 if UPPER else pairs << 16
    return tl.reshape(bits.to(tl.float32, bitcast=True), SHAPE)
