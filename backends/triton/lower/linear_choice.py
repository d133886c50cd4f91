"""Tile sizes for a product: those of the measured one that is most like it, as far as they fit."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from ingot.backends.triton.lower.linear_tiles import MATVEC, MEASURED_SM, TILES, MatvecTiles, Measured, Product, Tiles
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.ir.artifact.tuning import Source

# The smallest tile of a tensor-core product in Triton has 16 columns to sum up over.
_LEAST = 16
# The program that arrives last holds the sums of this many splits in registers at once.
_MOST_SPLITS = 8


def known_tiles(product: Product, tokens: int, sm: int) -> tuple[MatvecTiles | Tiles, Source]:
    """Those for `tokens` rows of x, padded, and whether they were measured for this very product."""
    chosen = matvec_tiles(product) if tokens == 1 else tiles(product, tokens, sm)
    return chosen, "table" if product in _measured(tokens) else "heuristic"


def known_microseconds(product: Product, tokens: int, sm: int) -> float | None:
    """What a call takes with those, where just that was measured: the table is of one kind of device."""
    measured = _measured(tokens)
    return measured[product].microseconds if sm == MEASURED_SM and product in measured else None


def matvec_tiles(product: Product) -> MatvecTiles:
    """For one row of x."""
    found = MATVEC[_nearest(product, MATVEC)].tiles
    return replace(found, block_k=_block_k(found.block_k, product))


def tiles(product: Product, tokens: int, sm: int) -> Tiles:
    """For `tokens` rows of x: 16, 32 or 64."""
    nearest = _nearest(product, TILES[tokens])
    found = TILES[tokens][nearest].tiles
    block_k = _block_k(found.block_k, product)
    programs = _blocks(nearest, found) * found.splits
    # As many programs as there, as far as there are blocks for them.
    splits = max(1, min(round(programs / _blocks(product, found)), _MOST_SPLITS, product.depth // block_k))
    return fitted(replace(found, block_k=block_k, splits=splits), product, tokens, sm)


def fitted(chosen: Tiles, product: Product, tokens: int, sm: int) -> Tiles:
    """The sizes with as many stages as find room, or blocks of fewer columns where not even two do."""
    block_k = chosen.block_k
    stages = min(chosen.stages, _most_stages(product, chosen, block_k, tokens, sm))
    while stages < 2 and block_k > _LEAST:
        block_k //= 2
        stages = min(chosen.stages, _most_stages(product, chosen, block_k, tokens, sm))
    return replace(chosen, block_k=block_k, stages=max(1, stages))


def share_of(depth: int, chosen: Tiles) -> int:
    """Columns of the weight for each split, whole blocks of them."""
    return -(-depth // (chosen.splits * chosen.block_k)) * chosen.block_k


def _measured(tokens: int) -> Mapping[Product, Measured[MatvecTiles]] | Mapping[Product, Measured[Tiles]]:
    return MATVEC if tokens == 1 else TILES[tokens]


def _nearest(product: Product, measured: Iterable[Product]) -> Product:
    """The least apart in powers of two along both sides."""

    def distance(other: Product) -> float:
        return abs(math.log2(product.columns / other.columns)) + abs(math.log2(product.depth / other.depth))

    return min((other for other in measured if other.gated == product.gated), key=distance)


def _block_k(measured: int, product: Product) -> int:
    """The same bytes in the product's dtype, and not much more than there are."""
    size = measured * torch.bfloat16.itemsize // product.dtype.itemsize
    return max(_LEAST, min(size, 1 << (product.depth - 1).bit_length()))


def _blocks(product: Product, found: Tiles) -> int:
    return -(-product.columns // found.block_n)


def _most_stages(product: Product, found: Tiles, block_k: int, tokens: int, sm: int) -> int:
    """How many blocks of weights and x fit into shared memory."""
    rows = found.block_n * (2 if product.gated else 1) + tokens
    return shared_memory(sm) // (rows * block_k * product.dtype.itemsize)
