"""The launch that prepares x for a matmul with a quantized weight: it norms, rounds and reorders rows."""

from dataclasses import dataclass

import torch
import triton.language as tl

from ingot.backends.triton.kernels.quant.columns import row_size
from ingot.backends.triton.kernels.quant.constants import Rounded
from ingot.backends.triton.kernels.quant.prepare_rows import prepare_rows
from ingot.backends.triton.launches import Expr, times
from ingot.backends.triton.lower.linear.call import Norm
from ingot.backends.triton.lower.quant.form import StoredForm
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.rows import PER_WARP
from ingot.backends.triton.lower.sizes import power_of_two
from ingot.backends.triton.schedule import Schedule, Value

# Columns per program of `prepare_rows`, where a row is not one block.
_BLOCK = 1024
# A row whose scale or norm needs all columns is held in registers: 128 bytes for each of 1024 threads.
_MOST_PREPARED = 32768
_MOST_WARPS = 32
# The dtypes of numbers that the kernels multiply.
KERNEL_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.int8: tl.int8,
}


@dataclass(frozen=True)
class GivenRows:
    """The rows of x [rows, depth] that a matmul multiplies, and what precedes it.

    `norm` is a fused norm. `up` [rows, depth] is what a gate multiplies, after its `activation` of x. `stored` is the
    stored scale of x, f32[1]. `order` i32[depth] lists the column of x for each column of the weight. Each may be None.
    """

    x: Value
    rows: Expr
    depth: int
    norm: Norm | None = None
    stored: Value | None = None
    order: Value | None = None
    up: Value | None = None
    activation: str = ""


def needs_preparing(form: StoredForm) -> bool:
    """Return whether the matmul of several tokens reads x in another form than it has, without a norm."""
    return form.rounded.element != "none" or form.elements.chunk > 0


def prepared_rows(
    given: GivenRows, form: StoredForm, schedule: Schedule, tokens: int | None, here: Expr = 1
) -> tuple[Value, Value | None]:
    """Return x as the matmul reads it, and its scales: normed, rounded and reordered, if the matmul needs that.

    The matmul kernel is compiled for `tokens` rows; None: any number. `here` is 1 for the steps that need it, else 0.
    Raises Refused if rows are too long for their norm or scale.
    """
    rounded, rows, depth = form.rounded, given.rows, given.depth
    if given.norm is None and given.order is None and not needs_preparing(form):
        return given.x, None
    block = _columns_of_block(given, rounded)
    result = schedule.scratch(form.codes, (rows, row_size(depth, form.elements.chunk)))
    scales = None
    if rounded.element != "none" and not rounded.stored:
        scales = schedule.scratch(
            torch.float32, (-(-depth // (rounded.columns or depth)), rows if tokens is None else tokens)
        )
    _launch(given, rounded, schedule, result, scales, block, here, chunk=form.elements.chunk, tokens=tokens or 0)
    return result, scales if given.stored is None else given.stored


def round_into(given: GivenRows, rounded: Rounded, schedule: Schedule, result: Value, scales: Value) -> None:
    """Add the launch that writes rounded rows to `result` [rows, depth], and scales to `scales` f32[rows, groups].

    Raises Refused if rows are too long for their scale.
    """
    _launch(given, rounded, schedule, result, scales, _columns_of_block(given, rounded), by_row=True)


def _columns_of_block(given: GivenRows, rounded: Rounded) -> int:
    """Return the columns of a program. Raises Refused if rows are too long for their norm or scale."""
    depth = given.depth
    whole = given.norm is not None or (rounded.element != "none" and not rounded.stored and not rounded.columns)
    if whole and depth > _MOST_PREPARED:
        raise Refused(f"a norm or scale over {depth} elements, more than {_MOST_PREPARED}")
    block = power_of_two(depth) if whole else min(_BLOCK, power_of_two(depth))
    return max(block, rounded.columns)


def _launch(
    given: GivenRows,
    rounded: Rounded,
    schedule: Schedule,
    result: Value,
    scales: Value | None,
    block: int,
    here: Expr = 1,
    *,
    chunk: int = 0,
    tokens: int = 0,
    by_row: bool = False,
) -> None:
    norm, x, up = given.norm, given.x, given.up
    schedule.launch(
        prepare_rows,
        (times(here, given.rows), -(-given.depth // block)),
        {
            "x": x,
            "gain": norm.weight if norm else None,
            "up": up,
            "stored": given.stored,
            "order": given.order,
            "result": result,
            "scales": scales,
            "rows": given.rows,
        },
        {
            "WIDTH": given.depth,
            "X_ROW": x.strides[0],
            "UP_ROW": up.strides[0] if up else 0,
            "EPS": norm.eps if norm else 0.0,
            "NORM": norm is not None,
            "ACTIVATION": given.activation,
            "ROUNDED": rounded,
            "CHUNK": chunk,
            "TOKENS": tokens,
            "BY_ROW": by_row,
            "BLOCK": block,
            "DEPENDENT": schedule.dependent,
        },
        warps=min(_MOST_WARPS, max(1, block // PER_WARP)),
        dependent=schedule.dependent,
    )
