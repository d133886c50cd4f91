"""What the kernels of linear can be told, and the best found for some products."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Product:
    """A product with a weight: `columns` of the result, `depth` elements summed up for each; `gated`: two rows of the
    weight make a column."""

    columns: int
    depth: int
    gated: bool = False
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class MatvecTiles:
    """How `linear_matvec` runs: a program makes `block_n` results, from `block_k` columns of the weight at a time.

    `lines` of 128 bytes of each row are fetched ahead of the wait for the kernel in front, behind the first block, and
    the programs that are there first fetch the rows of `ahead` later ones each.
    """

    block_n: int
    block_k: int
    warps: int
    lines: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Tiles:
    """How `linear_tile` runs: tiles of `block_n` results, `splits` programs for each, that keep `stages` blocks of
    `block_k` columns on the way. `lines` are fetched ahead as in MatvecTiles, from the first block on."""

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    lines: int = 0


# The fastest of those that benchmarks/kernels/tune_linear.py tried on one H200 (copy: 4.26 TB/s; torch 2.11.0, Triton
# 3.6.0), for the products of Llama-3.1-8B, Llama-3.2-1B and Qwen3-0.6B with what a region has around them, in rows of
# equal launches. Behind each: bytes of weights a second, as a share of a copy's; reading alone can be faster than that.
# By rows of x: one; and 8, 32 and 64 of up to 16, 32 and 64.

MATVEC: Mapping[Product, MatvecTiles] = {
    Product(128256, 4096): MatvecTiles(2, 4096, 4),  # 107%
    Product(128256, 2048): MatvecTiles(4, 1024, 4),  # 106%
    Product(151936, 1024): MatvecTiles(8, 1024, 8),  # 104%
    Product(4096, 14336): MatvecTiles(2, 4096, 4, lines=8),  # 104%
    Product(6144, 4096): MatvecTiles(4, 2048, 8),  # 92%
    Product(4096, 4096): MatvecTiles(8, 2048, 4),  # 93%
    Product(2048, 8192): MatvecTiles(4, 4096, 8),  # 94%
    Product(3072, 2048): MatvecTiles(4, 1024, 4),  # 74%
    Product(2048, 2048): MatvecTiles(2, 2048, 4),  # 71%
    Product(4096, 1024): MatvecTiles(8, 1024, 4, lines=16),  # 62%
    Product(1024, 3072): MatvecTiles(2, 2048, 4),  # 57%
    Product(1024, 2048): MatvecTiles(2, 2048, 4),  # 53%
    Product(14336, 4096, gated=True): MatvecTiles(2, 4096, 8),  # 103%
    Product(8192, 2048, gated=True): MatvecTiles(8, 1024, 4),  # 98%
    Product(3072, 1024, gated=True): MatvecTiles(4, 1024, 4),  # 70%
}

TILES: Mapping[int, Mapping[Product, Tiles]] = {
    16: {
        Product(128256, 4096): Tiles(64, 128, 1, 4, 5),  # 102%
        Product(128256, 2048): Tiles(64, 128, 1, 4, 5),  # 99%
        Product(151936, 1024): Tiles(128, 128, 1, 8, 5),  # 94%
        Product(4096, 14336): Tiles(64, 256, 2, 4, 4),  # 89%
        Product(6144, 4096): Tiles(64, 128, 1, 4, 8, lines=4),  # 73%
        Product(4096, 4096): Tiles(64, 256, 2, 4, 4),  # 72%
        Product(2048, 8192): Tiles(64, 256, 4, 4, 4),  # 72%
        Product(3072, 2048): Tiles(128, 128, 2, 4, 4, lines=4),  # 41%
        Product(4096, 1024): Tiles(64, 256, 2, 4, 3, lines=4),  # 38%
        Product(2048, 2048): Tiles(64, 256, 4, 4, 3, lines=4),  # 43%
        Product(1024, 3072): Tiles(64, 256, 8, 4, 3, lines=4),  # 30%
        Product(1024, 2048): Tiles(64, 128, 8, 4, 3, lines=4),  # 19%
        Product(14336, 4096, gated=True): Tiles(64, 256, 1, 4, 3),  # 94%
        Product(8192, 2048, gated=True): Tiles(64, 128, 1, 4, 5),  # 85%
        Product(3072, 1024, gated=True): Tiles(64, 128, 1, 4, 4, lines=4),  # 48%
    },
    32: {
        Product(128256, 4096): Tiles(128, 128, 1, 8, 2),  # 100%
        Product(128256, 2048): Tiles(128, 64, 1, 8, 5),  # 95%
        Product(151936, 1024): Tiles(64, 128, 1, 4, 4, lines=4),  # 92%
        Product(4096, 14336): Tiles(32, 256, 1, 4, 6, lines=4),  # 90%
        Product(6144, 4096): Tiles(64, 128, 1, 4, 8, lines=4),  # 75%
        Product(4096, 4096): Tiles(64, 256, 2, 4, 4, lines=4),  # 72%
        Product(2048, 8192): Tiles(64, 256, 4, 4, 4, lines=4),  # 71%
        Product(3072, 2048): Tiles(64, 128, 3, 4, 4, lines=4),  # 37%
        Product(2048, 2048): Tiles(64, 128, 4, 4, 5, lines=8),  # 38%
        Product(4096, 1024): Tiles(64, 128, 2, 4, 5, lines=4),  # 36%
        Product(1024, 3072): Tiles(16, 256, 2, 4, 7, lines=8),  # 30%
        Product(1024, 2048): Tiles(16, 256, 1, 4, 8, lines=16),  # 20%
        Product(14336, 4096, gated=True): Tiles(64, 128, 1, 4, 2),  # 92%
        Product(8192, 2048, gated=True): Tiles(64, 128, 1, 4, 5, lines=4),  # 82%
        Product(3072, 1024, gated=True): Tiles(64, 128, 1, 4, 4, lines=4),  # 46%
    },
    64: {
        Product(128256, 4096): Tiles(128, 128, 1, 4, 4, lines=4),  # 95%
        Product(128256, 2048): Tiles(128, 128, 1, 8, 4),  # 87%
        Product(151936, 1024): Tiles(128, 128, 1, 4, 4, lines=4),  # 83%
        Product(4096, 14336): Tiles(64, 256, 2, 4, 3, lines=4),  # 83%
        Product(6144, 4096): Tiles(64, 128, 1, 4, 6, lines=4),  # 72%
        Product(4096, 4096): Tiles(64, 256, 2, 4, 3, lines=4),  # 63%
        Product(2048, 8192): Tiles(64, 256, 4, 4, 3, lines=4),  # 62%
        Product(3072, 2048): Tiles(64, 128, 2, 4, 4, lines=4),  # 38%
        Product(4096, 1024): Tiles(64, 128, 1, 4, 4, lines=4),  # 37%
        Product(2048, 2048): Tiles(64, 128, 4, 4, 5, lines=4),  # 32%
        Product(1024, 3072): Tiles(16, 256, 2, 4, 5, lines=4),  # 25%
        Product(1024, 2048): Tiles(16, 128, 2, 4, 8, lines=8),  # 20%
        Product(14336, 4096, gated=True): Tiles(64, 128, 1, 4, 4),  # 89%
        Product(8192, 2048, gated=True): Tiles(64, 128, 1, 4, 4, lines=4),  # 79%
        Product(3072, 1024, gated=True): Tiles(64, 128, 1, 4, 4),  # 38%
    },
}
