"""Kernels on several residual streams per token, [rows, streams, WIDTH]: mix, concatenate, rescale.

Results are row-major.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def mix_streams(
    x,
    weights,
    result,
    STREAMS: tl.constexpr,
    MIXED: tl.constexpr,
    WIDTH: tl.constexpr,
    X_ROW: tl.constexpr,
    X_STREAM: tl.constexpr,
    WEIGHT_ROW: tl.constexpr,
    WEIGHT_MIXED: tl.constexpr,
    WEIGHT_STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute MIXED weighted sums of the residual streams of x [rows, STREAMS, WIDTH], and write them to `result`.

    `weights` is [rows, MIXED, STREAMS], a weight per sum and stream. A program takes BLOCK columns of one sum of a row.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, mixed = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for stream in tl.static_range(STREAMS):
        weight = tl.load(weights + row * WEIGHT_ROW + mixed * WEIGHT_MIXED + stream * WEIGHT_STREAM).to(tl.float32)
        value = tl.load(x + row * X_ROW + stream * X_STREAM + column, mask=mask, other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(result + (row * MIXED + mixed) * WIDTH + column, total.to(result.dtype.element_ty), mask=mask)


@triton.jit
def join(
    x,
    y,
    result,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_GROUPS: tl.constexpr,
    X_WIDTH: tl.constexpr,
    X_ROW: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_COLUMN: tl.constexpr,
    Y_ROW: tl.constexpr,
    Y_GROUP: tl.constexpr,
    Y_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Concatenate x and y to `result` [rows, GROUPS, WIDTH], along groups or along columns.

    x is [rows, X_GROUPS, X_WIDTH]. If X_GROUPS equals GROUPS, x and y are joined along columns, else along groups.
    X_ROW, X_GROUP, X_COLUMN and Y_… are strides in elements.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    of_x = (group < X_GROUPS) & (column < X_WIDTH)
    y_group, y_column = group - X_GROUPS % GROUPS, column - X_WIDTH % WIDTH
    left = tl.load(x + row * X_ROW + group * X_GROUP + column * X_COLUMN, mask=mask & of_x, other=0.0)
    right = tl.load(y + row * Y_ROW + y_group * Y_GROUP + y_column * Y_COLUMN, mask=mask & ~of_x, other=0.0)
    tl.store(result + (row * GROUPS + group) * WIDTH + column, tl.where(of_x, left, right), mask=mask)


@triton.jit
def match_size(
    x,
    like,
    result,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_ROW: tl.constexpr,
    X_GROUP: tl.constexpr,
    LIKE_ROW: tl.constexpr,
    LIKE_GROUP: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Scale each group of x [rows, GROUPS, WIDTH] to the root mean square of the same group of the tensor `like`.

    A mean square of x below LEAST counts as LEAST. A program takes one group of a row.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    full = tl.load(x + row * X_ROW + group * X_GROUP + column, mask=mask, other=0.0).to(tl.float32)
    wanted = tl.load(like + row * LIKE_ROW + group * LIKE_GROUP + column, mask=mask, other=0.0).to(tl.float32)
    size = tl.maximum(tl.sum(full * full, 0) / WIDTH, LEAST)
    value = full * tl.sqrt(tl.sum(wanted * wanted, 0) / WIDTH / size)
    tl.store(result + (row * GROUPS + group) * WIDTH + column, value.to(result.dtype.element_ty), mask=mask)
