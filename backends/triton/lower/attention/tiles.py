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
# 32 q heads; those with heads of 160 bytes have 32 of each. Those of up to 32 tokens with heads of 128 and 256 bytes
# were timed between the matmuls before and after attention, also with 8 q heads per kv head, over contexts of 320 to
# 32768 positions. Between matmuls, tiles with fewer stages win, unlike alone: a program of few bytes of shared memory
# fits beside those of the matmul, and begins to load before it has ended. In bf16, with 8 kv heads, 32 q heads of 128
# elements and contexts of 512 positions, one token takes 3.6 us, and 5.3 us with five stages. 32 tokens take 21.7 us,
# and 25 us with tiles of 64 keys in two warps. The others were timed alone, several dozen each: they lose least over
# the mixes of contexts of tune/attention.py, or within 2 % of that; for 512 tokens, over 128, 256 and 512 contexts of
# 512 to 640 positions and 96 of 2048. All on one H200 (copy: 4.0 to 4.2 TB/s; torch 2.11.0, Triton 3.6.0).
DECODE_TILES: Mapping[int, Mapping[int, DecodeTiles]] = {
    1: {128: DecodeTiles(128, 3, 2), 160: DecodeTiles(128, 3, 2), 256: DecodeTiles(64, 3, 2)},
    16: {128: DecodeTiles(128, 3, 2), 256: DecodeTiles(64, 3, 2)},
    32: {
        128: DecodeTiles(128, 3, 2),
        160: DecodeTiles(64, 5, 4, warps=2, early=0),
        256: DecodeTiles(128, 3, 2),
    },
    64: {128: DecodeTiles(64, 5, 2, warps=2), 256: DecodeTiles(64, 3, 2, warps=2, early=0)},
    512: {128: DecodeTiles(32, 5, 4, warps=1, early=0), 256: DecodeTiles(64, 3, 4, warps=2, ahead=1, early=0)},
}

# The best tile sizes over caches of 8-bit elements with one scale, by the most tokens of a step and the bytes of a key
# head. Those of 1 and 32 tokens with heads of 128 bytes were timed between matmuls, as above, in f8e4m3: one token over
# 512 positions takes 6.1 us, 32 take 23.2 us. Of the others, 33 to 79 each were timed alone, and these lose least over
# the mixes of contexts of tune/attention.py. One H200, torch 2.11.0, Triton 3.6.0.
EIGHT_BIT_TILES: Mapping[int, Mapping[int, DecodeTiles]] = {
    1: {64: DecodeTiles(128, 5, 2), 128: DecodeTiles(128, 3, 2)},
    16: {64: DecodeTiles(64, 5, 4, warps=2, early=0), 128: DecodeTiles(128, 5, 2, ahead=2, early=0)},
    32: {64: DecodeTiles(64, 5, 4, warps=2, early=0), 128: DecodeTiles(128, 5, 2)},
    64: {128: DecodeTiles(64, 5, 2, warps=2, early=0)},
    512: {64: DecodeTiles(32, 5, 4, warps=1, ahead=4, early=0), 128: DecodeTiles(128, 5, 2, ahead=2, early=0)},
}

# The best tile sizes of `paged_attention`, which finds k and v already in the cache, and loads nothing early.
PAGED_TILES: Mapping[int, Mapping[int, DecodeTiles]] = {1: {160: DecodeTiles(128, 5, 1, early=0)}}

# The best tile sizes over latents of 512 elements, which are keys and values, and keys of 64 more, in bf16. By the q
# heads of a tile, and the fewest `tokens` of a `DecodeProblem` that they are for: tiles of 64 heads begin with two
# (`most_heads`). Of 3 to 40 each, timed on one H200 (torch 2.11.0, Triton 3.6.0) over contexts of 16384 and 2048
# positions. With 16 heads, 32 contexts of 16384 took 183 us: four programs of two warps on a multiprocessor load while
# others compute. With one program they took 279 us. Hopper has a kernel of its own since, `decode_latents`, which takes
# 158 us. These sizes are for calls that it does not take, as on other GPUs.
LATENT_TILES: Mapping[int, Mapping[int, DecodeTiles]] = {
    16: {1: DecodeTiles(32, 5, 1, early=0), 16: DecodeTiles(16, 3, 4, warps=2, early=0)},
    32: {1: DecodeTiles(32, 5, 1, warps=8, early=0), 16: DecodeTiles(64, 5, 1, warps=8, early=0)},
    64: {2: DecodeTiles(64, 3, 1, warps=8, early=0)},
}

# Those of latents in f8e4m3, timed in the same way. Their elements are converted by more warps. Tiles of 32 heads,
# which 128 heads have in steps of one token, were not timed: the heuristic of `known_tiles` chooses them.
LATENT_EIGHT_BIT_TILES: Mapping[int, Mapping[int, DecodeTiles]] = {
    16: {1: DecodeTiles(64, 5, 1, warps=8, early=0), 16: DecodeTiles(64, 5, 2, early=0)},
    64: {2: DecodeTiles(64, 3, 1, warps=8, early=0)},
}
