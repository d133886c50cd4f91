"""The tile of a program of `experts_warpgroups`: its matrices, its place in a weight, and what shared memory holds.

A program computes a tile of rows of an expert for a block of choices. Each of two warpgroups has two matrices of 64
rows. They are the rows of gate and of up, or two parts of the rows of down.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # rows of a matmul (wgmma)
COLUMNS = gl.constexpr(64)  # columns of a step: 128 bytes of x, the widest row that shared memory swizzles
MATRICES = gl.constexpr(4)  # two of each of two warpgroups
COPYING = gl.constexpr(128)  # threads that copy, each of which arrives at a barrier
# Steps in shared memory. In the dtype of x, four take 192 of a multiprocessor's 227 KiB.
STAGES = gl.constexpr(4)

# Rows of 64 columns in shared memory, and their copies, with 16 bytes a thread.
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPIED_ROWS = gl.constexpr(gl.SliceLayout(1, COPIED.value))
COPIED_COLUMNS = gl.constexpr(gl.SliceLayout(0, COPIED.value))

# Items whose numbers are in shared memory. Copies are up to STAGES steps ahead, each of which may be another item's.
# The item after the last one is taken too. So up to STAGES + 1 are taken and not yet read.
TAKEN_ITEMS = gl.constexpr(8)
assert TAKEN_ITEMS.value > STAGES.value

# The barriers:
# ARRIVED, one of each stage: its copies are complete
# FREE, one of each stage: both warpgroups have read it
# NEXT, one of each number of an item: it is in shared memory
ARRIVED, FREE, NEXT = gl.constexpr(0), gl.constexpr(STAGES.value), gl.constexpr(2 * STAGES.value)
BARRIERS = gl.constexpr(2 * STAGES.value + TAKEN_ITEMS.value)


@gluon.constexpr_function
def arrivals(barrier):
    """Return how many threads or warpgroups arrive at a barrier."""
    if barrier < FREE.value:
        return COPYING.value
    return 2 if barrier < NEXT.value else 1


@gluon.constexpr_function
def sums_layout(tokens):
    """Return the layout of the sums of a matrix [64, tokens]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.constexpr_function
def rows_in_tile(gated):
    """Return the results of a choice that a program computes at once. With a gate, each takes two rows."""
    return ROWS.value * (MATRICES.value // 2 if gated else MATRICES.value)


@gluon.jit
def rows_of(
    tile, MATRIX: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, CHUNK: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return the rows [64] of a matrix of a tile in an expert's weight. Rows past the last one repeat it.

    Results are written where `place_in_row` puts them, so the row at a place is that of the place's column.
    """
    m = gl.arange(0, ROWS, layout=LAYOUT)
    if GATED:
        place = tile * rows_in_tile(GATED) + MATRIX // 2 * ROWS + m
        if CHUNK > 0:
            QUARTER: gl.constexpr = CHUNK // 4
            place = place // CHUNK * CHUNK + place % QUARTER * 4 + place % CHUNK // QUARTER
        return gl.minimum(place, N - 1) + MATRIX % 2 * N
    else:
        return gl.minimum(tile * rows_in_tile(GATED) + MATRIX * ROWS + m, N - 1)
