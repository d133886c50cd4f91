"""Kernels of LoRA adapters: two matmuls of low rank, with the factors of each row's adapter.

A step of few rows reads other factors in each row, and its time is that of launches. There, a program takes one row
and a part of the factors, which it loads while the previous kernel ends. In a step with prompts, neighbouring rows have
the same adapter, and a program takes a tile of rows. It computes the tile once for each adapter in it, with the rows of
the others as zeros.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def lora_shrink_rows(
    x,
    slots,
    a,
    out,
    RANKS: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute `a[slot] @ x` of one row, f32[rows, RANKS], for x [rows, K] and a [adapters, RANKS, K].

    Grid: rows, cdiv(RANKS, BLOCK_R). A row with a slot below 0 gets zeros.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(slots + row).to(tl.int64)
    factors = a + tl.maximum(slot, 0) * RANKS * K + rank[:, None] * K
    k = tl.arange(0, BLOCK_K)
    held = (rank < RANKS)[:, None] & (slot >= 0)
    first = tl.load(factors + k[None, :], mask=held & (k < K)[None, :], other=0.0)
    if DEPENDENT:
        gdc_wait()
    total = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
    if slot >= 0:
        value = tl.load(x + row * X_ROW + k, mask=k < K, other=0.0).to(tl.float32)
        total += first.to(tl.float32) * value[None, :]
        for start in tl.static_range(BLOCK_K, K, BLOCK_K):
            later = start + k
            value = tl.load(x + row * X_ROW + later, mask=later < K, other=0.0).to(tl.float32)
            factor = tl.load(factors + later[None, :], mask=held & (later < K)[None, :], other=0.0)
            total += factor.to(tl.float32) * value[None, :]
    tl.store(out + row * RANKS + rank, tl.sum(total, 1), mask=rank < RANKS)


@triton.jit
def lora_shrink_tiles(
    x,
    slots,
    a,
    out,
    rows,
    RANKS: tl.constexpr,
    K: tl.constexpr,
    X_ROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute `a[slot] @ x` of BLOCK_T rows, f32[rows, RANKS], for x [rows, K] and a [adapters, RANKS, K].

    Grid: cdiv(rows, BLOCK_T), cdiv(RANKS, BLOCK_R). A row with a slot below 0 gets zeros.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    left = tl.load(slots + token, mask=token < rows, other=-1)
    source = x + token.to(tl.int64)[:, None] * X_ROW
    total = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    slot = tl.max(left, 0)
    while slot >= 0:
        mine = left == slot
        factors = a + slot.to(tl.int64) * RANKS * K + rank[None, :] * K
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            value = tl.load(source + k[None, :], mask=mine[:, None] & (k < K)[None, :], other=0.0)
            factor = tl.load(factors + k[:, None], mask=(rank < RANKS)[None, :] & (k < K)[:, None], other=0.0)
            total = tl.dot(value, factor, total, input_precision=PRECISION)
        left = tl.where(mine, -1, left)
        slot = tl.max(left, 0)
    held = (token < rows)[:, None] & (rank < RANKS)[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * RANKS + rank[None, :], total, mask=held)


@triton.jit
def _part(
    column,
    END0: tl.constexpr,
    END1: tl.constexpr,
    END2: tl.constexpr,
    END3: tl.constexpr,
    END4: tl.constexpr,
    END5: tl.constexpr,
    END6: tl.constexpr,
):
    """Return the part of a merged linear that a column belongs to. Part i ends before column ENDi."""
    part = (column >= END0).to(tl.int32) + (column >= END1).to(tl.int32) + (column >= END2).to(tl.int32)
    part += (column >= END3).to(tl.int32) + (column >= END4).to(tl.int32) + (column >= END5).to(tl.int32)
    return part + (column >= END6).to(tl.int32)


@triton.jit
def _expanded(factor, down, r, held, R: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the sums over the ranks `r` of factors [columns, ranks] times the shrunk values of one row.

    `down` points to the shrunk values of the columns' part: one address with ALIGNED, else one for each column.
    """
    if ALIGNED:
        shrunk = tl.load(down + r, mask=r < R, other=0.0)[None, :]
    else:
        shrunk = tl.load(down[:, None] + r[None, :], mask=held & (r < R)[None, :], other=0.0)
    return tl.sum(factor.to(tl.float32) * shrunk, 1)


