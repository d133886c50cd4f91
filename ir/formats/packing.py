"""Packings: the order of a weight's elements in memory, a permutation for any element type."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingot.ir.errors import InternalError


@dataclass(frozen=True)
class Packing:
    """The memory layout of a matrix [N, K], tile by tile; `tile` holds the rows and columns of one.

    `pack` makes a tensor [N / rows, K / columns, *inner] of a matrix of whole tiles. `unpack` restores it, with the
    same bits and dtype. Both accept any dtype that holds the elements, and meta tensors. Parts along the first two axes
    are parts of the matrix, so that whole tiles can be divided among ranks.
    """

    name: str
    tile: tuple[int, int]
    inner: tuple[int, ...]
    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor], torch.Tensor]


PACKINGS: dict[str, Packing] = {}


def register_packing(packing: Packing) -> Packing:
    """Register a packing. Raises InternalError if the name is taken."""
    if packing.name in PACKINGS:
        raise InternalError(f"the packing '{packing.name}' is defined twice")
    PACKINGS[packing.name] = packing
    return packing


# Row-major, unchanged.
register_packing(Packing("plain", (1, 1), (), lambda matrix: matrix, lambda stored: stored))
