"""Batch-invariant matmuls: the order of sums, which does not depend on the step, and the tile sizes that keep it.

On tensor cores, a result is a chain of instructions along the columns, 16 columns each in bf16 and f16, that add to one
float32 accumulator. The term of an instruction depends only on a row and a column (arXiv 2511.10909 models it bit by
bit as one sum of products). The bits therefore depend on the places where chains begin: the columns are cut into
splits, and the sums of the splits are added in order. As long as the instruction is the same, the numbers of rows and
columns of a tile only decide which results are computed together.
"""

from dataclasses import dataclass, replace

import torch

from ingot.backends.triton.lower.linear_choice import fitted, share_of, tiles
from ingot.backends.triton.lower.linear_tiles import Product, Tiles
from ingot.backends.triton.lower.shared_memory import shared_memory

# Steps of all sizes use the splits chosen for this many rows of x, for which splits save most.
_SPLIT_FOR = 16


@dataclass(frozen=True)
class Sums:
    """The order of sums: a result is the sum of `splits` sums, each over `share` columns, the last over the rest."""

    splits: int
    share: int


@dataclass(frozen=True)
class BlockTiles:
    """The launch parameters of `linear_blocks`.

    A tile has `tokens` rows and `block_n` columns of the result. `stages` blocks of `block_k` columns of the weight are
    in flight. `together` tiles read one tile of the weight before the next tile.
    """

    tokens: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    together: int = 8


def invariant_products(sm: int, dtype: torch.dtype) -> bool:
    """Return whether the same instruction sums tiles of all sizes below, for compute capability `sm`.

    That is mma before Hopper and on consumer GPUs of Blackwell, and wgmma on Hopper. Triton uses wgmma for 64 rows or
    more of the left operand in blocks of 4 warps or more. float32 does not use tensor cores.
    """
    return dtype is torch.float32 or 80 <= sm <= 90 or sm >= 120


def sums_of(product: Product, sm: int) -> Sums:
    """Return the order of sums of a matmul, for steps of all sizes."""
    share = share_of(product.depth, tiles(product, _SPLIT_FOR, sm))
    return Sums(-(-product.depth // share), share)


def few_tiles(product: Product, tokens: int, sm: int) -> Tiles:
    """Return the tiles of `linear_tile` for up to `tokens` rows: 16, 32 or 64."""
    chosen = tiles(product, _SPLIT_FOR, sm)
    return fitted(replace(chosen, splits=sums_of(product, sm).splits), product, tokens, sm)


def block_tiles(product: Product, sums: Sums, sm: int) -> BlockTiles:
    """Return the tiles of `linear_blocks`, for more than 64 rows. block_k is a power of two that divides a split."""
    power = sums.share & -sums.share
    if product.dtype is torch.float32:
        return BlockTiles(32, 32, min(32, power), warps=4, stages=2)
    # A tile with a gate has two accumulators in registers, and split columns double the accumulators.
    block_n, block_k = 64 if product.gated and sums.splits > 1 else 128, min(64, power)
    staged = (block_n * (2 if product.gated else 1) + 128) * block_k * product.dtype.itemsize
    return BlockTiles(128, block_n, block_k, warps=8, stages=min(3, shared_memory(sm) // staged))
