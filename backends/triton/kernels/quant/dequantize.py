"""The kernel that writes a quantized weight as a matrix of numbers.

Its time is that of the bytes that it reads and writes. A program reads its tile with wide loads. Elements are converted
exactly, two at a time where they have 16 bits (`elements.py`), and multiplied by their scales in float32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.quant.elements import converted, operand_of, outer_scales, quarter, scale_value


@triton.jit
def dequantize(
    weight,
    scales,
    zeros,
    outer,
    result,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the op `dequantize`: result [N, K] from a weight stored as ELEMENTS describes (`Elements`).

    Grid: cdiv(K, PARTS * COLUMNS), cdiv(N, ROWS). A program writes ROWS rows of PARTS parts of COLUMNS columns. A part
    has one scale in each row. DTYPE is the dtype to which elements are converted before they become float32.
    """
    if DEPENDENT:
        gdc_launch_dependents()
    TILE: tl.constexpr = PARTS * COLUMNS
    first, start = tl.program_id(1).to(tl.int64) * ROWS, tl.program_id(0) * TILE
    r, part = tl.arange(0, ROWS), tl.arange(0, PARTS)
    # Rows past the last one repeat it and are not stored.
    local = tl.minimum(r, N - 1 - first).to(tl.int32) if N % ROWS != 0 else r
    row = first.to(tl.int32) + local
    column = start + part * COLUMNS
    # Parts past the last column repeat its scale and are not stored.
    place = tl.minimum(column, K - 1) if K % TILE != 0 else column
    block = _blocks(row, place, ELEMENTS)
    scale = scale_value(tl.load(scales + block), ELEMENTS)
    if ELEMENTS.outer_rows >= 0:
        scale *= outer_scales(outer, row, ELEMENTS)[:, None]
    if ELEMENTS.chunk > 0:
        WORDS: tl.constexpr = COLUMNS // 4
        word = tl.arange(0, WORDS)
        words = weight.to(tl.pointer_type(tl.int16)) + first * ELEMENTS.words + start // 4
        at = words + local[:, None, None] * ELEMENTS.words + (part * WORDS)[None, :, None] + word[None, None, :]
        if K % TILE == 0:
            stored = tl.load(at, eviction_policy="evict_first")
        else:  # K is a multiple of COLUMNS
            stored = tl.load(at, mask=(column < K)[None, :, None], other=0, eviction_policy="evict_first")
        if ELEMENTS.zeros:
            zero = tl.load(zeros + block)
        else:
            zero = tl.full((ROWS, PARTS), ELEMENTS.offset, tl.int16)
        operand = tl.broadcast_to(operand_of(zero, ELEMENTS, DTYPE)[:, :, None], (ROWS, PARTS, WORDS))
        # The four quarters of a word, side by side in the order of columns.
        even = tl.join(quarter(stored, operand, 0, ELEMENTS, DTYPE), quarter(stored, operand, 2, ELEMENTS, DTYPE))
        odd = tl.join(quarter(stored, operand, 1, ELEMENTS, DTYPE), quarter(stored, operand, 3, ELEMENTS, DTYPE))
        numbers = tl.join(even, odd).to(tl.float32) * scale[:, :, None, None, None]
    else:
        k = tl.arange(0, COLUMNS)
        bytes = weight + first * ELEMENTS.words + start
        at = bytes + local[:, None, None] * ELEMENTS.words + (part * COLUMNS)[None, :, None] + k[None, None, :]
        if K % TILE == 0:
            stored = tl.load(at, eviction_policy="evict_first")
        else:
            inside = column[None, :, None] + k[None, None, :] < K
            stored = tl.load(at, mask=inside, other=_zero(weight.dtype), eviction_policy="evict_first")
        numbers = converted(stored, ELEMENTS, DTYPE).to(tl.float32)
        if ELEMENTS.zeros:
            numbers -= tl.load(zeros + block).to(tl.float32)[:, :, None]
        numbers *= scale[:, :, None]
    numbers = tl.reshape(numbers.to(result.dtype.element_ty), (ROWS, TILE))
    if DEPENDENT:
        gdc_wait()  # an earlier kernel may still read the memory of the result
    columns = tl.arange(0, TILE)
    own = result + first * K + start + r[:, None] * K + columns[None, :]
    if N % ROWS == 0 and K % TILE == 0:
        tl.store(own, numbers)
    else:
        tl.store(own, numbers, mask=(first + r < N)[:, None] & (start + columns < K)[None, :])


@triton.jit
def _blocks(row, column, ELEMENTS: tl.constexpr):
    """Return the places of the scales of rows `row` at columns `column`, [rows, columns]."""
    place = column // ELEMENTS.scale_columns if ELEMENTS.scale_columns > 0 else column * 0
    of_row = row // ELEMENTS.scale_rows * ELEMENTS.scale_stride if ELEMENTS.scale_rows > 0 else row * 0
    return of_row[:, None] + place[None, :]


@triton.constexpr_function
def _zero(pointer):
    """Return the zero that masked loads through a pointer of this type take."""
    return 0.0 if pointer.element_ty.is_floating() else 0
