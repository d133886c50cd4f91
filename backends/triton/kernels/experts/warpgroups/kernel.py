"""The experts of many tokens on Hopper: two warpgroups (128 threads each) multiply, and a third one copies.

    each program, for items, which are a block of choices and a tile of rows of the block's expert:
        a third warpgroup copies 64 columns of x and of four matrices into shared memory, as soon as the memory of older
            ones is free. It does not wait for the results of the item before.
        two warpgroups multiply two matrices of 64 rows each (`multiply_plain`, `multiply_words`), and write the results
            of the block's choices
        the third warpgroup takes the next item that no program has. Blocks do not all take the same time.

In Triton, all warps take the same steps (`experts_up_tile`, `quant_experts_up_tile`). They begin a copy at the end of a
step and wait for it in a later one, and convert quantized elements between matmuls.

Wide matmuls take the time of their columns, so a block with few choices has matmuls with half of them (`_multiply`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.experts.groups import BEGIN, BLOCKS, EXPERT, LISTED, SIZE, TAKEN
from ingot.backends.triton.kernels.experts.parts import joined
from ingot.backends.triton.kernels.experts.tile import place_of
from ingot.backends.triton.kernels.experts.warpgroups.plain import copy_plain, multiply_plain
from ingot.backends.triton.kernels.experts.warpgroups.tile import (
    ARRIVED,
    BARRIERS,
    COLUMNS,
    COPIED_COLUMNS,
    COPIED_ROWS,
    FREE,
    MATRICES,
    NEXT,
    ROWS,
    STAGES,
    SWIZZLED,
    TAKEN_ITEMS,
    arrivals,
    rows_in_tile,
    rows_of,
    sums_layout,
)
from ingot.backends.triton.kernels.experts.warpgroups.words import STORED, WORDS, copy_words, multiply_words

# 16 bytes of results a thread. Those of a choice are adjacent.
WRITTEN = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # one number, in all threads
# The same functions, for a kernel in Gluon.
_joined, _place_of = gluon.jit(joined.fn), gluon.jit(place_of.fn)


@gluon.constexpr_function
def _registers(elements):
    """Return the registers of a thread of the second and the third warpgroup.

    Three warpgroups have 504 for a thread of each: 65536 for 384 threads, in which each number is a multiple of 8.

    The sums take 128, and converted elements 48. A thread has more addresses of rows of 128 bytes than of words. With
    these numbers, Triton 3.6 and 3.8 spill none in a step.
    """
    return (208, 88) if elements is None else (224, 56)


@gluon.jit
def _block(listed, work, item, N: gl.constexpr, GATED: gl.constexpr, TOGETHER: gl.constexpr):
    """Return (expert, begin, size, tile) of an item: its block of choices, and its tile of rows."""
    TILES: gl.constexpr = (N + rows_in_tile(GATED) - 1) // rows_in_tile(GATED)
    block, tile = _place_of(item, gl.load(work + BLOCKS), TILES, TOGETHER)
    of_block = listed + block * LISTED
    return gl.load(of_block + EXPERT), gl.load(of_block + BEGIN), gl.load(of_block + SIZE), tile


@gluon.jit
def _items(work, N: gl.constexpr, GATED: gl.constexpr):
    """Return how many items the programs take in all."""
    TILES: gl.constexpr = (N + rows_in_tile(GATED) - 1) // rows_in_tile(GATED)
    return gl.load(work + BLOCKS) * TILES


@gluon.jit
def _take(work, taken, barriers, nth, GATED: gl.constexpr):
    """Take the item after a program's item number `nth`, and tell the other warpgroups. Return it."""
    item = gl.num_programs(0) + gl.atomic_add(work + (TAKEN if GATED else TAKEN + 1), 1, sem="relaxed")
    taken.index(nth % TAKEN_ITEMS).store(gl.full([1], 0, gl.int32, ONE) + item)
    mbarrier.arrive(barriers.index(NEXT + nth % TAKEN_ITEMS))
    return item


