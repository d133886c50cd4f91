"""The kernel that merges the splits of decode attention if one result of a split is large.

Over cached latents, all q heads share one kv head, and their values are wide: the splits of a token then hold up to a
megabyte. One program of `decode_attention` would read them at a hundredth of the bandwidth of the L2 cache.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.splits import merge_splits_of


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
    DEPENDENT: tl.constexpr,
):
    """Merge the splits that `decode_attention` wrote with SPLITS.apart, a q head per program.

    Grid: (rows * kv_heads, q heads of a kv head / SPLITS.heads_at_once). Rows are tokens, or with SPLITS.single
    sequences. `used` i32[rows, kv_heads] has the number of splits of each context. With 0 or 1, `decode_attention`
    wrote the result, if there is one. The other arguments are those of `decode_attention`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0)
    splits = tl.load(used + pair)
    if splits <= 1:
        return
    row = pair
    if SPLITS.single:
        row = tl.load(q_starts + pair // FORM.kv_heads) * FORM.kv_heads + pair % FORM.kv_heads
    merge_splits_of(
        out, lse, partial, sizes, row, pair, splits, tl.program_id(1) * SPLITS.heads_at_once, FORM, SPLITS
    )
