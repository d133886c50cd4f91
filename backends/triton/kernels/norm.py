"""The kernel of RMS and layer norms over the last axis, optionally with a residual add before the norm."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.linear.parts import scaled


@triton.jit
def norm(
    x,
    residual,
    weight,
    bias,
    total,
    result,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_ROW: tl.constexpr,
    X_GROUP: tl.constexpr,
    RESIDUAL_ROW: tl.constexpr,
    RESIDUAL_GROUP: tl.constexpr,
    WEIGHT_GROUP: tl.constexpr,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Norm x [rows, GROUPS, WIDTH] over WIDTH, multiply by the weight, and write it to `result`, row-major.

    A program takes BLOCK_GROUPS groups of a row. If `residual` is given, the kernel norms x + residual, and also writes
    this sum, rounded, to `total`. With CENTRED it subtracts the mean first (a layer norm). `bias` has the layout of the
    weight, or is None. Without a bias, intermediate values are rounded as in the op `rms_norm`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (group < GROUPS) & (column < WIDTH)
    gain = tl.load(weight + group * WEIGHT_GROUP + column, mask=mask, other=0.0)
    place = (row * GROUPS + group) * WIDTH + column
    if DEPENDENT:
        gdc_wait()
    value = tl.load(x + row * X_ROW + group * X_GROUP + column, mask=mask, other=0.0)
    if residual is not None:
        added = tl.load(residual + row * RESIDUAL_ROW + group * RESIDUAL_GROUP + column, mask=mask, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + place, value, mask=mask)
    full = value.to(tl.float32)
    if CENTRED:
        full = tl.where(mask, full - tl.sum(full, 1)[:, None] / WIDTH, 0.0)
    inverse = tl.rsqrt(tl.sum(full * full, 1) / WIDTH + EPS)[:, None]
    if bias is not None:
        shift = tl.load(bias + group * WEIGHT_GROUP + column, mask=mask, other=0.0)
        normed = full * inverse * gain.to(tl.float32) + shift.to(tl.float32)
    else:
        normed = scaled(full, inverse, gain, x.dtype.element_ty)
    tl.store(result + place, normed.to(result.dtype.element_ty), mask=mask)
