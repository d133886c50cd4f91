"""Operand loaders: how `linear` kernels read a weight, one loader per packing.

A `linear` kernel does not depend on the packing. It takes four `triton.jit` functions as compile-time constants:

    begin(weight, row, STORED)

returns the loader's state of a block of rows that begins at a row (i64) of the weight. A kernel calls it once.

    within(local, k, STORED)

returns the loader's state of the rows `local` and columns `k` inside a block, both i32 from 0 on. A kernel calls it
once for all blocks.

    load(begin, within, start, k, n, N, K, STORED, WHOLE, EVICTION, DTYPE)

returns the block from column `start` on, a multiple of len(k), as [len(local), len(k)] of DTYPE, the dtype of the
matmul. Rows with `n >= N` (`n` [len(local)] counts from the matmul's first row) and columns from K on are zeros. With
WHOLE, a block has no such rows or columns. EVICTION is the cache policy, "" or "evict_first".

    fetch(weight, rows, start, K, STORED, LINES)

prefetches LINES lines of 128 bytes of each of the `rows` (i64), from column `start` on, into the L2 cache. It does not
wait, and prefetches nothing past column K.

`weight` is the pointer to a weight of one part, else a tuple of the pointers to its parts. STORED is what these
functions need to know of the weight, as the loader's `stored` returns it: a number, or a frozen dataclass of numbers.
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
    """The loader of a packing: the `triton.jit` functions above, and `stored`.

    `stored` returns the STORED of a weight in a matmul of a dtype. It raises Refused for a weight that the functions
    cannot read.
    """

    packing: str
    begin: Any
    within: Any
    load: Any
    fetch: Any
    stored: Callable[[Weight, torch.dtype], Any]


LOADERS: dict[str, Loader] = {}


def register_loader(loader: Loader) -> Loader:
    """Register the loader of a packing, and return it. Raises ValueError if the packing already has one."""
    if loader.packing in LOADERS:
        raise ValueError(f"packing '{loader.packing}' already has a loader")
    LOADERS[loader.packing] = loader
    return loader


def loader_of(weight: Weight) -> Loader:
    """Return the loader of a weight's packing. Raises Refused if there is none."""
    if weight.packing not in LOADERS:
        raise Refused(f"no loader for the packing '{weight.packing}'; there are {', '.join(sorted(LOADERS))}")
    return LOADERS[weight.packing]


def _row_stride(weight: Weight, dtype: torch.dtype) -> int:
    (value,) = weight.parts
    if value.type.dtype != dtype:
        raise Refused(f"a matmul of {DTYPE_NAMES[dtype]} and {value.type}")
    if value.strides[-1] != 1:
        raise Refused(f"{value.type} is strided along its last axis")
    return value.strides[0]


register_loader(Loader(PLAIN, begin_plain, within_plain, load_plain, fetch_plain, _row_stride))
