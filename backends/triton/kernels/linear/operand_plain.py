"""The operand loader of plain weights: by these functions, matmul kernels read a row-major weight in their dtype.

`ingot.backends.triton.operands` documents the arguments and results of a loader's functions.
"""

import triton
import triton.language as tl


@triton.jit
def begin_plain(weight, row, STORED: tl.constexpr):
    """Return the pointer to row number `row` of an unpacked weight. STORED is the weight's row stride in elements."""
    return weight + row * STORED


@triton.jit
def within_plain(local, k, STORED: tl.constexpr):
    """Return the offsets [rows, columns] of a block's elements, counted from the block's first row.

    `local` are the row numbers within the block, and `k` the columns. STORED is the weight's row stride in elements.
    """
    return local[:, None] * STORED + k[None, :]


@triton.jit
def load_plain(
    begin,
    within,
    start,
    k,
    n,
    N: tl.constexpr,
    K: tl.constexpr,
    STORED: tl.constexpr,
    WHOLE: tl.constexpr,
    EVICTION: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load a block of an unpacked weight, from column `start` on.

    `begin` points to the block's first row. `within` are the offsets of its elements. Rows with `n` >= N and columns
    from K on are zeros. WHOLE says that the block has no such rows and columns.
    """
    tl.static_assert(begin.dtype.element_ty == DTYPE)
    at = begin + within + start
    if WHOLE:
        return tl.load(at, eviction_policy=EVICTION)
    inside = (n < N)[:, None] & (start + k < K)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICTION)


@triton.jit
def fetch_plain(weight, rows, start, K: tl.constexpr, STORED: tl.constexpr, LINES: tl.constexpr):
    """Prefetch LINES lines of 128 bytes of each of the weight's rows `rows` into the L2 cache, from column `start` on.

    STORED is the row stride in elements, and K the number of columns.
    """
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    column = tl.minimum(start + tl.arange(0, LINES) * LINE, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [(weight + rows[:, None] * STORED + column[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
