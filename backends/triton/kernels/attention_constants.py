"""What kernels of attention and of the cache are compiled for, in groups: a group is one constant of a kernel.

Groups have fields alone. Compiled kernels are known by the values of these, so that a property could change unseen.
"""

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Strides:
    """Where rows [T, H, D] of q, k or v lie: tokens `token` elements apart, and heads `head`."""

    token: int
    head: int


@dataclass(frozen=True)
class Fed:
    """How what a step feeds lies in memory; None for what a kernel is not given."""

    q: Strides | None = None
    k: Strides | None = None
    v: Strides | None = None


@dataclass(frozen=True)
class Layout:
    """How a cache lies in memory. Its pages have `page` positions and are `page_stride` elements apart; positions of a
    page are `slot_stride` apart, and heads of a position `row`. A value lies `part_stride` after its key. What it holds
    is keys and values divided by their scales, of which that of keys is part of `Scores.scale`."""

    page: int
    page_stride: int
    part_stride: int
    slot_stride: int
    row: int
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class Form:
    """The heads of an attention, and how tiles hold them.

    A key has `dim` elements: a tile of `block` takes the first of them, and where it is too small, one of `tail` the
    others; else `tail` is 0. A value has `value_dim` elements in a tile of `block_value`: the first tile of its key
    where `same`. `group` heads of q, for which tiles have `block_group` rows, share each of `kv_heads` heads of k and
    v. `sharing` of these `kv_heads` read one head of the cache.
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
    """How scores are made of q times keys: scaled, capped unless `soft_cap` is None, and left out where a query does
    not see by the mask of that name (`ingot.ir.masks`)."""

    scale: float
    mask: str
    soft_cap: float | None


@dataclass(frozen=True)
class Splits:
    """How `decode_attention` splits contexts.

    Each (token, head) has `base` splits for certain and `most` at most: by what all tokens read, in `shares` parts; 0:
    none has more than `base`. A split takes `chunk` positions in its turn. `at_once` splits of `heads_at_once` heads of
    q are put together in one round. Lengths of `scan` sequences are looked at together. With `single`, only sequences
    that feed one token count. With `fed_apart`, splits have cached positions alone.
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
    """How `shared_attention` splits the prefixes of up to `groups` groups: for `programs` programs for each head, into
    `most` splits of a prefix at most."""

    programs: int
    most: int
    groups: int


@dataclass(frozen=True)
class Early:
    """What `decode_attention` does before the kernel in front of it has ended: it loads its first tile if `tile`, and
    fetches `ahead` tiles after that into the L2 cache. It loads angles by a guess of the position, below `positions`.
    """

    tile: bool
    ahead: int
    positions: int


@triton.constexpr_function
def group_rows(form):
    """Rows of a tile that holds the heads of q of a (token, head): tensor cores take 16 at least."""
    return max(16, form.block_group)
