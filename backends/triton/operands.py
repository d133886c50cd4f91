"""Operand loaders: the parts of `linear` kernels that read a weight, one loader per packing.

A packing is the order in which a weight's elements are stored. A `linear` kernel does not depend on it: the kernel
takes four `triton.jit` functions of the packing's loader as compile-time constants:

    begin(weight, row, STORED)

returns the base of a block of rows that begins at row `row` (i64) of the weight: a pointer or several. A kernel calls
it once.

    within(local, k, STORED)

returns the offsets of the rows `local` and columns `k` inside a block, both i32 from 0 on. A kernel calls it once for
all blocks.

    load(begin, within, start, k, n, N, K, STORED, WHOLE, EVICTION, DTYPE)

returns the block from column `start` on, a multiple of len(k), as [len(local), len(k)] of DTYPE, the dtype of the
matmul. `begin` and `within` are the results of the functions above. Rows with `n >= N` (`n` [len(local)] counts from
the matmul's first row) and columns from K on are zeros. With WHOLE, a block has no such rows or columns. EVICTION is
the cache policy, "" or "evict_first".

    fetch(weight, rows, start, K, STORED, LINES)

prefetches LINES lines of 128 bytes of each of the `rows` (i64), from column `start` on, into the L2 cache. It does not
wait, and prefetches nothing past column K.

`weight` is the pointer to a weight of one tensor, else a tuple of pointers. STORED describes how the weight is stored,
such as its row stride: a number or a frozen dataclass of numbers, as the loader's `stored` returns it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ingot.backends.triton.kernels.linear.operand_plain import begin_plain, fetch_plain, load_plain, within_plain
from ingot.backends.triton.lower.linear.weight import PLAIN, Weight
from ingot.backends.triton.lower.refused import Refused
from ingot.ir.types import DTYPE_NAMES


@dataclass(frozen=True)
class Loader:
    """The operand loader of a packing (storage order of a weight): the functions with which kernels read the weight.

    The module's docstring defines the `triton.jit` functions `begin`, `within`, `load` and `fetch`. `stored` takes a
    weight and the matmul's dtype, and returns the constant STORED of these functions, such as a row stride. It raises
    Refused for a weight that they cannot read.
    """

    packing: str
    begin: Any
    within: Any
    load: Any
    fetch: Any
    stored: Callable[[Weight, torch.dtype], Any]


LOADERS: dict[str, Loader] = {}


def register_loader(loader: Loader) -> Loader:
    """Register the operand loader of a packing (storage order of a weight), and return it.

    Raises ValueError if the packing already has a loader.
    """
    if loader.packing in LOADERS:
        raise ValueError(f"packing '{loader.packing}' already has a loader")
    LOADERS[loader.packing] = loader
    return loader


def loader_of(weight: Weight) -> Loader:
    """Return the operand loader of a weight's packing: the functions with which kernels read the weight.

    Raises Refused if the packing has no loader.
    """
    if weight.packing not in LOADERS:
        raise Refused(f"no loader for the packing '{weight.packing}'; there are {', '.join(sorted(LOADERS))}")
    return LOADERS[weight.packing]


def _row_stride(weight: Weight, dtype: torch.dtype) -> int:
    """Return the row stride of an unpacked weight in elements. `dtype` is the dtype of the matmul.

    Raises Refused if the weight has another dtype, or a stride other than 1 along its last axis.
    """
    (value,) = weight.parts
    if value.type.dtype != dtype:
        raise Refused(f"a matmul of {DTYPE_NAMES[dtype]} and {value.type}")
    if value.strides[-1] != 1:
        raise Refused(f"{value.type} is strided along its last axis")
    return value.strides[0]


register_loader(Loader(PLAIN, begin_plain, within_plain, load_plain, fetch_plain, _row_stride))
