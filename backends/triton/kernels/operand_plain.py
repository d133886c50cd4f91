"""The operand loader of plain weights: by these functions, matmul kernels read a row-major weight in their dtype.

`ingot.backends.triton.operands` documents the arguments and results of a loader's functions.
"""

import triton
import triton.language as tl


@triton.jit
def begin_plain(weight, row, STORED: tl.constexpr):
    """Return the pointer to the weight's row number `row`. STORED is the row stride in elements."""
    return weight + row * STORED


@triton.jit
def within_plain(local, k, STORED: tl.constexpr):
    """Return the offsets [rows, columns] of a block's elements from its first one, for rows `local` and columns `k`.

    STORED is the row stride in elements.
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
    """Load a block of the weight from column `start` on, at `begin` (its first row) plus the offsets `within`.

    Rows with `n` >= N and columns from K on are zeros. With WHOLE, a block has no such rows or columns.
    """
    tl.static_assert(begin.dtype.element_ty == DTYPE)
    at = begin + within + start
    if WHOLE:
        return tl.load(at, eviction_policy=EVICTION)
    inside = (n < N)[:, None] & (start + k < K)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICTION)


@triton.jit
def fetch_plain(weight, rows, start, K: tl.constexpr, STORED: tl.constexpr, LINES: tl.constexpr):
    """Prefetch LINES lines of 128 bytes of each of the weight's rows `rows` into the L2 cache, from column `start`."""
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