@gluon.jit
def _taken(taken, barriers, nth):
    """Return the item after a program's item number `nth`, which the third warpgroup has taken."""
    mbarrier.wait(barriers.index(NEXT + nth % TAKEN_ITEMS), nth // TAKEN_ITEMS & 1)
    return gl.max(taken.index(nth % TAKEN_ITEMS).load(ONE), 0)


@gluon.jit
def _copy_steps(
    x, order, weight, expert, begin, size, tile, done, x_memory, memory, barriers,
    TOP_K: gl.constexpr, N: gl.constexpr, K: gl.constexpr, X_STRIDE: gl.constexpr, GATED: gl.constexpr,
    TOKENS: gl.constexpr, SIZES: gl.constexpr, ELEMENTS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Copy all steps of a block that takes matmuls with TOKENS columns."""
    # Choices past the last one repeat it and are not stored.
    place = begin + gl.minimum(gl.arange(0, TOKENS, layout=COPIED_ROWS), size - 1)
    row = gl.load(order + place) // TOP_K if GATED else place
    rows = x + row.to(gl.int64) * X_STRIDE
    column = gl.arange(0, COLUMNS, layout=COPIED_COLUMNS)
    if ELEMENTS is None:
        own = weight + expert.to(gl.int64) * ((2 * N if GATED else N) * K)
    else:
        own = weight.to(gl.pointer_type(gl.int16)) + expert.to(gl.int64) * (SIZES.weight // 2)
        # A step has 16 columns of each quarter of a chunk of x, because a word has four columns of the weight.
        STEPS: gl.constexpr = ELEMENTS.chunk // COLUMNS
        column = column // WORDS * (ELEMENTS.chunk // 4) + column % WORDS
    for step in range(K // COLUMNS):
        stage = (done + step) % STAGES
        # The first round finds free memory: the phase "before the first" of a barrier counts as complete. In
        # `multiply_plain`, the step after frees a stage, and the first step frees one that was never filled.
        freeing = done + step + (1 if ELEMENTS is None else 0)
        mbarrier.wait(barriers.index(FREE + stage), freeing // STAGES & 1 ^ 1)
        # Weights first: they come from memory, while x is most often in the L2 cache.
        for matrix in gl.static_range(MATRICES):
            if ELEMENTS is None:
                copy_plain(memory, own, step, stage, tile, matrix, N, K, GATED, CHUNK)
            else:
                copy_words(memory, own, step, stage, tile, matrix, N, GATED, CHUNK, ELEMENTS)
        first = step * COLUMNS
        if ELEMENTS is not None:
            first = step // STEPS * ELEMENTS.chunk + step % STEPS * WORDS
        at = rows[:, None] + (first + column)[None, :]
        async_copy.async_copy_global_to_shared(x_memory.index(stage).slice(0, TOKENS, dim=0), at)
        async_copy.mbarrier_arrive(barriers.index(ARRIVED + stage), increment_count=False)


@gluon.jit
def _copy(
    x, order, listed, work, weight, x_memory, memory, taken, barriers,
    TOP_K: gl.constexpr, N: gl.constexpr, K: gl.constexpr, X_STRIDE: gl.constexpr, GATED: gl.constexpr,
    TOKENS: gl.constexpr, TOGETHER: gl.constexpr, SIZES: gl.constexpr, ELEMENTS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Take items, and copy x and all matrices step by step, in the third warpgroup."""
    items = _items(work, N, GATED)
    item, nth = gl.program_id(0), 0
    while item < items:
        expert, begin, size, tile = _block(listed, work, item, N, GATED, TOGETHER)
        done = nth * (K // COLUMNS)
        if size > TOKENS // 2:
            _copy_steps(
                x, order, weight, expert, begin, size, tile, done, x_memory, memory, barriers,
                TOP_K, N, K, X_STRIDE, GATED, TOKENS, SIZES, ELEMENTS, CHUNK,
            )  # fmt: skip
        else:
            _copy_steps(
                x, order, weight, expert, begin, size, tile, done, x_memory, memory, barriers,
                TOP_K, N, K, X_STRIDE, GATED, TOKENS // 2, SIZES, ELEMENTS, CHUNK,
            )  # fmt: skip
        item = _take(work, taken, barriers, nth, GATED)
        nth += 1
    async_copy.wait_group(0)


@gluon.jit
def _write(y, value, order, begin, size, first, WIDTH: gl.constexpr, GATED: gl.constexpr, TOKENS: gl.constexpr):
    """Write results f32[64, TOKENS] of a block to rows of `y` with WIDTH places, at the places from `first` on."""
    value = gl.convert_layout(value.to(y.dtype.element_ty), WRITTEN)
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, WRITTEN))
    row = begin + t
    if not GATED:
        row = gl.load(order + row, mask=t < size, other=0)
    place = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WRITTEN))
    at = y + row.to(gl.int64)[None, :] * WIDTH + place[:, None]
    gl.store(at, value, mask=(place < WIDTH)[:, None] & (t < size)[None, :])


