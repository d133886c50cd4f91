"""The tile sizes of the `linear` kernels, and the best ones measured for some matmuls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch


@dataclass(frozen=True)
class Product:
    """The sizes and dtype of a matmul: its key in the tables of measured tile sizes.

    It multiplies [tokens, `depth`] by [`depth`, `columns`]. With `gated`, a column of the result is activation(gate) *
    up, so the weight has two rows per column. `dtype` is the dtype of x and the weight.
    """

    columns: int
    depth: int
    gated: bool = False
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class MatvecTiles:
    """The tile sizes and launch parameters of the matmul kernel for one row of x (`linear_matvec`).

    A program computes `block_n` results, from `block_k` columns of the weight per iteration. Before it waits for the
    previous kernel, it prefetches `lines` lines of 128 bytes of each weight row, after the first block. The programs
    that start first each prefetch the weight rows of `ahead` later programs.
    """

    block_n: int
    block_k: int
    warps: int
    lines: int = 0
    ahead: int = 0


@dataclass(frozen=True)
class Tiles:
    """The tile sizes and launch parameters of the tensor-core matmul kernel for up to 64 rows (`linear_tile`).

    `splits` programs together compute `block_n` columns of the result. Each sums over a part of K. A program has
    `stages` blocks of `block_k` columns of the weight in flight. Before it waits for the previous kernel, it prefetches
    `lines` lines of 128 bytes of each weight row.
    """

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    lines: int = 0


T = TypeVar("T")


@dataclass(frozen=True)
class Measured(Generic[T]):
    """Tile sizes of a matmul, with the measured microseconds of one call in a sequence of equal calls."""

    tiles: T
    microseconds: float


# The compute capability of the device of these measurements.
MEASURED_SM = 90
# The fastest tiles that benchmarks/kernels/tune_linear.py tried on one H200 (copy: 4.26 TB/s; torch 2.11.0, Triton
# 3.6.0), for the matmuls of Llama-3.1-8B, Llama-3.2-1B and Qwen3-0.6B with the fused ops of their regions, over weights
# larger than any cache. For one row of x also the matmuls of Phi-2, GPT-2 of 2.7 B and Falcon 7B (copy: 4.13 TB/s).
# MATVEC is for one row of x. TILES is for kernels of 16, 32 and 64 rows (the keys), timed with 8, 32 and 64 rows.

MATVEC: Mapping[Product, Measured[MatvecTiles]] = {
    Product(128256, 4096): Measured(MatvecTiles(2, 4096, 4), 230.4),
    Product(128256, 2048): Measured(MatvecTiles(4, 1024, 4), 116.56),
    Product(151936, 1024): Measured(MatvecTiles(8, 1024, 8), 70.14),
    Product(4096, 14336): Measured(MatvecTiles(2, 4096, 4, lines=8), 26.54),
    Product(6144, 4096): Measured(MatvecTiles(4, 2048, 8), 12.84),
    Product(4096, 4096): Measured(MatvecTiles(8, 2048, 4), 8.51),
    Product(2048, 8192): Measured(MatvecTiles(4, 4096, 8), 8.34),
    Product(3072, 2048): Measured(MatvecTiles(4, 1024, 4), 3.99),
    Product(2048, 2048): Measured(MatvecTiles(2, 2048, 4), 2.77),
    Product(4096, 1024): Measured(MatvecTiles(8, 1024, 4, lines=16), 3.16),
    Product(1024, 3072): Measured(MatvecTiles(2, 2048, 4), 2.57),
    Product(1024, 2048): Measured(MatvecTiles(2, 2048, 4), 1.86),
    Product(65024, 4544): Measured(MatvecTiles(4, 2048, 4), 131.9),
    Product(22848, 4544): Measured(MatvecTiles(8, 2048, 4), 47.33),
    Product(4544, 18176): Measured(MatvecTiles(2, 4096, 4, lines=8), 37.72),
    Product(4544, 4544): Measured(MatvecTiles(2, 4096, 4), 10.43),
    Product(51200, 2560): Measured(MatvecTiles(8, 512, 4), 59.12),
    Product(17920, 2560): Measured(MatvecTiles(8, 512, 4), 21.52),
    Product(10240, 2560): Measured(MatvecTiles(4, 1024, 4), 12.92),
    Product(7680, 2560): Measured(MatvecTiles(16, 1024, 4), 10.0),
    Product(2560, 10240): Measured(MatvecTiles(4, 2048, 8), 12.53),
    Product(2560, 2560): Measured(MatvecTiles(8, 2048, 4), 4.28),
    Product(14336, 4096, gated=True): Measured(MatvecTiles(2, 4096, 8), 53.35),
    Product(8192, 2048, gated=True): Measured(MatvecTiles(8, 1024, 4), 16.13),
    Product(3072, 1024, gated=True): Measured(MatvecTiles(4, 1024, 4), 4.2),
}

TILES: Mapping[int, Mapping[Product, Measured[Tiles]]] = {
    16: {
        Product(128256, 4096): Measured(Tiles(64, 128, 1, 4, 5), 243.89),
        Product(128256, 2048): Measured(Tiles(64, 128, 1, 4, 5), 125.82),
        Product(151936, 1024): Measured(Tiles(128, 128, 1, 8, 5), 78.43),
        Product(4096, 14336): Measured(Tiles(64, 256, 2, 4, 4), 31.41),
        Product(6144, 4096): Measured(Tiles(64, 128, 1, 4, 8, lines=4), 16.37),
        Product(4096, 4096): Measured(Tiles(64, 256, 2, 4, 4), 11.03),
        Product(2048, 8192): Measured(Tiles(64, 256, 4, 4, 4), 11.08),
        Product(3072, 2048): Measured(Tiles(128, 128, 2, 4, 4, lines=4), 7.28),
        Product(4096, 1024): Measured(Tiles(64, 256, 2, 4, 3, lines=4), 5.28),
        Product(2048, 2048): Measured(Tiles(64, 256, 4, 4, 3, lines=4), 4.66),
        Product(1024, 3072): Measured(Tiles(64, 256, 8, 4, 3, lines=4), 4.91),
        Product(1024, 2048): Measured(Tiles(64, 128, 8, 4, 3, lines=4), 5.16),
        Product(14336, 4096, gated=True): Measured(Tiles(64, 256, 1, 4, 3), 59.11),
        Product(8192, 2048, gated=True): Measured(Tiles(64, 128, 1, 4, 5), 18.77),
        Product(3072, 1024, gated=True): Measured(Tiles(64, 128, 1, 4, 4, lines=4), 6.29),
    },
    32: {
        Product(128256, 4096): Measured(Tiles(128, 128, 1, 8, 2), 250.6),
        Product(128256, 2048): Measured(Tiles(128, 64, 1, 8, 5), 131.83),
        Product(151936, 1024): Measured(Tiles(64, 128, 1, 4, 4, lines=4), 80.45),
        Product(4096, 14336): Measured(Tiles(32, 256, 1, 4, 6, lines=4), 31.1),
        Product(6144, 4096): Measured(Tiles(64, 128, 1, 4, 8, lines=4), 15.89),
        Product(4096, 4096): Measured(Tiles(64, 256, 2, 4, 4, lines=4), 10.99),
        Product(2048, 8192): Measured(Tiles(64, 256, 4, 4, 4, lines=4), 11.3),
        Product(3072, 2048): Measured(Tiles(64, 128, 3, 4, 4, lines=4), 8.12),
        Product(2048, 2048): Measured(Tiles(64, 128, 4, 4, 5, lines=8), 5.23),
        Product(4096, 1024): Measured(Tiles(64, 128, 2, 4, 5, lines=4), 5.48),
        Product(1024, 3072): Measured(Tiles(16, 256, 2, 4, 7, lines=8), 5.04),
        Product(1024, 2048): Measured(Tiles(16, 256, 1, 4, 8, lines=16), 5.02),
        Product(14336, 4096, gated=True): Measured(Tiles(64, 128, 1, 4, 2), 60.84),
        Product(8192, 2048, gated=True): Measured(Tiles(64, 128, 1, 4, 5, lines=4), 19.4),
        Product(3072, 1024, gated=True): Measured(Tiles(64, 128, 1, 4, 4, lines=4), 6.51),
    },
    64: {
        Product(128256, 4096): Measured(Tiles(128, 128, 1, 4, 4, lines=4), 262.26),
        Product(128256, 2048): Measured(Tiles(128, 128, 1, 8, 4), 143.18),
        Product(151936, 1024): Measured(Tiles(128, 128, 1, 4, 4, lines=4), 88.76),
        Product(4096, 14336): Measured(Tiles(64, 256, 2, 4, 3, lines=4), 33.64),
        Product(6144, 4096): Measured(Tiles(64, 128, 1, 4, 6, lines=4), 16.69),
        Product(4096, 4096): Measured(Tiles(64, 256, 2, 4, 3, lines=4), 12.58),
        Product(2048, 8192): Measured(Tiles(64, 256, 4, 4, 3, lines=4), 12.92),
        Product(3072, 2048): Measured(Tiles(64, 128, 2, 4, 4, lines=4), 7.77),
        Product(4096, 1024): Measured(Tiles(64, 128, 1, 4, 4, lines=4), 5.34),
        Product(2048, 2048): Measured(Tiles(64, 128, 4, 4, 5, lines=4), 6.13),
        Product(1024, 3072): Measured(Tiles(16, 256, 2, 4, 5, lines=4), 5.92),
        Product(1024, 2048): Measured(Tiles(16, 128, 2, 4, 8, lines=8), 5.07),
        Product(14336, 4096, gated=True): Measured(Tiles(64, 128, 1, 4, 4), 62.56),
        Product(8192, 2048, gated=True): Measured(Tiles(64, 128, 1, 4, 4, lines=4), 20.23),
        Product(3072, 1024, gated=True): Measured(Tiles(64, 128, 1, 4, 4), 7.91),
    },
}
