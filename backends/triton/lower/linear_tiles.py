"""Tile sizes of the kernels of linear, by the shape of a product."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Product:
    """A product with a weight: `columns` of the result, `depth` elements summed up for each; `gated`: two rows of the
    weight make a column."""

    columns: int
    depth: int
    dtype: torch.dtype
    gated: bool

    @property
    def weight_rows(self) -> int:
        return self.columns * (2 if self.gated else 1)


@dataclass(frozen=True)
class MatvecTiles:
    """How `linear_matvec` runs: a program makes `block_n` results, from `block_k` columns at a time."""

    block_n: int
    block_k: int
    warps: int
    lines: int = 0


@dataclass(frozen=True)
class Tiles:
    """How `linear_tile` runs: tiles of `block_n` results, `splits` programs for each, that keep `stages` blocks of
    `block_k` columns on the way."""

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    lines: int = 0


# Bytes of weights that a program of linear_matvec loads at once: 64 registers for each of 128 threads.
_MATVEC_TILE = 32768
# The last-level cache serves all of x for each tile of rows: with this many rows for a token its traffic stays at a
# quarter of that of the weights.
_ROWS_PER_TOKEN = 4


def matvec_tiles(product: Product) -> MatvecTiles:
    """For one row of x. Of a deep matrix a program takes few rows, so that the device has enough programs."""
    block_k = min(_power_below(product.depth), 2048)
    rows = max(1, _MATVEC_TILE // (block_k * product.dtype.itemsize))
    block_n = max(1, rows // (2 if product.gated else 1))
    while block_n > 1 and product.columns // block_n < 512:  # four programs for each multiprocessor of a large device
        block_n //= 2
    return MatvecTiles(block_n, max(16, block_k), warps=4)


def tiles(product: Product, tokens: int, cores: int) -> Tiles:
    """For `tokens` rows of x (a power of two, 16 at least)."""
    block_n = 64 if product.gated or tokens <= 16 else 128
    block_k = 128 // product.dtype.itemsize * 2
    block_k = min(block_k, max(16, _power_below(product.depth)))
    blocks = -(-product.columns // block_n)
    # Two programs for each multiprocessor, and eight blocks at least for each of them to be on the way.
    splits = max(1, min(-(-2 * cores // blocks), product.depth // (8 * block_k)))
    return Tiles(block_n, block_k, splits, warps=4, stages=4)


def _power_below(size: int) -> int:
    return 1 << (size.bit_length() - 1)