@triton.jit
def lora_expand_rows(
    y,
    shrunk,
    slots,
    b,
    out,
    N: tl.constexpr,
    R: tl.constexpr,
    RANKS: tl.constexpr,
    Y_ROW: tl.constexpr,
    END0: tl.constexpr,
    END1: tl.constexpr,
    END2: tl.constexpr,
    END3: tl.constexpr,
    END4: tl.constexpr,
    END5: tl.constexpr,
    END6: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute `y + b[slot] @ shrunk` of one row, for y [rows, N], shrunk f32[rows, RANKS] and b [adapters, N, R].

    Grid: rows, cdiv(N, BLOCK_N). With ALIGNED, BLOCK_N divides the ends of all parts but the last, so the columns of a
    program are of one part. A row with a slot below 0 is copied.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(slots + row).to(tl.int64)
    factors = b + tl.maximum(slot, 0) * N * R + n[:, None] * R
    r = tl.arange(0, BLOCK_R)
    held = (n < N)[:, None] & (slot >= 0)
    first = tl.load(factors + r[None, :], mask=held & (r < R)[None, :], other=0.0)
    if DEPENDENT:
        gdc_wait()
    value = tl.load(y + row * Y_ROW + n, mask=n < N, other=0.0).to(tl.float32)
    if slot >= 0:
        columns = tl.program_id(1) * BLOCK_N if ALIGNED else n
        down = shrunk + row * RANKS + _part(columns, END0, END1, END2, END3, END4, END5, END6) * R
        value += _expanded(first, down, r, held, R, ALIGNED)
        for start in tl.static_range(BLOCK_R, R, BLOCK_R):
            later = start + r
            factor = tl.load(factors + later[None, :], mask=held & (later < R)[None, :], other=0.0)
            value += _expanded(factor, down, later, held, R, ALIGNED)
    tl.store(out + row * N + n, value.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def lora_expand_tiles(
    y,
    shrunk,
    slots,
    b,
    out,
    rows,
    N: tl.constexpr,
    R: tl.constexpr,
    RANKS: tl.constexpr,
    Y_ROW: tl.constexpr,
    END0: tl.constexpr,
    END1: tl.constexpr,
    END2: tl.constexpr,
    END3: tl.constexpr,
    END4: tl.constexpr,
    END5: tl.constexpr,
    END6: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute `y + b[slot] @ shrunk` of BLOCK_T rows, for y [rows, N], shrunk f32[rows, RANKS] and b [adapters, N, R].

    Grid: cdiv(rows, BLOCK_T), cdiv(N, BLOCK_N). BLOCK_N divides the ends of all parts but the last. Rows with a slot
    below 0 are copied.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (token < rows)[:, None] & (n < N)[None, :]
    total = tl.load(y + token.to(tl.int64)[:, None] * Y_ROW + n[None, :], mask=inside, other=0.0).to(tl.float32)
    part = _part(tl.program_id(1) * BLOCK_N, END0, END1, END2, END3, END4, END5, END6)
    down = shrunk + token.to(tl.int64)[:, None] * RANKS + part * R
    left = tl.load(slots + token, mask=token < rows, other=-1)
    slot = tl.max(left, 0)
    while slot >= 0:
        mine = left == slot
        factors = b + slot.to(tl.int64) * N * R + n[None, :] * R
        for start in range(0, R, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            value = tl.load(down + r[None, :], mask=mine[:, None] & (r < R)[None, :], other=0.0)
            factor = tl.load(factors + r[:, None], mask=(n < N)[None, :] & (r < R)[:, None], other=0.0)
            total = tl.dot(value, factor.to(tl.float32), total, input_precision=PRECISION)
        left = tl.where(mine, -1, left)
        slot = tl.max(left, 0)
    tl.store(out + token.to(tl.int64)[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=inside)