@gluon.jit
def _multiply_block(
    y, order, scales, bias, expert, begin, size, tile, done, x_memory, memory, barriers,
    WARPGROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, TOKENS: gl.constexpr, SIZES: gl.constexpr, ELEMENTS: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """Compute and write a warpgroup's results of a block that takes matmuls with TOKENS columns."""
    if ELEMENTS is None:
        first, second = multiply_plain(done, x_memory, memory, barriers, WARPGROUP, K, TOKENS)
    else:
        pairs = scales.to(gl.pointer_type(gl.int16)) + expert.to(gl.int64) * (SIZES.scales // 2)
        first, second = multiply_words(
            pairs, tile, done, x_memory, memory, barriers, WARPGROUP, N, K, GATED, TOKENS, ELEMENTS, CHUNK
        )
    if bias is not None:
        LAYOUT: gl.constexpr = gl.SliceLayout(1, sums_layout(TOKENS))
        own = bias + expert.to(gl.int64) * (2 * N if GATED else N)
        first += gl.load(own + rows_of(tile, 2 * WARPGROUP, N, GATED, CHUNK, LAYOUT)).to(gl.float32)[:, None]
        second += gl.load(own + rows_of(tile, 2 * WARPGROUP + 1, N, GATED, CHUNK, LAYOUT)).to(gl.float32)[:, None]
    if GATED:
        value = _joined(first, second, ACTIVATION, LIMIT, ALPHA)
        place = (tile * 2 + WARPGROUP) * ROWS
        _write(y, value, order, begin, size, place, N, GATED, TOKENS)
    else:
        place = (tile * 2 + WARPGROUP) * (2 * ROWS)
        _write(y, first, order, begin, size, place, N, GATED, TOKENS)
        _write(y, second, order, begin, size, place + ROWS, N, GATED, TOKENS)


@gluon.jit
def _multiply(
    y, order, listed, work, scales, bias, x_memory, memory, taken, barriers,
    WARPGROUP: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr, ALPHA: gl.constexpr, TOKENS: gl.constexpr, TOGETHER: gl.constexpr, SIZES: gl.constexpr,
    ELEMENTS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Compute and write a warpgroup's results, item by item, with matmuls of half the columns if a block fits."""
    items = _items(work, N, GATED)
    item, nth = gl.program_id(0), 0
    while item < items:
        expert, begin, size, tile = _block(listed, work, item, N, GATED, TOGETHER)
        done = nth * (K // COLUMNS)
        if size > TOKENS // 2:
            _multiply_block(
                y, order, scales, bias, expert, begin, size, tile, done, x_memory, memory, barriers,
                WARPGROUP, N, K, GATED, ACTIVATION, LIMIT, ALPHA, TOKENS, SIZES, ELEMENTS, CHUNK,
            )  # fmt: skip
        else:
            _multiply_block(
                y, order, scales, bias, expert, begin, size, tile, done, x_memory, memory, barriers,
                WARPGROUP, N, K, GATED, ACTIVATION, LIMIT, ALPHA, TOKENS // 2, SIZES, ELEMENTS, CHUNK,
            )  # fmt: skip
        item = _taken(taken, barriers, nth)
        nth += 1


@gluon.jit
def experts_warpgroups(
    x,
    order,
    listed,
    work,
    weight,
    scales,
    bias,
    y,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    X_STRIDE: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
    TOKENS: gl.constexpr,
    TOGETHER: gl.constexpr,
    SIZES: gl.constexpr,
    ELEMENTS: gl.constexpr,
    CHUNK: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Compute the joined gate and up of each choice, or with not GATED the result of each choice.

    With GATED, `y` is `hidden` [choices, N], from x [rows, K] and an expert's weight [2 * N, K]. Its columns have the
    order CHUNK (`place_in_row`). Otherwise `y` is `made` [choices, N], in the order of choices, from x [choices, K] in
    the order `order`, and an expert's weight [N, K].

    Grid: programs, each of which takes an item when it is free. There are cdiv(N, rows_in_tile) items of each block.
    One program fills the registers of a multiprocessor, so there is one for each. A block has up to TOKENS = 128
    choices. `listed` and `work` are those of `list_blocks`. K is a multiple of 64. A weight in the dtype of x has no
    SIZES, ELEMENTS and scales. Others have chunks of 64 or 128 columns, and a scale for 32. The other parameters are
    described in `quant_experts_up_tile`.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    x_memory = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, COLUMNS], SWIZZLED)
    if ELEMENTS is None:
        memory = gl.allocate_shared_memory(dtype, [STAGES * MATRICES, ROWS, COLUMNS], SWIZZLED)
    else:
        memory = gl.allocate_shared_memory(gl.int16, [STAGES * MATRICES, ROWS, WORDS], STORED)
    taken = gl.allocate_shared_memory(gl.int32, [TAKEN_ITEMS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for barrier in gl.static_range(BARRIERS):
        mbarrier.init(barriers.index(barrier), count=arrivals(barrier))
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    y, order, listed, work, scales, bias, x_memory, memory, taken, barriers,
                    0, N, K, GATED, ACTIVATION, LIMIT, ALPHA, TOKENS, TOGETHER, SIZES, ELEMENTS, CHUNK,
                ),
            ),
            (
                _multiply,
                (
                    y, order, listed, work, scales, bias, x_memory, memory, taken, barriers,
                    1, N, K, GATED, ACTIVATION, LIMIT, ALPHA, TOKENS, TOGETHER, SIZES, ELEMENTS, CHUNK,
                ),
            ),
            (
                _copy,
                (
                    x, order, listed, work, weight, x_memory, memory, taken, barriers,
                    TOP_K, N, K, X_STRIDE, GATED, TOKENS, TOGETHER, SIZES, ELEMENTS, CHUNK,
                ),
            ),
        ],
        [4, 4],
        _registers(ELEMENTS),
    )  # fmt: skip
