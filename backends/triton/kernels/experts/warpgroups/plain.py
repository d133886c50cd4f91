"""The matrices of `experts_warpgroups` in the dtype of x: how they are copied and multiplied."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ingot.backends.triton.kernels.experts.warpgroups.tile import (
    ARRIVED,
    COLUMNS,
    COPIED_COLUMNS,
    COPIED_ROWS,
    FREE,
    MATRICES,
    ROWS,
    STAGES,
    rows_of,
    sums_layout,
)


@gluon.jit
def copy_plain(
    memory, weight, step, stage, tile,
    MATRIX: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Begin to copy a step of a matrix."""
    rows = rows_of(tile, MATRIX, N, GATED, CHUNK, COPIED_ROWS)
    column = step * COLUMNS + gl.arange(0, COLUMNS, layout=COPIED_COLUMNS)
    at = weight + (rows * K)[:, None] + column[None, :]
    async_copy.async_copy_global_to_shared(memory.index(MATRICES * stage + MATRIX), at)


@gluon.jit
def multiply_plain(
    done, x_memory, memory, barriers, WARPGROUP: gl.constexpr, K: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Return the sums over all columns of a warpgroup's two matrices, f32[64, TOKENS] each.

    `done` is how many steps of earlier items there were. The matmuls of a step begin before those of the step before
    are complete, and then free its stage. The last stage of the last item is never freed, because no copy needs it.
    """
    first = gl.zeros([ROWS, TOKENS], gl.float32, sums_layout(TOKENS))
    second = gl.zeros([ROWS, TOKENS], gl.float32, sums_layout(TOKENS))
    for step in range(done, done + K // COLUMNS):
        stage = step % STAGES
        x = x_memory.index(stage).slice(0, TOKENS, dim=0).permute((1, 0))
        mbarrier.wait(barriers.index(ARRIVED + stage), step // STAGES & 1)
        fence_async_shared()
        first = warpgroup_mma(memory.index(MATRICES * stage + 2 * WARPGROUP), x, first, is_async=True)
        second = warpgroup_mma(memory.index(MATRICES * stage + 2 * WARPGROUP + 1), x, second, is_async=True)
        first, second = warpgroup_mma_wait(2, deps=[first, second])
        mbarrier.arrive(barriers.index(FREE + (step + STAGES - 1) % STAGES))
    first, second = warpgroup_mma_wait(0, deps=[first, second])
    return first, second
