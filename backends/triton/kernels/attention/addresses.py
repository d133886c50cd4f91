"""Addresses of the keys in a paged KV cache."""

import triton
import triton.language as tl


@triton.jit
def rows_of(kv, pages, place, inside, head, CACHE: tl.constexpr, PACKED: tl.constexpr = 1):
    """Return pointers [N] to the cached keys of a k/v head at the positions `place` [N] of a sequence.

    `pages` points to the page ids of the sequence. `inside` masks positions: masked-out ones point into page 0. CACHE
    is the memory layout of the cache. An element that `kv` points to holds PACKED elements of the cache.
    """
    page = tl.load(pages + place // CACHE.page, mask=inside, other=0).to(tl.int64)
    slot = place % CACHE.page * (CACHE.slot_stride // PACKED)
    return kv + page * (CACHE.page_stride // PACKED) + slot + head * (CACHE.row // PACKED)


@triton.jit
def cached_head(head, FORM: tl.constexpr):
    """Return the index of the cache head that a k/v head reads. Each FORM.sharing adjacent k/v heads read one."""
    if FORM.sharing > 1:
        head = head // FORM.sharing
    return head
