"""The order in which kernels for elements of four bits read the columns of x, by the columns of a chunk (CHUNK).

- 0: as they are.
- FRAGMENTS: four lanes of a warp each read 32 adjacent columns of 128, in four pieces of 16 bytes. So pieces with the
  same number are adjacent. Of the eight columns of a piece, number i + 4 follows number i (`fragments`).
- Others: column 4 j + i of a chunk is at place i * CHUNK / 4 + j. A word of 16 bits has four successive columns, and
  `quant_tile` takes the same one of all words together.
"""

import triton
import triton.language as tl

FRAGMENTS = tl.constexpr(8)  # chunks of other orders have 16 columns or more
_COLUMNS = tl.constexpr(128)  # of four lanes


@triton.jit
def place_in_row(column, CHUNK: tl.constexpr):
    """Return the places of columns in their row of x."""
    if CHUNK == 0:
        return column
    elif CHUNK == FRAGMENTS:
        lane, piece = column % _COLUMNS // 32, column % 32 // 8
        return column // _COLUMNS * _COLUMNS + piece * 32 + lane * 8 + column % 4 * 2 + column % 8 // 4
    else:
        return column // CHUNK * CHUNK + column % 4 * (CHUNK // 4) + column % CHUNK // 4


@triton.constexpr_function
def row_size(width, chunk):
    """Return the elements that a row of `width` columns takes. Those without a column are not read."""
    return -(-width // _COLUMNS.value) * _COLUMNS.value if chunk == FRAGMENTS.value else width
