"""Batch-invariant matmuls: the order of sums, which does not depend on the step, and the tile sizes that keep it.

On tensor cores, a result is a chain of instructions along the K axis, 16 columns of the weight each in bf16 and f16.
Each instruction adds to one float32 accumulator. Its term depends only on a row of x and a row of the weight (arXiv
2511.10909 models it bit by bit as one sum of products). The bits therefore depend only on where chains begin. The K
axis is cut into splits, each a chain, and the sums of the splits are added in order. As long as the instruction is the
same, the numbers of rows and columns of a tile only decide which results are computed together.
"""

from dataclasses import dataclass, replace

import torch

from ingot.backends.triton.lower.linear.choice import fitted, share_of, tiles
from ingot.backends.triton.lower.linear.tiles import Product, Tiles
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.shared_memory import shared_memory

# Steps of all sizes use the splits chosen for this many rows of x, because with few rows splits save most time.
_SPLIT_FOR = 16


@dataclass(frozen=True)
class Sums:
    """The order in which a batch-invariant matmul sums along K. K is divided into `splits` parts of `share` elements.

    Each part is summed first. Then the sums of the parts are added in order. The last part may be shorter.
    """

    splits: int
    share: int


@dataclass(frozen=True)
class BlockTiles:
    """The tile sizes and launch parameters of the matmul kernel `linear_blocks`.

    A tile has `tokens` rows and `block_n` columns of the result. `stages` blocks of `block_k` columns of the weight are
    in flight. `together` successive tiles read the same rows of the weight, so these stay in the L2 cache.
    """

    tokens: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    together: int = 8


def invariant_products(sm: int, dtype: torch.dtype) -> bool:
    """Return whether matmuls of a dtype can be batch-invariant on compute capability `sm`.

    They can if Triton uses one kind of tensor-core instruction for all tile sizes of this file. Before Hopper, and on
    consumer GPUs of Blackwell, that is mma. On Hopper it is wgmma: Triton uses it for 64 or more rows of the left
    operand, in blocks of 4 or more warps. float32 uses no tensor cores.
    """
    return dtype is torch.float32 or 80 <= sm <= 90 or sm >= 120


def require_invariant(sm: int, dtype: torch.dtype) -> None:
    """Raise Refused if matmuls of a dtype cannot be batch-invariant on compute capability `sm`."""
    if not invariant_products(sm, dtype):
        name = f"{sm // 10}.{sm % 10}"
        raise Refused(
            f"on compute capability {name}, matmuls with other tile sizes are not known to have the same bits"
        )


def sums_of(product: Product, sm: int) -> Sums:
    """Return the order in which a batch-invariant matmul sums along K. It is equal for steps of all sizes."""
    share = share_of(product.depth, tiles(product, _SPLIT_FOR, sm))
    return Sums(-(-product.depth // share), share)


def few_tiles(product: Product, tokens: int, sm: int) -> Tiles:
    """Return the tile sizes of a batch-invariant matmul for few rows of x, for the kernel `linear_tile`.

    `tokens` is the number of rows of x that the kernel is compiled for: 16, 32 or 64.
    """
    chosen = tiles(product, _SPLIT_FOR, sm)
    return fitted(replace(chosen, splits=sums_of(product, sm).splits), product, tokens, sm)


def block_tiles(product: Product, sums: Sums, sm: int) -> BlockTiles:
    """Return the tile sizes of a batch-invariant matmul for more than 64 rows of x, for the kernel `linear_blocks`.

    `sums` is the order in which it sums along K. The `block_k` of the result is a power of two that divides
    `sums.share`.
    """
    power = sums.share & -sums.share
    if product.dtype is torch.float32:
        return BlockTiles(32, 32, min(32, power), warps=4, stages=2)
    # A tile with a gate has two accumulators in registers, and split columns double the accumulators.
    block_n, block_k = 64 if product.gated and sums.splits > 1 else 128, min(64, power)
    staged = (block_n * (2 if product.gated else 1) + 128) * block_k * product.dtype.itemsize
    return BlockTiles(128, block_n, block_k, warps=8, stages=min(3, shared_memory(sm) // staged))
