"""How kernels of attention hold a head of the cache in tiles."""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Form:
    """Heads of the cache lie `row` numbers apart. A key has DIM numbers: a tile of BLOCK_DIM takes the first of them,
    and where it is too small, one of `tail` the others; else `tail` is 0. A value has `value_dim` numbers in a tile of
    `block_value`: the first tile of its key where `same`. `sharing` heads of a grid read one head of the cache.
    """

    row: int
    tail: int
    value_dim: int
    block_value: int
    same: bool = False
    sharing: int = 1


@triton.jit
def cached_head(head, FORM: tl.constexpr):
    """The head of the cache that a head of the grid reads."""
    if FORM.sharing > 1:
        head = head // FORM.sharing
    return head


@triton.jit
def tail_of(q, rows, held, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, FORM: tl.constexpr):
    """What the first tile of queries leaves over, at the offsets `rows` [M] of q, where `held` [M]; None without it."""
    if FORM.tail > 0:
        t = BLOCK_DIM + tl.arange(0, FORM.tail)
        return tl.load(q + rows[:, None] + t[None, :], mask=held[:, None] & (t < DIM)[None, :], other=0.0)
    else:
        return None
