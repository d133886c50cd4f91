"""The kernel that prepares rows for a matmul with a quantized weight: it norms, gates, rounds and reorders them."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.linear.parts import gated, scaled
from ingot.backends.triton.kernels.quant.columns import place_in_row, row_size
from ingot.backends.triton.kernels.quant.rounding import magnitude, nearest, scale_of


@triton.jit
def prepare_rows(
    x,
    gain,
    up,
    stored,
    order,
    result,
    scales,
    rows,
    WIDTH: tl.constexpr,
    X_ROW: tl.constexpr,
    UP_ROW: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROUNDED: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Write rows of x [rows, WIDTH] to `result` [rows, WIDTH]. The columns are those that `order` i32[WIDTH] lists, if
    it is given. The steps, in this order:

    - NORM: normed by an rms_norm with the weight `gain`, and rounded to the dtype of x
    - ACTIVATION, with `up` [rows, WIDTH]: ACTIVATION(x) * up, rounded to the dtype of x
    - ROUNDED: divided by a scale and rounded to an element type, as the format of a weight says. `scales` receives the
      scales f32 [groups, TOKENS], or f32 [groups, rows] if TOKENS is 0, or f32 [rows, groups] with BY_ROW. A stored
      scale is read from `stored` f32[1], and written only with BY_ROW.
    - CHUNK: reordered, if not 0, as kernels for four-bit elements read columns (`columns.py`)

    Grid: rows, cdiv(WIDTH, BLOCK). A block is a whole row if there is a norm, or a scale for all columns.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    given = column if order is None else tl.load(order + column, mask=inside, other=0)
    if NORM:
        weight = tl.load(gain + given, mask=inside, other=0.0)
    if ROUNDED.stored:
        scale = tl.load(stored)
    if DEPENDENT:
        gdc_wait()
    value = tl.load(x + row * X_ROW + given, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(value * value) / WIDTH + EPS)
        value = scaled(value, inverse, weight, x.dtype.element_ty)
        value = value.to(x.dtype.element_ty).to(tl.float32)
    if up is not None:
        factor = tl.load(up + row * UP_ROW + given, mask=inside, other=0.0).to(tl.float32)
        value = gated(value, factor, ACTIVATION).to(x.dtype.element_ty).to(tl.float32)
    if ROUNDED.element != "none":
        if ROUNDED.stored:
            if BY_ROW:
                tl.store(scales + row, scale)
            value = nearest(tl.div_rn(value, scale + value * 0.0), ROUNDED)
        else:
            COLUMNS: tl.constexpr = ROUNDED.columns if ROUNDED.columns > 0 else BLOCK
            GROUPS: tl.constexpr = BLOCK // COLUMNS
            groups = tl.reshape(value, (GROUPS, COLUMNS))
            scale = scale_of(magnitude(groups, 1), ROUNDED)
            # A group with a NaN is NaN.
            scale += tl.sum(tl.where(groups == groups, 0.0, groups), 1)
            groups = tl.div_rn(groups, tl.broadcast_to(scale[:, None], (GROUPS, COLUMNS)))
            value = tl.reshape(nearest(groups, ROUNDED), (BLOCK,))
            ALL: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
            nth = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
            if BY_ROW:
                tl.store(scales + row * ALL + nth, scale, mask=nth < ALL)
            else:
                tl.store(scales + nth * (TOKENS if TOKENS > 0 else rows) + row, scale, mask=nth < ALL)
    tl.store(
        result + row * row_size(WIDTH, CHUNK) + place_in_row(column, CHUNK),
        value.to(result.dtype.element_ty),
        mask=inside,
    )
