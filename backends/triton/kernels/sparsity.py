"""The kernel of gaussian_top_k, a sparse activation that keeps only the largest elements of a row."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def keep_above(
    x,
    result,
    WIDTH: tl.constexpr,
    X_ROW: tl.constexpr,
    DEVIATIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute relu(x - cutoff) of x [rows, WIDTH], and write it to `result`. A program takes a row.

    The cutoff of a row is its mean plus DEVIATIONS standard deviations.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    full = tl.load(x + row * X_ROW + column, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, full - tl.sum(full, 0) / WIDTH, 0.0)
    deviation = tl.sqrt(tl.sum(centred * centred, 0) / WIDTH)
    value = tl.maximum(centred - DEVIATIONS * deviation, 0.0)
    tl.store(result + row * WIDTH + column, value.to(result.dtype.element_ty), mask=mask)
