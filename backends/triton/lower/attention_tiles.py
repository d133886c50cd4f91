"""What the kernel of attention for few tokens can be told, and the best found for some problems."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeTiles:
    """How `decode_attention` runs: tiles of `keys`; `stages` of a loop, of which half hold tiles on the way and half
    page ids; contexts are cut for `programs` on each multiprocessor.

    Before the wait for the kernel in front, a program loads its first tile if `early`, and fetches `ahead` tiles behind
    that into the cache.
    """

    keys: int
    stages: int
    programs: int
    warps: int = 4
    ahead: int = 0
    early: int = 1


# By the most tokens of a step, and the bytes of a head of keys. Layers have 8 heads of keys and 32 of q, but those with
# heads of 160 bytes 32 of each. Several dozen tiles for each were timed on one H200 (copy: 4.0 to 4.2 TB/s; torch
# 2.11.0, Triton 3.6.0). These lose least over the mixes of contexts of tune/attention.py, or 2 % more; for 512 tokens,
# over 128, 256 and 512 contexts of 512 to 640 and 96 of 2048.
DECODE_TILES: Mapping[int, Mapping[int, DecodeTiles]] = {
    1: {128: DecodeTiles(128, 5, 1), 160: DecodeTiles(128, 3, 2), 256: DecodeTiles(64, 5, 2)},
    16: {128: DecodeTiles(64, 5, 2, warps=2, ahead=4, early=0), 256: DecodeTiles(64, 5, 2, ahead=2)},
    32: {
        128: DecodeTiles(128, 3, 2),
        160: DecodeTiles(64, 5, 4, warps=2, early=0),
        256: DecodeTiles(64, 3, 4, warps=2),
    },
    64: {128: DecodeTiles(64, 5, 2, warps=2), 256: DecodeTiles(64, 3, 2, warps=2, early=0)},
    512: {128: DecodeTiles(32, 5, 4, warps=1, early=0), 256: DecodeTiles(64, 3, 4, warps=2, ahead=1, early=0)},
}

# The same where nothing is appended: k and v are in the cache before, and nothing is loaded early.
PAGED_TILES: Mapping[int, Mapping[int, DecodeTiles]] = {1: {160: DecodeTiles(128, 5, 1, early=0)}}
