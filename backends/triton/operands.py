"""How kernels of products read a weight: an operand loader for each packing.

A product's kernel knows no packing. It asks two functions for the weight, which it is given as compile-time constants:

    load(weight, row, local, start, k, inside, K, STORED, WHOLE, EVICTION, DTYPE)

gives the block of rows `row + local` and columns `start + k` of the weight, [len(local), len(k)] of DTYPE, the element
type of the product. `row` is i64, `local` and `k` count from 0, and `start` is a multiple of len(k). Rows that are not
`inside` [len(local)], and columns from K on, are zeros; where the block is known to be WHOLE there are none of these.
EVICTION is the policy for the cache, "" or "evict_first".

    fetch(weight, rows, start, K, STORED, LINES)

asks for LINES of 128 bytes of each of the `rows`, i64, from column `start` on, to come into the L2 cache. It waits for
nothing, and asks for nothing behind column K.

`weight` is the pointer to the weight where it has one part, and else a tuple of the pointers to its parts. STORED is
what the loader itself says that it must know of the weight: a number, or a frozen dataclass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ingot.backends.triton.kernels.operand_plain import begin_plain, fetch_plain, load_plain, within_plain
from ingot.backends.triton.lower.call import Refused
from ingot.backends.triton.lower.weight import PLAIN, Weight
from ingot.ir.types import DTYPE_NAMES


@dataclass(frozen=True)
class Loader:
    """How kernels read weights of a packing.

    `load` and `fetch` are `triton.jit` functions, as above. `stored` gives what they must know of a weight in a product
    of elements of a dtype; it raises Refused for a weight that they cannot read.
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
