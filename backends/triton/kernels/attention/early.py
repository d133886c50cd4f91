"""Functions by which `decode_attention` loads data before the previous kernel has ended, by guessed lengths."""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.attention.addresses import rows_of
from ingot.backends.triton.kernels.attention.cache_dtype import (
    as_computed,
    as_multiplied,
    key_scales_of,
    query_scales_of,
    value_scales_of,
    values_dtype,
)
from ingot.backends.triton.kernels.attention.constants import group_rows
from ingot.backends.triton.kernels.attention.pairs import halves, joined, load_pairs, weighed_pairs
from ingot.backends.triton.kernels.attention.softmax import Operands, weighed
from ingot.backends.triton.kernels.rope import angles


@triton.jit
def _fetch_chunk(kv, pages, head, place, end, CACHE: tl.constexpr, FORM: tl.constexpr):
    """Prefetch keys and values of a k/v head into the L2 cache, at those positions `place` [N] that are below `end`.

    It does not wait for the data. `pages` points to the page ids of the sequence.
    """
    LINE: tl.constexpr = 1024 // kv.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (FORM.block + LINE - 1) // LINE
    inside = place < end
    # Positions past the end prefetch page 0 instead.
    rows = rows_of(kv, pages, place, inside, head, CACHE)
    line = tl.minimum(tl.arange(0, LINES) * LINE, FORM.dim - 1)  # heads of 80 float32 end in the third of four
    for part in tl.static_range(2):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0",
            "=r,l",
            [(rows[:, None] + part * CACHE.part_stride + line[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def fetch_ahead(
    kv,
    kv_lens,
    page_table,
    sequence,
    head,
    place,
    width,
    FIRST: tl.constexpr,
    CACHE: tl.constexpr,
    FORM: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Prefetch the keys and values of EARLY.ahead chunks of a split into the L2 cache, from its chunk FIRST on.

    `place` [chunk] are the positions of the split's chunk 0. A row of the page table has `width` pages. The sequence's
    length is a guess, because the previous kernel may not have ended. Only in the first layer can it be wrong.
    """
    cached = tl.load(kv_lens + tl.maximum(sequence, 0), cache_modifier=".cg")
    cached = tl.where(sequence >= 0, tl.minimum(cached, width * CACHE.page), 0)
    pages = page_table + sequence.to(tl.int64) * width
    for later in tl.static_range(FIRST, EARLY.ahead + FIRST):
        _fetch_chunk(kv, pages, head, place + later * SPLITS.base * SPLITS.chunk, cached, CACHE, FORM)


@triton.jit
def early_chunk(
    kv, page_table, sequence, head, place, width, CACHE: tl.constexpr, FORM: tl.constexpr, PAIRS: tl.constexpr
):
    """Load keys and values at the positions `place` [N] of a sequence, before its length is known.

    Return (keys, values), each [N, FORM.block]. With PAIRS, values are i16[N, FORM.block / 2] (`load_pairs`). Positions
    past the page table are zeros. A row of the page table has `width` pages. The loads need not wait for previous
    kernels, because earlier steps wrote the data, and the host wrote the page table.
    """
    d = tl.arange(0, FORM.block)
    held = (sequence >= 0) & (place // CACHE.page < width)
    pages = page_table + sequence.to(tl.int64) * width
    rows = rows_of(kv, pages, place, held, head, CACHE)
    inside = held[:, None] & (d < FORM.dim)[None, :]
    keys = tl.load(rows[:, None] + d[None, :], mask=inside, other=0.0)
    if PAIRS:
        values = load_pairs(kv, pages, place, held, head, CACHE, FORM)
    else:
        values = tl.load(rows[:, None] + CACHE.part_stride + d[None, :], mask=inside, other=0.0)
    return keys, values


@triton.jit
def early_scales(
    kv, page_table, sequence, head, place, width, CACHE: tl.constexpr, FORM: tl.constexpr, OF_VALUES: tl.constexpr
):
    """Load the scales [N] of keys, or with OF_VALUES of values, at the positions that `early_chunk` loads.

    Return None unless the cache has scales per token.
    """
    held = (sequence >= 0) & (place // CACHE.page < width)
    rows = rows_of(kv, page_table + sequence.to(tl.int64) * width, place, held, head, CACHE)
    if OF_VALUES:
        scales = value_scales_of(rows, held, CACHE)
    else:
        scales = key_scales_of(rows, held, CACHE)
    return scales


@triton.jit
def with_early(
    total,
    weight_sum,
    peak,
    query,
    keys,
    values,
    key_scales,
    value_scales,
    inside,
    kv,
    CACHE: tl.constexpr,
    SCORES: tl.constexpr,
    PAIRS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    slopes,
    query_places,
    places,
):
    """Add the keys and values of N positions, with their scales, to the online-softmax state of M rows.

    They are results of `early_chunk`, from `kv`, and `early_scales`.
    Return the new state (total, weight_sum, peak). `inside` [N] masks the positions of the context. `slopes` [M] are
    ALiBi slopes (`slopes_of`), or None. Slopes need positions: `query_places` [M] of the rows, `places` [N] of the
    keys. ASSEMBLY is that of `as_computed`.
    """
    GIVEN: tl.constexpr = query.dtype
    query_scales = query_scales_of(query, None, kv)
    query = as_multiplied(query, query_scales)
    VALUES: tl.constexpr = values_dtype(GIVEN, query.dtype, CACHE)
    keys = as_computed(keys, query.dtype, ASSEMBLY)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    seen = inside[None, :]
    # Values past the end may be NaN, and zero times NaN is NaN.
    if value_scales is not None:
        value_scales = tl.where(inside, value_scales, 0.0)
    operands = Operands(
        slopes=slopes, query_places=query_places, places=places, query_scales=query_scales, key_scales=key_scales,
        value_scales=value_scales,
    )  # fmt: skip
    if PAIRS:
        first_total, second_total = halves(total)
        values = tl.where(inside[:, None], values, 0)
        first_total, second_total, weight_sum, peak = weighed_pairs(
            scores, values, first_total, second_total, weight_sum, peak, seen, kv, operands, SCORES, ASSEMBLY
        )
        total = joined(first_total, second_total)
    else:
        values = tl.where(inside[:, None], as_computed(values, VALUES, ASSEMBLY), 0.0)
        total, weight_sum, peak = weighed(scores, values, total, weight_sum, peak, seen, operands, SCORES)
    return total, weight_sum, peak


@triton.jit
def guessed_angles(positions, table, token, FORM: tl.constexpr, HEAD: tl.constexpr, EARLY: tl.constexpr):
    """Load a token's position and rotary angles before the previous kernel has ended.

    Return (position, cosines, sines). Cosines and sines are [G, FORM.block]. The position is a guess, because the
    previous kernel may still write it. Only in the first layer can it be wrong.
    """
    guess = tl.load(positions + token, cache_modifier=".cg")
    guess = tl.minimum(tl.maximum(guess, 0), EARLY.positions - 1)
    # As many rows as the tiles of q, k and v: tiles of one shape have one layout, and none needs a conversion.
    cos, sin = angles(table, guess + tl.zeros_like(tl.arange(0, group_rows(FORM))), HEAD)
    return guess, cos, sin
