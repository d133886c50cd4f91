"""Decode attention over latents on Hopper: two warpgroups (128 threads each) multiply, and a third one copies.

    for each split of a context (`find_splits`), one program with 64 rows, which are q heads:
        a third warpgroup copies tiles of 64 keys into shared memory, as soon as the memory of older ones is free
        for each pair of tiles:
            warpgroup 0: scores of tile 0, their peak and weights; its values times the weights, columns 0 to 255
            warpgroup 1: scores of tile 1; the values of tile 0, columns 256 to 511; then peak and weights of tile 1
            each warpgroup: the values of tile 1, times the weights, its half of the columns
        write the attention, or the state of the split for `merge_attention`

The latents of a key are its value too, so a tile is read once. Its 72 KiB let only two of them and q fit into a
multiprocessor's shared memory, and the sums of 64 rows fill the registers of two warpgroups. One warpgroup's softmax
therefore runs while the other one's matmuls do, as in FlashMLA (github.com/deepseek-ai/FlashMLA). `decode_attention`
cannot: in Triton, all warps take the same steps. It begins a copy at the end of a step, and waits for it in the next.

A key has FORM.block = 512 latents and FORM.tail = 64 numbers of a rotated key. The weights of a tile take the place of
its rotated keys, which only scores need.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.attention.find_splits import (
    END,
    FIRST,
    HEAD,
    RECORD,
    SEQUENCE,
    SPLIT,
    SPLITS_OF,
    TOKEN,
)
from ingot.backends.triton.kernels.attention.softmax import LOG2_E, LOWEST

TILE = gl.constexpr(64)  # keys of a tile, and rows: those of a warpgroup's matmul (wgmma)
HALF = gl.constexpr(256)  # columns of values of a warpgroup
TAIL = gl.constexpr(64)  # numbers of a rotated key
QUARTER = gl.constexpr(128)  # columns of a tile whose arrival the scores wait for at once
COPYING = gl.constexpr(128)  # threads that copy, each of which arrives at a barrier
# Registers of a thread of the second and the third warpgroup, of 504 for three. The sums take 128, the scores 32. With
# 232 and 40, an H200 takes 247 us in place of 245 for this kernel alone, with 128 heads and 32 contexts of 16384.
REGISTERS = gl.constexpr((224, 56))

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
SCORED = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUM_ROWS = gl.constexpr(gl.SliceLayout(1, SUMS.value))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORED.value))
WIDE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a thread
COPIED_ROWS = gl.constexpr(gl.SliceLayout(1, COPIED.value))

# The barriers:
# ARRIVED, four of each tile: the copies of a quarter of the columns are complete
# FREE, two of each tile: no matmul reads a half of the columns any more. The warpgroup whose sums have these columns
#   arrives. The scores of the tile are complete before its weights, which that warpgroup has waited for.
# WEIGHTS, one of each tile: its weights and their peaks are in shared memory
# QUERY: both warpgroups have stored their part of q
ARRIVED, FREE, WEIGHTS, QUERY = gl.constexpr(0), gl.constexpr(8), gl.constexpr(12), gl.constexpr(14)
BARRIERS = gl.constexpr(15)
# A barrier of all warps of a warpgroup. Triton 3.6 has the second name.
_synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.constexpr_function
def _arrivals(barrier):
    """Return how many threads or warpgroups arrive at a barrier."""
    if barrier < FREE.value:
        return COPYING.value
    return 2 if barrier == QUERY.value else 1


@gluon.jit
def _opaque_zero(number):
    """Return 0, unknown to the compiler.

    Descriptors of shared memory are then computed where a matmul needs them. If ptxas knows that they are the same in
    each iteration, it computes all of them before the loop, and spills. This kernel alone then takes 266 us in place of
    247 on an H200, with 128 heads and 32 contexts of 16384 (Triton 3.6.0).
    """
    return gl.inline_asm_elementwise("and.b32 $0, $1, 0;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _page_ids(pages, first, end, CACHE: gl.constexpr):
    """Return the page of each of 64 positions from `first` on. Positions from `end` on have page 0."""
    place = first + gl.arange(0, TILE, layout=COPIED_ROWS)
    return gl.load(pages + place // CACHE.page, mask=place < end, other=0)


@gluon.jit
def _copy_columns(memory, rows, inside, OFFSET: gl.constexpr, WIDTH: gl.constexpr):
    """Begin to copy WIDTH columns, from column OFFSET on, of the rows that `rows` points to. Others become zeros."""
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPIED))
    async_copy.async_copy_global_to_shared(memory, rows[:, None] + OFFSET + column[None, :], mask=inside[:, None])


@gluon.jit
def _copy_tile(kv, ids, first, end, round, halves, tails, barriers, ONE: gl.constexpr, CACHE: gl.constexpr):
    """Copy tile ONE (0 or 1) of a pair, half by half, as soon as no matmul reads a half's old contents.

    Both warpgroups read the weights, whose place the rotated keys take. So these come after the waits for both halves.
    """
    place = first + gl.arange(0, TILE, layout=COPIED_ROWS)
    inside = place < end
    rows = kv + ids.to(gl.int64) * CACHE.page_stride + place % CACHE.page * CACHE.slot_stride
    for half in gl.static_range(2):
        # The first round finds free memory: the phase "before the first" of a barrier counts as complete.
        mbarrier.wait(barriers.index(FREE + 2 * ONE + half), round & 1 ^ 1)
        if half == 1:
            _copy_columns(tails.index(ONE), rows, inside, 2 * HALF, TAIL)
        for quarter in gl.static_range(2):
            memory = halves.index(2 * ONE + half).slice(QUARTER * quarter, QUARTER, dim=1)
            _copy_columns(memory, rows, inside, HALF * half + QUARTER * quarter, QUARTER)
            arrived = barriers.index(ARRIVED + 4 * ONE + 2 * half + quarter)
            async_copy.mbarrier_arrive(arrived, increment_count=False)


@gluon.jit
def _copy(kv, pages, first, end, step, pairs, halves, tails, barriers, CACHE: gl.constexpr):
    """Copy the pairs of tiles of a split, in the third warpgroup. The ids of pages are read one pair ahead."""
    ids = _page_ids(pages, first, end, CACHE)
    next_ids = _page_ids(pages, first + TILE, end, CACHE)
    for pair in range(pairs):
        at = first + pair * step
        _copy_tile(kv, ids, at, end, pair, halves, tails, barriers, 0, CACHE)
        ids = _page_ids(pages, at + step, end, CACHE)
        _copy_tile(kv, next_ids, at + TILE, end, pair, halves, tails, barriers, 1, CACHE)
        next_ids = _page_ids(pages, at + step + TILE, end, CACHE)
    async_copy.wait_group(0)


@gluon.jit
def _store_query(
    memory, q, token, head, COLUMN: gl.constexpr, WIDTH: gl.constexpr, FED: gl.constexpr, FORM: gl.constexpr
):
    """Copy WIDTH columns of the rows of q, from COLUMN on, to shared memory. Rows beyond FORM.group are zeros."""
    g = gl.arange(0, TILE, layout=COPIED_ROWS)
    rows = q + token.to(gl.int64) * FED.q.token + (head * FORM.group + g) * FED.q.head
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPIED))
    memory.store(gl.load(rows[:, None] + COLUMN + column[None, :], mask=(g < FORM.group)[:, None], other=0.0))


@gluon.jit
def _scores(query, query_tail, halves, tails, barriers, zero, phase, first, end, ONE: gl.constexpr):
    """Return the dot products f32[64, 64] of q and the keys of tile ONE. Those of positions from `end` on are LOWEST.

    The matmul of each quarter of the columns begins when it has arrived.
    """
    scores = gl.zeros([TILE, TILE], gl.float32, SCORED)
    for quarter in gl.static_range(4):
        mbarrier.wait(barriers.index(ARRIVED + 4 * ONE + quarter), phase)
        fence_async_shared()
        if quarter == 2:
            keys = tails.index(ONE + zero).permute((1, 0))
            scores = warpgroup_mma(query_tail.index(zero), keys, scores, is_async=True)
        keys = halves.index(2 * ONE + quarter // 2 + zero).slice(QUARTER * (quarter % 2), QUARTER, dim=1)
        rows = query.index(quarter // 2 + zero).slice(QUARTER * (quarter % 2), QUARTER, dim=1)
        scores = warpgroup_mma(rows, keys.permute((1, 0)), scores, use_acc=quarter > 0, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if first + TILE > end:
        place = first + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORED))
        scores = gl.where((place < end)[None, :], scores, LOWEST)
    return scores


@gluon.jit
def _scaled(sums, factor):
    return sums * gl.convert_layout(factor, SUM_ROWS)[:, None]


@gluon.jit
def _publish(memory, rows, barrier):
    """Write a number per row to shared memory, and arrive at `barrier` after this write and all earlier ones.

    The fence makes weights visible to matmuls, also to those of the other warpgroup, which waits for the barrier.
    """
    memory.store(rows)
    fence_async_shared()
    mbarrier.arrive(barrier)


@gluon.jit
def _store(out, partial, sums, weight_sum, token, head, row, splits, COLUMN: gl.constexpr, FORM: gl.constexpr):
    """Write half of the columns of a split: to `out` if its context has one split, else to `partial`."""
    mean = _scaled(sums, 1.0 / weight_sum)
    g = gl.arange(0, TILE, layout=SUM_ROWS)
    column = COLUMN + gl.arange(0, HALF, layout=gl.SliceLayout(0, SUMS))
    within = g[:, None] * FORM.value_dim + column[None, :]
    held = (g < FORM.group)[:, None]
    if splits == 1:
        first = (token * FORM.kv_heads + head).to(gl.int64) * (FORM.group * FORM.value_dim)
        gl.store(out + first + within, mean.to(out.dtype.element_ty), mask=held)
    else:
        gl.store(partial + row * (FORM.group * FORM.value_dim) + within, mean, mask=held)


@gluon.jit
def _left(
    out, lse, partial, sizes, q, query, query_tail, halves, tails, peaks, barriers, first, end, step, pairs, token,
    head, row, splits, FED: gl.constexpr, FORM: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Compute the scores and weights of tile 0 of each pair, and the sums of columns 0 to 255: warpgroup 0."""
    SCALE: gl.constexpr = SCORES.scale * LOG2_E
    _store_query(query.index(0), q, token, head, 0, HALF, FED, FORM)
    _store_query(query_tail.index(0), q, token, head, 2 * HALF, TAIL, FED, FORM)
    fence_async_shared()
    mbarrier.arrive(barriers.index(QUERY))
    mbarrier.wait(barriers.index(QUERY), 0)
    sums = gl.zeros([TILE, HALF], gl.float32, SUMS)
    peak = gl.full([TILE], LOWEST, gl.float32, SCORE_ROWS)
    weight_sum = gl.zeros([TILE], gl.float32, SCORE_ROWS)
    for pair in range(pairs):
        phase = pair & 1
        zero = _opaque_zero(pair)
        scores = _scores(query, query_tail, halves, tails, barriers, zero, phase, first + pair * step, end, 0)
        higher = gl.maximum(peak, gl.max(scores, 1) * SCALE)
        weights = gl.exp2(scores * SCALE - higher[:, None])
        _synchronize()  # the matmuls of all warps have read the rotated keys
        tails.index(0).store(weights.to(tails.dtype))
        _publish(peaks.index(0), higher, barriers.index(WEIGHTS))
        share = gl.exp2(peak - higher)
        weight_sum = weight_sum * share + gl.sum(weights, 1)
        sums = _scaled(sums, share)
        sums = warpgroup_mma(tails.index(zero), halves.index(zero), sums, is_async=True)
        mbarrier.wait(barriers.index(WEIGHTS + 1), phase)
        peak = peaks.index(1).load(SCORE_ROWS)
        share = gl.exp2(higher - peak)
        weight_sum = weight_sum * share
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(barriers.index(FREE))
        sums = _scaled(sums, share)
        sums = warpgroup_mma(tails.index(1 + zero), halves.index(2 + zero), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(barriers.index(FREE + 2))
    _publish(peaks.index(0), weight_sum, barriers.index(WEIGHTS))
    mbarrier.wait(barriers.index(WEIGHTS + 1), pairs & 1)
    weight_sum += peaks.index(1).load(SCORE_ROWS)
    g = gl.arange(0, TILE, layout=SCORE_ROWS)
    size = peak + gl.log2(weight_sum)
    if splits > 1:
        gl.store(sizes + row * FORM.group + g, size, mask=g < FORM.group)
    elif lse is not None:
        to = lse + (token * FORM.kv_heads + head).to(gl.int64) * FORM.group + g
        gl.store(to, size / LOG2_E, mask=g < FORM.group)
    _store(out, partial, sums, weight_sum, token, head, row, splits, 0, FORM)


@gluon.jit
def _right(
    out, partial, q, query, query_tail, halves, tails, peaks, barriers, first, end, step, pairs, token, head, row,
    splits, FED: gl.constexpr, FORM: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Compute the scores and weights of tile 1 of each pair, and the sums of columns 256 to 511: warpgroup 1."""
    SCALE: gl.constexpr = SCORES.scale * LOG2_E
    _store_query(query.index(1), q, token, head, HALF, HALF, FED, FORM)
    fence_async_shared()
    mbarrier.arrive(barriers.index(QUERY))
    mbarrier.wait(barriers.index(QUERY), 0)
    sums = gl.zeros([TILE, HALF], gl.float32, SUMS)
    peak = gl.full([TILE], LOWEST, gl.float32, SCORE_ROWS)
    weight_sum = gl.zeros([TILE], gl.float32, SCORE_ROWS)
    for pair in range(pairs):
        phase = pair & 1
        zero = _opaque_zero(pair)
        scores = _scores(query, query_tail, halves, tails, barriers, zero, phase, first + pair * step + TILE, end, 1)
        own = gl.max(scores, 1) * SCALE
        mbarrier.wait(barriers.index(WEIGHTS), phase)
        higher = peaks.index(0).load(SCORE_ROWS)
        share = gl.exp2(peak - higher)
        weight_sum = weight_sum * share
        sums = _scaled(sums, share)
        sums = warpgroup_mma(tails.index(zero), halves.index(1 + zero), sums, is_async=True)
        peak = gl.maximum(higher, own)
        weights = gl.exp2(scores * SCALE - peak[:, None])
        _synchronize()
        tails.index(1).store(weights.to(tails.dtype))
        _publish(peaks.index(1), peak, barriers.index(WEIGHTS + 1))
        share = gl.exp2(higher - peak)
        weight_sum = weight_sum * share + gl.sum(weights, 1)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(barriers.index(FREE + 1))
        sums = _scaled(sums, share)
        sums = warpgroup_mma(tails.index(1 + zero), halves.index(3 + zero), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(barriers.index(FREE + 3))
    mbarrier.wait(barriers.index(WEIGHTS), pairs & 1)
    other = peaks.index(0).load(SCORE_ROWS)
    _publish(peaks.index(1), weight_sum, barriers.index(WEIGHTS + 1))
    _store(out, partial, sums, weight_sum + other, token, head, row, splits, HALF, FORM)


@gluon.jit(do_not_specialize=["items", "width"])
def decode_latents(
    out,
    lse,
    partial,
    sizes,
    records,
    items,
    kv,
    q,
    page_table,
    width,
    FED: gl.constexpr,
    CACHE: gl.constexpr,
    FORM: gl.constexpr,
    SCORES: gl.constexpr,
    SPLITS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Compute decode attention over cached latents of 512 numbers and rotated keys of 64, for up to 64 q heads.

    `records` i32[items, RECORD], from `find_splits`, describes the splits. The programs take them in turn. A program
    fills a multiprocessor's shared memory, so the grid has as many programs as multiprocessors. SPLITS.chunk is 128, a
    pair of tiles. The other arguments are those of `decode_attention`.
    """
    dtype: gl.constexpr = kv.dtype.element_ty
    query = gl.allocate_shared_memory(dtype, [2, TILE, HALF], WIDE)
    query_tail = gl.allocate_shared_memory(dtype, [1, TILE, TAIL], WIDE)
    halves = gl.allocate_shared_memory(dtype, [4, TILE, HALF], WIDE)  # of tile 0, and of tile 1
    tails = gl.allocate_shared_memory(dtype, [2, TILE, TAIL], WIDE)
    peaks = gl.allocate_shared_memory(gl.float32, [2, TILE], ROW)
    barriers = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        record = records + item * RECORD
        token = gl.load(record + TOKEN)
        if token >= 0:
            sequence = gl.load(record + SEQUENCE)
            head = gl.load(record + HEAD)
            splits = gl.load(record + SPLITS_OF)
            first = gl.load(record + FIRST)
            end = gl.load(record + END)
            step = splits * SPLITS.chunk
            pairs = gl.cdiv(end - first, step)
            context = sequence if SPLITS.single else token
            row = (context * FORM.kv_heads + head).to(gl.int64) * SPLITS.most + gl.load(record + SPLIT)
            pages = page_table + sequence.to(gl.int64) * width
            for barrier in gl.static_range(BARRIERS):
                mbarrier.init(barriers.index(barrier), count=_arrivals(barrier))
            gl.warp_specialize(
                [
                    (
                        _left,
                        (
                            out, lse, partial, sizes, q, query, query_tail, halves, tails, peaks, barriers, first, end,
                            step, pairs, token, head, row, splits, FED, FORM, SCORES,
                        ),
                    ),
                    (
                        _right,
                        (
                            out, partial, q, query, query_tail, halves, tails, peaks, barriers, first, end, step, pairs,
                            token, head, row, splits, FED, FORM, SCORES,
                        ),
                    ),
                    (_copy, (kv, pages, first, end, step, pairs, halves, tails, barriers, CACHE)),
                ],
                [4, 4],
                REGISTERS,
            )  # fmt: skip
            for barrier in gl.static_range(BARRIERS):
                mbarrier.invalidate(barriers.index(barrier))
