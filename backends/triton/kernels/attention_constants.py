"""Compile-time constants of the attention and cache kernels, in groups: each dataclass is one constant of a kernel.

The dataclasses have fields and no properties. Triton identifies a compiled kernel by the values of the fields, so a
changed property would not cause a recompile.
"""

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Strides:
    """The strides of q, k or v [T, H, D] in elements: `token` from one token to the next, `head` between heads."""

    token: int
    head: int


@dataclass(frozen=True)
class Fed:
    """The strides of q, k and v, the tensors of the step's tokens; None for a tensor that a kernel does not take."""

    q: Strides | None = None
    k: Strides | None = None
    v: Strides | None = None


@dataclass(frozen=True)
class Layout:
    """The memory layout of a paged KV cache, in elements.

    A page holds `page` positions. Strides: `page_stride` between pages, `slot_stride` between positions of a page,
    `row` between heads of a position. A value is stored `part_stride` after its key. The cache stores keys divided by
    `k_scale` and values divided by `v_scale`. The scale of the scores (`Scores.scale`) already includes `k_scale`.
    """

    page: int
    page_stride: int
    part_stride: int
    slot_stride: int
    row: int
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class Form:
    """The head sizes of an attention, and the sizes of the tiles that hold a head.

    A key has `dim` elements: the first ones in a tile of `block` columns, the rest in a second tile of `tail` columns
    (0 if there is no rest). A value has `value_dim` elements in a tile of `block_value`; with `same`, it is the first
    tile of its key. `group` q heads share each of `kv_heads` k/v heads, in tiles of `block_group` rows. `sharing`
    adjacent k/v heads read the same head of the cache.
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
    """How the dot products of q and keys become scores: times `scale`, soft-capped, and masked.

    `soft_cap` is None for no cap. `mask` names the attention mask, such as "causal" or "window_1024".
    """

    scale: float
    mask: str
    soft_cap: float | None


@dataclass(frozen=True)
class Splits:
    """How `decode_attention` divides each context among several programs (split-K, as in flash-decoding).

    Each (token, k/v head) has between `base` and `most` splits. With `shares` > 0, the intended length of a split is
    all positions that the step's tokens read, divided by `shares`. Contexts longer than that get more splits than
    `base`. With 0 shares, all contexts have `base` splits. The splits of a context take chunks of `chunk` positions in
    turn. To merge results, a loop takes `at_once` splits of `heads_at_once` q heads per iteration. Loops over sequences
    load the lengths of `scan` sequences per iteration.

    With `single`, the kernel computes only sequences with one token in the step. With `fed_apart`, splits read only
    cached positions, and the kernel adds the tokens of the step separately.
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


@dataclass(frozen=True)
class PrefixSplits:
    """How `shared_attention` divides shared prefixes among programs (split-K).

    A step has up to `groups` groups of sequences that share a prefix. Per head, about `programs` programs compute all
    prefixes of the step. One prefix has at most `most` splits.
    """

    programs: int
    most: int
    groups: int


@dataclass(frozen=True)
class Early:
    """The loads that `decode_attention` starts before the previous kernel has ended.

    With `tile`, a program loads its first tile of keys and values. It also prefetches the next `ahead` tiles into the
    L2 cache, and loads rotary angles for a guessed position. `positions` is the number of rows of the table of angles.
    """

    tile: bool
    ahead: int
    positions: int


@triton.constexpr_function
def group_rows(form):
    """Return the rows of a tile that holds the q heads of one (token, k/v head): 16 or more, as tensor cores need."""
    return max(16, form.block_group)
