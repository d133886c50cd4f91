"""Choose tile sizes for a matmul: those of the most similar measured matmul, made to fit."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from ingot.backends.triton.lower.linear.tiles import MATVEC, MEASURED_SM, TILES, MatvecTiles, Measured, Product, Tiles
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.ir.artifact.tuning import Source

# Least BLOCK_K: `tl.dot` sums over 16 columns or more.
_LEAST = 16
# Most splits: the program that arrives last holds the sums of all splits in registers at once.
_MOST_SPLITS = 8


def known_tiles(product: Product, tokens: int, sm: int) -> tuple[MatvecTiles | Tiles, Source]:
    """Return the tile sizes of a matmul that was not tuned, and their source.

    The source is "table" if they were measured for this matmul, else "heuristic". `tokens` is the number of rows of x
    that the kernel is compiled for: 1, 16, 32 or 64. `sm` is the compute capability.
    """
    chosen = matvec_tiles(product) if tokens == 1 else tiles(product, tokens, sm)
    return chosen, "table" if product in _measured(tokens) else "heuristic"


def known_microseconds(product: Product, tokens: int, sm: int) -> float | None:
    """Return the measured microseconds of a matmul with the tile sizes of `known_tiles`.

    Return None if the matmul was not measured on compute capability `sm`.
    """
    measured = _measured(tokens)
    return measured[product].microseconds if sm == MEASURED_SM and product in measured else None


def matvec_tiles(product: Product) -> MatvecTiles:
    """Return the tile sizes of a matmul with one row of x.

    They come from the most similar measured matmul, and are changed to fit this one.
    """
    found = MATVEC[_nearest(product, MATVEC)].tiles
    return replace(found, block_k=_block_k(found.block_k, product))


def tiles(product: Product, tokens: int, sm: int) -> Tiles:
    """Return the tile sizes of a matmul for a kernel of `tokens` rows of x: 16, 32 or 64.

    They come from the most similar measured matmul, and are changed to fit on compute capability `sm`.
    """
    nearest = _nearest(product, TILES[tokens])
    found = TILES[tokens][nearest].tiles
    block_k = _block_k(found.block_k, product)
    programs = _blocks(nearest, found) * found.splits
    # As many programs as the measured matmul has, if there are enough blocks for them.
    splits = max(1, min(round(programs / _blocks(product, found)), _MOST_SPLITS, product.depth // block_k))
    return fitted(replace(found, block_k=block_k, splits=splits), product, tokens, sm)


def fitted(chosen: Tiles, product: Product, tokens: int, sm: int) -> Tiles:
    """Return the tile sizes `chosen`, changed so that the loop's stages fit into the shared memory of the GPU.

    The result has fewer stages. If not even two stages fit, it also has a smaller `block_k`. `tokens` is the number of
    rows of x in a tile.
    """
    block_k = chosen.block_k
    stages = min(chosen.stages, _most_stages(product, chosen, block_k, tokens, sm))
    while stages < 2 and block_k > _LEAST:
        block_k //= 2
        stages = min(chosen.stages, _most_stages(product, chosen, block_k, tokens, sm))
    return replace(chosen, block_k=block_k, stages=max(1, stages))


def share_of(depth: int, chosen: Tiles) -> int:
    """Return how many columns of the weight each split sums over, a multiple of `block_k`.

    `depth` is the number of columns (K). A split is a part of K. `chosen.splits` is the number of splits.
    """
    return -(-depth // (chosen.splits * chosen.block_k)) * chosen.block_k


def _measured(tokens: int) -> Mapping[Product, Measured[MatvecTiles]] | Mapping[Product, Measured[Tiles]]:
    return MATVEC if tokens == 1 else TILES[tokens]


def _nearest(product: Product, measured: Iterable[Product]) -> Product:
    """Return the measured matmul that is most similar to `product`. Both have a gate, or neither has.

    The distance of two matmuls is |log2 of the ratio of their columns| + |log2 of the ratio of their depths (K)|.
    """

    def distance(other: Product) -> float:
        return abs(math.log2(product.columns / other.columns)) + abs(math.log2(product.depth / other.depth))

    return min((other for other in measured if other.gated == product.gated), key=distance)


def _block_k(measured: int, product: Product) -> int:
    """Return a `block_k` (columns of the weight per block) with as many bytes as `measured` columns of bf16.

    The limit is the depth (K) of the matmul, rounded up to a power of two.
    """
    size = measured * torch.bfloat16.itemsize // product.dtype.itemsize
    return max(_LEAST, min(size, 1 << (product.depth - 1).bit_length()))


def _blocks(product: Product, found: Tiles) -> int:
    return -(-product.columns // found.block_n)


def _most_stages(product: Product, found: Tiles, block_k: int, tokens: int, sm: int) -> int:
    """Return how many loop stages fit into shared memory. A stage holds a block of the weight and one of x."""
    rows = found.block_n * (2 if product.gated else 1) + tokens
    return shared_memory(sm) // (rows * block_k * product.dtype.itemsize)
