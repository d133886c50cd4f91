"""What the kernel of attention for few tokens can be told, and the best found for some problems."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeTiles:
    """`keys` of a tile; `stages` of a loop, of which half hold tiles in flight and half page ids; contexts are cut for
    `programs` on each multiprocessor."""

    keys: int
    stages: int
    programs: int
    warps: int = 4
    ahead: int = 0
    combined: int = 4096
    exact: int = 0
    carried: int = 0
    early: int = 1


# By the most tokens of a step, and the bytes of a head of keys.
DECODE_TILES: Mapping[int, Mapping[int, DecodeTiles]] = {
    1: {128: DecodeTiles(64, 3, 2), 256: DecodeTiles(64, 3, 2)},
    16: {128: DecodeTiles(64, 7, 2), 256: DecodeTiles(64, 7, 2)},
    32: {128: DecodeTiles(64, 7, 1), 256: DecodeTiles(64, 7, 1)},
    64: {128: DecodeTiles(64, 7, 1), 256: DecodeTiles(64, 7, 1)},
}
