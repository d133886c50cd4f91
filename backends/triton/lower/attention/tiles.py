"""The tile sizes of decode attention, and the best ones measured for some problems."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeTiles:
    """The tile sizes and launch parameters of the kernel `decode_attention`.

    A tile has `keys` keys. The loop has `stages` stages: every second one has a tile in flight, and the rest have page
    ids. Contexts are split so that each multiprocessor has about `programs` programs of `warps` warps. Before it waits
    for the previous kernel, a program loads its first tile if `early` is 1. It also prefetches the next `ahead` tiles
    into the L2 cache.
    """

    keys: int
    stages: int
    programs: int
    warps: int = 4
    ahead: int = 0
    early: int = 1


# The best tile sizes by the most tokens of a step, and the bytes of a key head. The measured layers have 8 kv heads and
# 32 q heads; those with heads of 160 bytes have 32 of each. Several dozen tiles for each were timed on one H200 (copy:
# 4.0 to 4.2 TB/s; torch 2.11.0, Triton 3.6.0). These lose least over the mixes of contexts of tune/attention.py, or
# within 2 % of that; for 512 tokens, over 128, 256 and 512 contexts of 512 to 640 positions and 96 of 2048.
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

# The best tile sizes over caches of 8-bit elements with one scale, by the most tokens of a step and the bytes of a key
# head. Of 33 to 79 each, timed in f8e4m3 on one H200 (torch 2.11.0, Triton 3.6.0), these lose least over the mixes of
# contexts of tune/attention.py. With heads of 128 bytes, 8 contexts of 16384 positions take 79 us, and 32 take 263 us;
# tiles for bf16 took 112 and 302 us.
EIGHT_BIT_TILES: Mapping[int, Mapping[int, DecodeTiles]] = {
    1: {64: DecodeTiles(128, 5, 2), 128: DecodeTiles(128, 5, 2, ahead=2, early=0)},
    16: {64: DecodeTiles(64, 5, 4, warps=2, early=0), 128: DecodeTiles(128, 5, 2, ahead=2, early=0)},
    32: {64: DecodeTiles(64, 5, 4, warps=2, early=0), 128: DecodeTiles(64, 5, 4, warps=2, ahead=2, early=0)},
    64: {128: DecodeTiles(64, 5, 2, warps=2, early=0)},
    512: {64: DecodeTiles(32, 5, 4, warps=1, ahead=4, early=0), 128: DecodeTiles(128, 5, 2, ahead=2, early=0)},
}

# The best tile sizes of `paged_attention`, which finds k and v already in the cache, and loads nothing early.
PAGED_TILES: Mapping[int, Mapping[int, DecodeTiles]] = {1: {160: DecodeTiles(128, 5, 1, early=0)}}
