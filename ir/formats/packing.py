"""Packings: the orders in which the elements of a weight can be stored, for any element type."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingot.ir.errors import InternalError


@dataclass(frozen=True)
class Packing:
    """The order in which the elements of a weight [N, K] are stored: tile by tile.

    tile    (rows, columns) of a tile
    inner   the shape in which the elements of a tile are stored
    pack    turns a matrix of whole tiles into a tensor [N / rows, K / columns, *inner]
    unpack  the inverse of `pack`, with equal bits and dtype

    Both functions accept meta tensors and any dtype that holds the elements. The first two axes of the packed tensor
    count tiles, so that a mesh can give each rank whole tiles.
    """

    name: str
    tile: tuple[int, int]
    inner: tuple[int, ...]
    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor], torch.Tensor]


PACKINGS: dict[str, Packing] = {}


def register_packing(packing: Packing) -> Packing:
    """Register a packing (an order of stored elements) by its name. Raises InternalError if the name is taken."""
    if packing.name in PACKINGS:
        raise InternalError(f"the packing '{packing.name}' is defined twice")
    PACKINGS[packing.name] = packing
    return packing


# Row-major, unchanged.
register_packing(Packing("plain", (1, 1), (), lambda matrix: matrix, lambda stored: stored))


def _pack(matrix: torch.Tensor) -> torch.Tensor:
    return matrix[:, 0::2] | (matrix[:, 1::2] << 4)


def _unpack(stored: torch.Tensor) -> torch.Tensor:
    return torch.stack((stored & 15, stored >> 4), -1).flatten(-2)


# Two elements in a byte: element 2i of a row in the low four bits, 2i + 1 in the high ones.
register_packing(Packing("low_first", (1, 2), (), _pack, _unpack))
