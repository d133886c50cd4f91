"""How kernels of products read a weight: an operand loader for each packing.

A product's kernel knows no packing. It is given four `triton.jit` functions as compile-time constants, and calls them:

    begin(weight, row, STORED)

is what the loader wants to know of a block that begins in a row (i64) of the weight. A kernel computes it once.

    within(local, k, STORED)

is what it wants to know of the places in a block of rows `local` and columns `k`, both i32 that count from 0. A kernel
computes it once for all blocks.

    load(begin, within, start, k, n, N, K, STORED, WHOLE, EVICTION, DTYPE)

gives the block from column `start` on, a multiple of len(k), as [len(local), len(k)] of DTYPE, the element type of the
product. Rows where `n >= N` (`n` [len(local)] counts from the product's first row) and columns from K on are zeros. A
block that is WHOLE has none of these. EVICTION is the policy for the cache, "" or "evict_first".

    fetch(weight, rows, start, K, STORED, LINES)

asks for LINES of 128 bytes of each of the `rows` (i64), from column `start` on, to come into the L2 cache. It waits for
nothing, and asks for nothing past column K.

`weight` is the pointer to the weight where it has one part, and else a tuple of the pointers to its parts. STORED is
what the loader itself says that these functions must know of the weight: a number, or a frozen dataclass of numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ingot.backends.triton.kernels.operand_plain import begin_plain, fetch_plain, load_plain, within_plain
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.weight import PLAIN, Weight
from ingot.ir.types import DTYPE_NAMES


@dataclass(frozen=True)
class Loader:
    """How kernels read weights of a packing: the `triton.jit` functions above, and `stored`.

    That gives the STORED of a weight, in a product whose elements have a dtype. It raises Refused for a weight that the
    functions cannot read.
    """

    packing: str
    begin: Any
    within: Any
    load: Any
    fetch: Any
    stored: Callable[[Weight, torch.dtype], Any]


LOADERS: dict[str, Loader] = {}


def register_loader(loader: Loader) -> Loader:
    """Let products read weights of a packing. Raises ValueError when they can already."""
    if loader.packing in LOADERS:
        raise ValueError(f"packing '{loader.packing}' has a loader")
    LOADERS[loader.packing] = loader
    return loader


def loader_of(weight: Weight) -> Loader:
    """Raises Refused for a packing without a loader."""
    if weight.packing not in LOADERS:
        raise Refused(f"no loader for weights packed '{weight.packing}'; there are {', '.join(sorted(LOADERS))}")
    return LOADERS[weight.packing]


def _row_stride(weight: Weight, dtype: torch.dtype) -> int:
    (value,) = weight.parts
    if value.type.dtype != dtype:
        raise Refused(f"a product of {DTYPE_NAMES[dtype]} and {value.type}")
    if value.strides[-1] != 1:
        raise Refused(f"{value.type} is strided along its last axis")
    return value.strides[0]


register_loader(Loader(PLAIN, begin_plain, within_plain, load_plain, fetch_plain, _row_stride))
