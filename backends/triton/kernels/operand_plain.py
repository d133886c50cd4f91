"""The loader of plain weights for `linear` kernels: row-major, in the dtype of the matmul.

`ingot.backends.triton.operands` documents the arguments and results of a loader's functions.
"""

import triton
import triton.language as tl


@triton.jit
def begin_plain(weight, row, STORED: tl.constexpr):
    """Return the address of a row. STORED is the row stride."""
    return weight + row * STORED


@triton.jit
def within_plain(local, k, STORED: tl.constexpr):
    """Return the offsets of a block's elements from its first one."""
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
    """Load a block of the weight."""
    tl.static_assert(begin.dtype.element_ty == DTYPE)
    at = begin + within + start
    if WHOLE:
        return tl.load(at, eviction_policy=EVICTION)
    inside = (n < N)[:, None] & (start + k < K)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICTION)


@triton.jit
def fetch_plain(weight, rows, start, K: tl.constexpr, STORED: tl.constexpr, LINES: tl.constexpr):
    """Prefetch LINES lines of some rows into the L2 cache."""
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
