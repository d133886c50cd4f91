"""Tiles for attention over caches whose values are not beside keys of their width: by what a multiprocessor holds.

No such tiles were timed. They are the largest whose sums take half of the registers and whose keys, values and queries
fit into the shared memory of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.lower.sizes import LEAST

# Sums in float32 that half of the registers of a multiprocessor hold: 65,536 of 4 bytes from compute capability 8.0 on
# (CUDA C++ programming guide, technical specifications); and numbers of keys in a tile. Without tensor cores, which
# float32 does not use, operands come into registers too: an eighth of that.
_MOST_SUMS, _MOST_KEYS = 1 << 15, 1 << 15
_SHARE_OF_FLOAT32 = 8
# Sums of 4 warps; more rows take 8.
_SUMS_OF_4_WARPS = 1 << 13
# Tiles of keys on the way in a loop of five stages; every other stage holds page ids.
_BUFFERS, _STAGES = 2, 5


@dataclass(frozen=True)
class Held:
    """What a kernel holds of one head: numbers of a query or a key in their tiles, of a value in a tile of its own (0:
    it has none), and of the sums of a row, of which there are `sums`. `itemsize`: bytes of a number."""

    key: int
    value: int
    sum: int
    sums: int
    itemsize: int

    def shared(self, rows: int, keys: int) -> int:
        """Bytes of shared memory."""
        return self.itemsize * (rows * self.key + _BUFFERS * keys * (self.key + self.value) + rows * keys)


@dataclass(frozen=True)
class FormTiles:
    rows: int
    keys: int
    warps: int
    stages: int = _STAGES


def form_tiles(held: Held, sm: int, want: Callable[[bool, str], None], most_rows: int) -> FormTiles:
    """The tiles, or a refusal by `want` where the least ones do not fit."""
    share = _SHARE_OF_FLOAT32 if held.itemsize == 4 else 1
    needed = held.shared(LEAST, LEAST)
    want(
        needed <= shared_memory(sm),
        f"the least tiles take {needed} bytes of shared memory, and a block has {shared_memory(sm)}",
    )
    for rows, keys in product((64, 32, LEAST), (64, 32, LEAST)):
        sums = rows * held.sum * held.sums
        fits = held.shared(rows, keys) <= shared_memory(sm)
        fits &= rows == LEAST or (rows <= most_rows and sums <= _MOST_SUMS // share)
        fits &= keys == LEAST or keys * held.key <= _MOST_KEYS // share
        if fits:
            break
    return FormTiles(rows, keys, 8 if sums > _SUMS_OF_4_WARPS // share else 4)
