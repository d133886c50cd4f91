"""How products read a weight that is stored plain: row-major, in the element type of the product.

`ingot.backends.triton.operands` says what the loader of any packing is given and gives.
"""

import triton
import triton.language as tl


@triton.jit
def begin_plain(weight, row, STORED: tl.constexpr):
    """The address of a row. STORED is the stride of rows."""
    return weight + row * STORED


@triton.jit
def within_plain(local, k, STORED: tl.constexpr):
    """Where the elements of a block lie behind its first one."""
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
    """A block of the weight."""
    tl.static_assert(begin.dtype.element_ty == DTYPE)
    at = begin + within + start
    if WHOLE:
        return tl.load(at, eviction_policy=EVICTION)
    inside = (n < N)[:, None] & (start + k < K)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICTION)


@triton.jit
def fetch_plain(weight, rows, start, K: tl.constexpr, STORED: tl.constexpr, LINES: tl.constexpr):
    """Ask for the lines of some rows to come into the L2 cache."""
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
