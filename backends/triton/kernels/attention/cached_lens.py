"""The kernel that counts the cached positions of each sequence: those before the tokens of the step."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["sequences"])
def cached_lens(kv_lens, q_lens, out, sequences, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Write `kv_lens - q_lens` [sequences] to `out`. Grid: cdiv(sequences, BLOCK)."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < sequences
    lens = tl.load(kv_lens + b, mask=inside, other=0) - tl.load(q_lens + b, mask=inside, other=0)
    tl.store(out + b, lens, mask=inside)
