"""Compile-time constants of the attention and cache kernels, in groups: each dataclass is one constant of a kernel.

The dataclasses have fields and no properties. Triton identifies a compiled kernel by the values of the fields, so a
changed property would not cause a recompile.
"""

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Strides:
    """The strides of q, k or v [T, H, D] in elements.

    `token` is the stride from one token to the next, and `head` from one head to the next.
    """

    token: int
    head: int


@dataclass(frozen=True)
class Fed:
    """The strides of q, k and v, the step's own tensors. None stands for a tensor that a kernel does not take."""

    q: Strides | None = None
    k: Strides | None = None
    v: Strides | None = None


@dataclass(frozen=True)
class Layout:
    """The memory layout of a paged KV cache. Strides are in elements.

    A page holds `page` positions. `page_stride` is the stride between pages, and `slot_stride` between positions of a
    page. `row` is the stride between heads of a position. A value is stored `part_stride` elements after its key.

    The cache stores keys divided by `k_scale` and values divided by `v_scale`. `Scores.scale` already includes
    `k_scale`. With `per_token`, it stores a float32 scale for each of them, `key_scale` and `value_scale` bytes after
    the start of a key.
    """

    page: int
    page_stride: int
    part_stride: int
    slot_stride: int
    row: int
    k_scale: float = 1.0
    v_scale: float = 1.0
    per_token: bool = False
    key_scale: int = 0
    value_scale: int = 0


@dataclass(frozen=True)
class Form:
    """The sizes of heads in an attention, and of the tiles that hold a head.

    A key has `dim` elements. The first ones are in a tile of `block` columns. The rest is in a second tile of `tail`
    columns, or `tail` is 0. A value has `value_dim` elements in a tile of `block_value` columns. With `same`, the value
    is the start of its key.

    There are `kv_heads` k/v heads. `group` q heads share a k/v head, in a tile of `block_group` rows. `sharing`
    adjacent k/v heads read one head of the cache.
    """

    kv_heads: int
    dim: int
    block: int
    value_dim: int
    block_value: int
    tail: int = 0
    same: bool = False
    group: int = 1
    block_group: int = 1
    sharing: int = 1


@dataclass(frozen=True)
class Scores:
    """How the dot products of q and keys become scores: multiplied by `scale`, soft-capped, and masked.

    `soft_cap` is None for no cap. `mask` names the attention mask, such as "causal" or "window_1024".
    """

    scale: float
    mask: str
    soft_cap: float | None


@dataclass(frozen=True)
class Splits:
    """How `decode_attention` divides each context among several programs (split-K, as in flash-decoding).

    Each (token, k/v head) has between `base` and `most` splits. The splits of a context take chunks of `chunk`
    positions in turn. If `shares` is 0, all contexts have `base` splits. Otherwise long contexts get more. The intended
    length of a split is then (positions that all tokens of the step read) / `shares`.

    A loop that merges results takes `at_once` splits of `heads_at_once` q heads per iteration. A loop over sequences
    loads the lengths of `scan` sequences per iteration.

    With `single`, the kernel computes only sequences with one token in the step. With `fed_apart`, splits read only
    positions of earlier steps, and the kernel adds the tokens of this step separately. With `apart`, another launch
    merges the results of splits, by `merge_attention`.
    """

    chunk: int
    base: int
    shares: int
    most: int
    at_once: int
    heads_at_once: int
    scan: int
    single: bool
    fed_apart: bool
    apart: bool = False


@dataclass(frozen=True)
class PrefixSplits:
    """How `shared_attention` divides shared prefixes among programs (split-K).

    Sequences that share a prefix form a group; a step has up to `groups` of them. Per head, about `programs` programs
    compute all prefixes of the step. One prefix has at most `most` splits.
    """

    programs: int
    most: int
    groups: int


@dataclass(frozen=True)
class Early:
    """The loads that `decode_attention` starts before the previous kernel has ended.

    With `tile`, a program loads its first tile of keys and values. It prefetches the next `ahead` tiles into the L2
    cache. It also loads rotary angles, for a position that it guesses. The table of angles has `positions` rows.
    """

    tile: bool
    ahead: int
    positions: int


@triton.constexpr_function
def group_rows(form):
    """Return the number of rows of a tile that holds the q heads of one k/v head, for one token.

    It is at least 16, as tensor cores need.
    """
    return max(16, form.block_group)
