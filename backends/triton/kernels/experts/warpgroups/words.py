"""The matrices of `experts_warpgroups` in f4e2m1, with a scale for 32 columns: how they are copied and multiplied.

Tensor cores read converted elements from registers, as in `quant_tile`. There, tensor cores have nothing to do while
elements are converted. Here, each warpgroup converts one of its matrices while tensor cores multiply the other one.
"""

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
    FREE,
    MATRICES,
    ROWS,
    STAGES,
    rows_of,
    sums_layout,
)
from ingot.backends.triton.kernels.quant.elements import e2m1, factor_bits

WORDS = gl.constexpr(16)  # words of 16 bits of a step, with four elements each, and the columns of a matmul
COPIED_WORDS = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))  # 16 bytes a thread: a matrix
# Four rows of 32 bytes fill the banks of shared memory. Half of each of eight rows is read at once.
STORED = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))
# The same functions, for a kernel in Gluon.
_e2m1, _factor_bits = gluon.jit(e2m1.fn), gluon.jit(factor_bits.fn)


@gluon.constexpr_function
def _operand(tokens):
    """Return the layout of the elements of a matrix that tensor cores read from registers, and of its words [64, 16].

    A thread has two adjacent words, twice, and converts element i of each for matmul i of a step.
    """
    return gl.DotOperandLayout(0, sums_layout(tokens), 2)


@gluon.jit
def copy_words(
    memory, words, step, stage, tile,
    MATRIX: gl.constexpr, N: gl.constexpr, GATED: gl.constexpr, CHUNK: gl.constexpr, ELEMENTS: gl.constexpr,
):  # fmt: skip
    """Begin to copy the words of a step of a matrix."""
    rows = rows_of(tile, MATRIX, N, GATED, CHUNK, gl.SliceLayout(1, COPIED_WORDS))
    word = step * WORDS + gl.arange(0, WORDS, layout=gl.SliceLayout(0, COPIED_WORDS))
    at = words + (rows * ELEMENTS.words)[:, None] + word[None, :]
    async_copy.async_copy_global_to_shared(memory.index(MATRICES * stage + MATRIX), at)


@gluon.jit
def _converted(words, scales, TOKENS: gl.constexpr, ELEMENTS: gl.constexpr):
    """Return the elements 0 to 3 of `words` i16[64, 16], times their scales, as bf16[64, 16] each.

    `scales` i16[64] are the two scales of each row, for eight words each.
    """
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, _operand(TOKENS)))
    pair = scales.to(gl.int32)
    low, high = _factor_bits(pair & 255, ELEMENTS), _factor_bits(pair >> 8 & 255, ELEMENTS)
    bits = gl.where((word < WORDS // 2)[None, :], low[:, None], high[:, None])
    factors = bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    return (
        _e2m1(words, factors, 0, ELEMENTS, gl.bfloat16),
        _e2m1(words, factors, 1, ELEMENTS, gl.bfloat16),
        _e2m1(words, factors, 2, ELEMENTS, gl.bfloat16),
        _e2m1(words, factors, 3, ELEMENTS, gl.bfloat16),
    )


@gluon.jit
def _begin(elements, x, sums):
    """Begin the matmuls of a step of a matrix: `sums` [64, tokens] plus `elements` times x [tokens, 64]."""
    for nth in gl.static_range(4):
        columns = x.slice(WORDS * nth, WORDS, dim=1).permute((1, 0))
        sums = warpgroup_mma(elements[nth], columns, sums, is_async=True)
    return sums


@gluon.jit
def multiply_words(
    pairs, tile, done, x_memory, memory, barriers,
    WARPGROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, TOKENS: gl.constexpr,
    ELEMENTS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Return the sums over all columns of a warpgroup's two matrices, f32[64, TOKENS] each.

    `pairs` points to the scales of the expert, two in each i16. `done` is how many steps of earlier items there were.
    """
    LAYOUT: gl.constexpr = sums_layout(TOKENS)
    HELD: gl.constexpr = _operand(TOKENS)
    STEPS: gl.constexpr = K // COLUMNS
    FIRST: gl.constexpr = 2 * WARPGROUP
    SCALES: gl.constexpr = ELEMENTS.scale_stride // 2
    # A step has two scales of a row, which are loaded together.
    first_scales = pairs + rows_of(tile, FIRST, N, GATED, CHUNK, gl.SliceLayout(1, HELD)) * SCALES
    second_scales = pairs + rows_of(tile, FIRST + 1, N, GATED, CHUNK, gl.SliceLayout(1, HELD)) * SCALES
    of_first, of_second = gl.load(first_scales), gl.load(second_scales)
    first = gl.zeros([ROWS, TOKENS], gl.float32, LAYOUT)
    second = gl.zeros([ROWS, TOKENS], gl.float32, LAYOUT)
    mbarrier.wait(barriers.index(ARRIVED + done % STAGES), done // STAGES & 1)
    words = memory.index(MATRICES * (done % STAGES) + FIRST).load(HELD)
    elements = _converted(words, of_first, TOKENS, ELEMENTS)
    of_first = gl.load(first_scales + min(1, STEPS - 1))
    for step in range(STEPS):
        stage = (done + step) % STAGES
        x = x_memory.index(stage).slice(0, TOKENS, dim=0)
        # The fence waits for earlier loads from global memory, so later ones follow it.
        fence_async_shared()
        later_second = gl.load(second_scales + gl.minimum(step + 1, STEPS - 1))
        later_first = gl.load(first_scales + gl.minimum(step + 2, STEPS - 1))
        first = _begin(elements, x, first)
        others = _converted(memory.index(MATRICES * stage + FIRST + 1).load(HELD), of_second, TOKENS, ELEMENTS)
        second = _begin(others, x, second)
        following = done + gl.minimum(step + 1, STEPS - 1)
        mbarrier.wait(barriers.index(ARRIVED + following % STAGES), following // STAGES & 1)
        words = memory.index(MATRICES * (following % STAGES) + FIRST).load(HELD)
        elements = _converted(words, of_first, TOKENS, ELEMENTS)
        # The step has arrived. Without this second wait, ptxas converts only after the wait for the matmuls.
        mbarrier.wait(barriers.index(ARRIVED + following % STAGES), following // STAGES & 1)
        first, second = warpgroup_mma_wait(0, deps=[first, second])
        mbarrier.arrive(barriers.index(FREE + stage))
        of_first, of_second = later_first, later_second
    return first * 2.0**ELEMENTS.fold, second * 2.0**ELEMENTS.fold
