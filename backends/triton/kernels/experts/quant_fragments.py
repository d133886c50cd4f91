"""The experts of few tokens with weights of f4e2m1, on tensor cores (`quant/fragments.py`).

Programs take blocks of choices of one expert, as in `quant_experts_tile`. A warp multiplies two tiles of 16 rows with
all tokens of its block: a tile of gate and the same one of up, or two tiles of down. It goes through chunks of 128
columns. Each lane has 32 of them. Warps that share tiles (WAYS) take the chunks in turn, and add their sums through
shared memory at the end. Until then, no warp waits for another one.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ingot.backends.triton.kernels.experts.groups import find_block
from ingot.backends.triton.kernels.experts.parts import joined
from ingot.backends.triton.kernels.experts.tile import place_of
from ingot.backends.triton.kernels.quant.columns import place_in_row, row_size
from ingot.backends.triton.kernels.quant.elements import factor_bits
from ingot.backends.triton.kernels.quant.fragments import fragments, products_added

_TILE = tl.constexpr(16)  # rows of an instruction
# Steps between the load of a chunk and its use. With one, the experts of GPT-OSS 20B took 1.1 times as long for 32
# tokens, on an H200. Prefetching lines into the L2 cache as well made them slower.
_EARLY = tl.constexpr(2)


@triton.jit
def quant_experts_up_fragments(
    x,
    order,
    counts,
    weight,
    scales,
    bias,
    hidden,
    blocks,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    WAYS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SIZES: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the joined gate and up of each choice: `hidden` [choices, F] from x [rows, K].

    Grid: `blocks` * cdiv(F, 16 * TILES). A program has TILES * WAYS warps. TOKENS is a multiple of 8. `prepare_rows`
    has written x in the order FRAGMENTS (`columns.py`). The columns of `hidden` are written in the order of CHUNK. The
    other parameters are described in `quant_experts_up_tile`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    block, tile = place_of(tl.program_id(0), blocks, (F + _TILE * TILES - 1) // (_TILE * TILES), TOGETHER)
    found, begin, size = find_block(counts, block, EXPERTS, BLOCK_EXPERTS, TOKENS)
    if size > 0:
        expert = found.to(tl.int64)
        thread = tl.arange(0, 32 * TILES * WAYS)
        first = (tile * TILES + ((thread >> 5) & (TILES - 1))) * _TILE
        gate, up = two_tiles(
            x, order, begin, size, weight + expert * SIZES.weight, scales + expert * SIZES.scales, first, thread,
            F - 1, 0, F, TOP_K, K, TOKENS, TILES, WAYS, ELEMENTS,
        )  # fmt: skip
        FOLD: tl.constexpr = 2.0**ELEMENTS.fold
        n, t = _places(tile, TILES)
        held = tl.minimum(n, F - 1)
        own_bias = None if bias is None else bias + expert * (2 * F)
        for nth in tl.static_range(TOKENS // 8):
            a, b = gate[nth] * FOLD, up[nth] * FOLD
            if own_bias is not None:
                a += tl.load(own_bias + held).to(tl.float32)
                b += tl.load(own_bias + F + held).to(tl.float32)
            value = joined(a, b, ACTIVATION, LIMIT, ALPHA)
            token = t + 8 * nth
            at = hidden + (begin + token).to(tl.int64) * row_size(F, CHUNK) + place_in_row(n, CHUNK)
            tl.store(at, value.to(hidden.dtype.element_ty), mask=(n < F) & (token < size))


@triton.jit
def quant_experts_down_fragments(
    hidden,
    order,
    counts,
    weight,
    scales,
    bias,
    made,
    blocks,
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    WAYS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    SIZES: tl.constexpr,
    ELEMENTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the result of each choice: `made` [choices, N], in the order of choices, from `hidden` [choices, K].

    Grid: `blocks` * cdiv(N, 32 * TILES). Row i of `hidden` belongs to the choice `order[i]`. The other parameters are
    described in `quant_experts_up_fragments`.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    block, tile = place_of(tl.program_id(0), blocks, (N + 2 * _TILE * TILES - 1) // (2 * _TILE * TILES), TOGETHER)
    found, begin, size = find_block(counts, block, EXPERTS, BLOCK_EXPERTS, TOKENS)
    if size > 0:
        expert = found.to(tl.int64)
        thread = tl.arange(0, 32 * TILES * WAYS)
        row = (2 * tile * TILES + ((thread >> 5) & (TILES - 1))) * _TILE
        sums = two_tiles(
            hidden, None, begin, size, weight + expert * SIZES.weight, scales + expert * SIZES.scales, row, thread,
            N - 1, _TILE * TILES, 0, 1, K, TOKENS, TILES, WAYS, ELEMENTS,
        )  # fmt: skip
        FOLD: tl.constexpr = 2.0**ELEMENTS.fold
        first, t = _places(2 * tile, TILES)
        for nth in tl.static_range(TOKENS // 8):
            token = t + 8 * nth
            choice = tl.load(order + begin + tl.minimum(token, size - 1)).to(tl.int64)
            for half in tl.static_range(2):
                n = first + half * (_TILE * TILES)
                value = sums[half][nth] * FOLD
                if bias is not None:
                    value += tl.load(bias + expert * N + tl.minimum(n, N - 1)).to(tl.float32)
                at = made + choice * N + n
                tl.store(at, value.to(made.dtype.element_ty), mask=(n < N) & (token < size))


@triton.jit
def _places(tile, TILES: tl.constexpr):
    """Return the row of the weight and the token of each sum of the tiles from number `tile` * TILES on: [threads, 4].

    Tokens are those of the first eight.
    """
    thread = tl.arange(0, 32 * TILES)[:, None]
    register = tl.arange(0, 4)[None, :]
    row = (tile * TILES + (thread >> 5)) * _TILE + ((thread >> 2) & 7) + 8 * (register >> 1)
    return row, 2 * (thread & 3) + (register & 1)


@triton.jit
def two_tiles(
    x,
    order,
    begin,
    size,
    weight,
    scales,
    first,
    thread,
    LAST: tl.constexpr,
    STEP: tl.constexpr,
    JUMP: tl.constexpr,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    TILES: tl.constexpr,
    WAYS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Return the sums of two tiles of each warp over all columns: for each, f32 [32 * TILES, 4] by eight tokens.

    `first` i32 [threads] is the first row of a warp's first tile. The second one begins STEP rows later. Its rows are
    JUMP rows further on in the weight. Rows after LAST repeat it. The tokens are `size` choices from place `begin` on:
    rows order[place] // TOP_K of x, or rows `place` without `order`.
    """
    GROUPS: tl.constexpr = K // 32  # 32 columns each, those of a lane
    CHUNKS: tl.constexpr = (GROUPS + 3) // 4
    SHARE: tl.constexpr = (CHUNKS + WAYS - 1) // WAYS
    STEPS: tl.constexpr = GROUPS // 4 // WAYS  # those in which all lanes have columns
    words = weight.to(tl.pointer_type(tl.int32))
    g = (thread >> 2) & 7
    row0, row1 = tl.minimum(first + g, LAST), tl.minimum(first + g + 8, LAST)
    row2, row3 = tl.minimum(first + STEP + g, LAST) + JUMP, tl.minimum(first + STEP + g + 8, LAST) + JUMP
    chunk = thread // (32 * TILES)
    rows = ()
    for nth in tl.static_range(TOKENS // 8):
        place = begin + tl.minimum(g + 8 * nth, size - 1)
        if order is not None:
            place = tl.load(order + place) // TOP_K
        rows = rows + (place * (CHUNKS * 64) + (thread & 3) * 4,)
    zeros = tl.zeros((32 * TILES * WAYS, 4), tl.float32)
    sums, others = (), ()
    for _nth in tl.static_range(TOKENS // 8):
        sums, others = sums + (zeros,), others + (zeros,)
    # An iteration has one step more than a chunk is loaded early. So a chunk is loaded into the registers of an earlier
    # one: a copy at the end of an iteration would wait for the load.
    UNROLLED: tl.constexpr = _EARLY + 1
    ring = ()
    for nth in tl.static_range(_EARLY):
        ring = ring + (_load(words, scales, chunk + nth * WAYS, thread, row0, row1, row2, row3, GROUPS, ELEMENTS),)
    for _turn in range(STEPS // UNROLLED):
        for _nth in tl.static_range(UNROLLED):
            ring = ring + (
                _load(words, scales, chunk + _EARLY * WAYS, thread, row0, row1, row2, row3, GROUPS, ELEMENTS),
            )
            sums, others = _add(sums, others, ring[0], x, rows, chunk, thread, TOKENS, GROUPS, True, ELEMENTS)
            ring = ring[1:]
            chunk += WAYS
    for nth in tl.static_range(STEPS // UNROLLED * UNROLLED, SHARE):
        if nth + _EARLY < SHARE:
            ring = ring + (
                _load(words, scales, chunk + _EARLY * WAYS, thread, row0, row1, row2, row3, GROUPS, ELEMENTS),
            )
        sums, others = _add(sums, others, ring[0], x, rows, chunk, thread, TOKENS, GROUPS, nth < STEPS, ELEMENTS)
        ring = ring[1:]
        chunk += WAYS
    if WAYS == 1:
        return sums, others
    added, other_added = (), ()
    for nth in tl.static_range(TOKENS // 8):
        added = added + (tl.sum(tl.reshape(sums[nth], (WAYS, 32 * TILES, 4)), 0),)
        other_added = other_added + (tl.sum(tl.reshape(others[nth], (WAYS, 32 * TILES, 4)), 0),)
    return added, other_added


@triton.jit
def _add(
    sums,
    others,
    held,
    x,
    rows,
    chunk,
    thread,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Return the sums of two tiles plus those of a chunk, whose words and scales are `held`.

    WHOLE says that all lanes have columns of it.
    """
    left = fragments(held[0], held[1], _twice(held[4], ELEMENTS), _twice(held[5], ELEMENTS), ELEMENTS.assembly)
    other = fragments(held[2], held[3], _twice(held[6], ELEMENTS), _twice(held[7], ELEMENTS), ELEMENTS.assembly)
    inside = chunk * 4 + (thread & 3) < GROUPS
    new, new_others = (), ()
    for nth in tl.static_range(TOKENS // 8):
        at = x.to(tl.pointer_type(tl.int32)) + (rows[nth] + chunk * 64)[:, None] + tl.arange(0, 4)[None, :]
        x0, x1 = _x(at, inside, WHOLE), _x(at + 16, inside, WHOLE)
        x2, x3 = _x(at + 32, inside, WHOLE), _x(at + 48, inside, WHOLE)
        new = new + (products_added(sums[nth], left, x0, x1, x2, x3, ELEMENTS.assembly),)
        new_others = new_others + (products_added(others[nth], other, x0, x1, x2, x3, ELEMENTS.assembly),)
    return new, new_others


@triton.jit
def _load(words, scales, chunk, thread, row0, row1, row2, row3, GROUPS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Return the words i32 [threads, 4] of a chunk of four rows, and their scales [threads]."""
    # Columns past the last ones repeat these, and are multiplied by zeros.
    group = tl.minimum(chunk * 4 + (thread & 3), GROUPS - 1)
    return (
        _words(words, row0 * GROUPS + group),
        _words(words, row1 * GROUPS + group),
        _words(words, row2 * GROUPS + group),
        _words(words, row3 * GROUPS + group),
        _scale(scales + row0 * ELEMENTS.scale_stride + group, ELEMENTS.assembly),
        _scale(scales + row1 * ELEMENTS.scale_stride + group, ELEMENTS.assembly),
        _scale(scales + row2 * ELEMENTS.scale_stride + group, ELEMENTS.assembly),
        _scale(scales + row3 * ELEMENTS.scale_stride + group, ELEMENTS.assembly),
    )


@triton.jit
def _words(words, place):
    return tl.load(words + (place * 4)[:, None] + tl.arange(0, 4)[None, :], eviction_policy="evict_first")


@triton.jit
def _x(at, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside[:, None], other=0)


@triton.jit
def _scale(at, ASSEMBLY: tl.constexpr):
    """Load bytes as i32. A byte in a register of 16 bits would be copied at the end of an iteration, after a wait."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "ld.global.nc.u8 $0, [$1];", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        return tl.load(at).to(tl.int32)


@triton.jit
def _twice(scales, ELEMENTS: tl.constexpr):
    """Return the factors of scales as `fragments` takes them: twice in a register."""
    return factor_bits(scales, ELEMENTS) * 0x10001
