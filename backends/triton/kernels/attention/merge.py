"""The kernel that merges the splits of attention if the result of a split is large.

Over cached latents, all q heads share one kv head, and their values are wide: the splits of a token then hold up to a
megabyte. One program of `decode_attention` would read them at a hundredth of the bandwidth of the L2 cache.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.softmax import LOWEST, log_sum_exp


@triton.jit
def merge_attention(
    out,
    lse,
    partial,
    sizes,
    used,
    q_starts,
    FORM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge the splits that `decode_attention` wrote with SPLITS.apart, `decode_latents` or `sparse_attention`.

    Grid: (rows * kv_heads, FORM.group, cdiv(FORM.value_dim, COLUMNS)). Rows are tokens, or with SPLITS.single
    sequences. A program computes COLUMNS columns of a q head. `used` i32[rows, kv_heads] has the number of splits of
    each context. With 0 or 1, an earlier kernel has written the result, if there is one.

    BLOCK_SPLITS is a power of two, and not less than SPLITS.most. The kernel adds the results of AT_ONCE splits per
    iteration. The other arguments are those of `decode_attention`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    splits = tl.load(used + pair)
    if splits <= 1:
        return
    s = tl.arange(0, BLOCK_SPLITS)
    here = (pair * SPLITS.most + s) * FORM.group + g
    size = tl.load(sizes + here, mask=s < splits, other=LOWEST)
    peak = tl.max(size, 0)
    weight_sum = tl.sum(tl.exp2(size - peak), 0)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < FORM.value_dim
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, splits, AT_ONCE):
        n = first + tl.arange(0, AT_ONCE)
        at = (pair * SPLITS.most + n) * FORM.group + g
        share = tl.exp2(tl.load(sizes + at, mask=n < splits, other=LOWEST) - peak)
        rows = partial + at[:, None] * FORM.value_dim + column[None, :]
        part = tl.load(rows, mask=(n < splits)[:, None] & inside[None, :], other=0.0)
        total += tl.sum(part * share[:, None], 0)
    row = pair
    if SPLITS.single:
        first = tl.load(q_starts + pair // FORM.kv_heads).to(tl.int64)
        row = first * FORM.kv_heads + pair % FORM.kv_heads
    row = row * FORM.group + g
    tl.store(out + row * FORM.value_dim + column, (total / weight_sum).to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        tl.store(lse + row, log_sum_exp(weight_sum, peak), mask=tl.program_id(2) == 0)
