"""Keys and values that `decode_attention` asks for before the kernel in front of it has ended."""

import triton
import triton.language as tl

from ingot.backends.triton.kernels.attention import rows_of


@triton.jit
def _fetch_chunk(kv, pages, head, place, end, CACHE: tl.constexpr, FORM: tl.constexpr):
    """Ask for the keys and values at positions `place` [N] below `end` to come into the L2 cache, and wait for
    nothing."""
    LINE: tl.constexpr = 1024 // kv.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (FORM.block + LINE - 1) // LINE
    inside = place < end
    # Positions past the end are asked for on page 0, again and again.
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
    """Ask for the chunks of a split from its chunk FIRST on, `ahead` of them; `place` [chunk] are the positions of its
    chunk 0. The length is a guess: in all layers but the first it has long been there."""
    cached = tl.load(kv_lens + tl.maximum(sequence, 0), cache_modifier=".cg")
    cached = tl.where(sequence >= 0, tl.minimum(cached, width * CACHE.page), 0)
    pages = page_table + sequence.to(tl.int64) * width
    for later in tl.static_range(FIRST, EARLY.ahead + FIRST):
        _fetch_chunk(kv, pages, head, place + later * SPLITS.base * SPLITS.chunk, cached, CACHE, FORM)


@triton.jit
def early_chunk(kv, page_table, sequence, head, place, width, CACHE: tl.constexpr, FORM: tl.constexpr):
    """Keys and values [N, FORM.block] at positions `place` [N], before the length is known; zeros where the page table
    has no such position. The page table comes from the host, and earlier steps wrote what the cache holds."""
    d = tl.arange(0, FORM.block)
    held = (sequence >= 0) & (place // CACHE.page < width)
    pages = page_table + sequence.to(tl.int64) * width
    rows = rows_of(kv, pages, place, held, head, CACHE)
    inside = held[:, None] & (d < FORM.dim)[None, :]
    keys = tl.load(rows[:, None] + d[None, :], mask=inside, other=0.0)
    values = tl.load(rows[:, None] + CACHE.part_stride + d[None, :], mask=inside, other=0.0)
    return keys, values
