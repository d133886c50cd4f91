"""How products are added up where a row's bits may not depend on its step, and the tile sizes that do so.

On the tensor cores a result is a chain of instructions along the columns, 16 of them each in bf16 and f16, that add to
one sum in float32. So what counts is where a chain begins: it is cut into splits, whose sums are added in order. Rows
and columns of a tile only say which results are made side by side, as long as the instruction is the same.
"""

from dataclasses import dataclass, replace

import torch

from ingot.backends.triton.lower.linear_choice import fitted, share_of, tiles
from ingot.backends.triton.lower.linear_tiles import Product, Tiles

# Rows of x for whose tiles the columns are split, in steps of all sizes: there it saves most.
_SPLIT_FOR = 16


@dataclass(frozen=True)
class Sums:
    """`splits` sums make a result, each over `share` columns, the last one over what is left."""

    splits: int
    share: int


@dataclass(frozen=True)
class BlockTiles:
    """How `linear_blocks` runs: tiles of `tokens` rows and `block_n` columns of the result; of the weight `stages`
    blocks of `block_k` columns are on the way. `together` tiles share one of the weight's before the next one's turn.
    """

    tokens: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    together: int = 8


def invariant_products(sm: int, dtype: torch.dtype) -> bool:
    """Whether tiles of all sizes below are added up by the same instruction: mma before Hopper and on consumer GPUs of
    Blackwell, and Hopper's wgmma, which Triton takes for 64 rows or more of the left operand in blocks of 4 warps or
    more. float32 is added up on no tensor core."""
    return dtype is torch.float32 or 80 <= sm <= 90 or sm >= 120


def sums_of(product: Product, sm: int) -> Sums:
    share = share_of(product.depth, tiles(product, _SPLIT_FOR, sm))
    return Sums(-(-product.depth // share), share)


def few_tiles(product: Product, tokens: int, sm: int) -> Tiles:
    """For up to `tokens` rows: 16, 32 or 64."""
    chosen = tiles(product, _SPLIT_FOR, sm)
    return fitted(replace(chosen, splits=sums_of(product, sm).splits), product, tokens, sm)


def block_tiles(product: Product, sums: Sums) -> BlockTiles:
    """For more rows than that. Sizes are powers of two, so that blocks of fewer columns end where splits do."""
    if product.dtype is torch.float32:
        return BlockTiles(32, 32, min(32, sums.share), warps=4, stages=2)
    # Two sums of a tile stand in registers where it has a gate, and two more of each where columns are split.
    block_n = 64 if product.gated and sums.splits > 1 else 128
    return BlockTiles(128, block_n, min(64, sums.share & -sums.share), warps=8, stages=3)
