"""Elementwise kernels on tensors [rows, GROUPS, WIDTH]: a program takes BLOCK columns of one group.

Results are row-major.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def tanh(x):
    """Return tanh(x) of a float32 tensor x.

    It uses exp. Near 0, where that loses digits, it uses the power series (error below 1e-9 at |x| = 0.1).
    """
    shrunk = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - shrunk) / (1.0 + shrunk)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0.0, -far, far))


@triton.jit
def arithmetic(
    x,
    other,
    result,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_ROW: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_COLUMN: tl.constexpr,
    OTHER_ROW: tl.constexpr,
    OTHER_GROUP: tl.constexpr,
    OTHER_COLUMN: tl.constexpr,
    NUMBER: tl.constexpr,
    MULTIPLY: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute x + other in float32, or x * other with MULTIPLY, and write it to `result` [rows, GROUPS, WIDTH].

    If `other` is None, the second operand is the constant NUMBER. X_ROW, X_GROUP, X_COLUMN and OTHER_… are strides in
    elements. A stride of 0 broadcasts.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    value = tl.load(x + row * X_ROW + group * X_GROUP + column * X_COLUMN, mask=mask, other=0.0).to(tl.float32)
    if other is not None:
        place = row * OTHER_ROW + group * OTHER_GROUP + column * OTHER_COLUMN
        right = tl.load(other + place, mask=mask, other=0.0).to(tl.float32)
    else:
        right = NUMBER
    if MULTIPLY:
        value = value * right
    else:
        value = value + right
    tl.store(result + (row * GROUPS + group) * WIDTH + column, value.to(result.dtype.element_ty), mask=mask)


@triton.jit
def convert(
    x,
    result,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_ROW: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_COLUMN: tl.constexpr,
    CAP: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Convert x [rows, GROUPS, WIDTH] to the dtype of `result`: the ops `cast`, `soft_cap` and `clamp`.

    Unless CAP is None, x is soft-capped first: CAP * tanh(x / CAP). Unless LIMIT is None, x is clamped to [-LIMIT,
    LIMIT]. NaN stays NaN. X_ROW, X_GROUP and X_COLUMN are strides in elements.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    value = tl.load(x + row * X_ROW + group * X_GROUP + column * X_COLUMN, mask=mask, other=0.0)
    if CAP is not None:
        value = tanh(value.to(tl.float32) / CAP) * CAP
    if LIMIT is not None:
        value = value.to(tl.float32)
        value = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))
    tl.store(result + (row * GROUPS + group) * WIDTH + column, value.to(result.dtype.element_ty), mask=mask)


@triton.jit
def scale_by_position(
    x,
    positions,
    result,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_ROW: tl.constexpr,
    X_GROUP: tl.constexpr,
    X_COLUMN: tl.constexpr,
    PERIOD: tl.constexpr,
    STRENGTH: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `scale_by_position` of x [rows, GROUPS, WIDTH]: times 1 + STRENGTH * ln(1 + n) in float32.

    n counts the periods of PERIOD positions before the row's position plus SHIFT. X_ROW, X_GROUP and X_COLUMN are
    strides in elements.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    value = tl.load(x + row * X_ROW + group * X_GROUP + column * X_COLUMN, mask=mask, other=0.0).to(tl.float32)
    periods = (tl.load(positions + row) + SHIFT) // PERIOD
    value = value * (1.0 + STRENGTH * tl.log(1.0 + periods.to(tl.float32)))
    tl.store(result + (row * GROUPS + group) * WIDTH + column, value.to(result.dtype.element_ty), mask=mask)
