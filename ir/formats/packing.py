"""Packings: in which order the elements of a weight lie in memory. A permutation, whatever the elements are."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingot.ir.errors import InternalError


@dataclass(frozen=True)
class Packing:
    """How the elements of a matrix [N, K] are laid out: tile by tile, `tile` being the rows and columns of one.

    `pack` makes a tensor [N / rows, K / columns, *inner] of a matrix of whole tiles, and `unpack` the matrix of that,
    the same bits in the same dtype. Both may be given any dtype that has the elements, meta tensors among them. Parts
    of the first two axes are parts of the matrix, so that whole tiles can be divided among ranks.
    """

    name: str
    tile: tuple[int, int]
    inner: tuple[int, ...]
    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor], torch.Tensor]


PACKINGS: dict[str, Packing] = {}


def register_packing(packing: Packing) -> Packing:
    """Let formats name a packing. Raises InternalError for a name that is taken."""
    if packing.name in PACKINGS:
        raise InternalError(f"the packing '{packing.name}' is defined twice")
    PACKINGS[packing.name] = packing
    return packing


# Row by row, as a matrix lies.
register_packing(Packing("plain", (1, 1), (), lambda matrix: matrix, lambda stored: stored))
