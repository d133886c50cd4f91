"""Choose tiles for attention over caches whose keys and values have different widths (`ingot.ir.cache.form`).

These tiles were not timed. They are the largest that fit: accumulators take at most half of the registers, and keys,
values and queries the shared memory of a block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.lower.sizes import LEAST

# Most float32 accumulators of a program, and most elements of keys in a tile. The accumulators fill half of the
# registers of a multiprocessor: it has 65,536 of 4 bytes from compute capability 8.0 on (CUDA C++ programming guide,
# technical specifications). Float32 does not use tensor cores, so its operands take registers too: its limits are an
# eighth.
_MOST_SUMS, _MOST_KEYS = 1 << 15, 1 << 15
_SHARE_OF_FLOAT32 = 8
# Most accumulators of 4 warps; more take 8 warps.
_SUMS_OF_4_WARPS = 1 << 13
# Tiles of keys in flight in a loop of five stages; every other stage holds page ids.
_BUFFERS, _STAGES = 2, 5


@dataclass(frozen=True)
class TileWidths:
    """The widths of an attention kernel's tiles for one head, in elements.

    `key` is the width of queries and keys. `value` is the width of values, or 0 if values are part of the keys. `sum`
    is the width of an accumulator, and each row of queries has `sums` of them. `itemsize` is the bytes of an element.
    """

    key: int
    value: int
    sum: int
    sums: int
    itemsize: int

    def shared(self, rows: int, keys: int, cached: int = 0) -> int:
        """Return the bytes of shared memory that a program needs for tiles of `rows` queries and `keys` keys.

        `cached` is the bytes of an element of keys and values as they are loaded; 0 means `itemsize`.
        """
        loaded = _BUFFERS * keys * (self.key + self.value) * (cached or self.itemsize)
        return self.itemsize * (rows * self.key + rows * keys) + loaded


@dataclass(frozen=True)
class FormTiles:
    """The tile sizes and launch parameters of an attention kernel.

    A tile has `rows` queries and `keys` keys. A program has `warps` warps, and its loop `stages` stages.
    """

    rows: int
    keys: int
    warps: int
    stages: int = _STAGES


def form_tiles(widths: TileWidths, sm: int, want: Callable[[bool, str], None], most_rows: int) -> FormTiles:
    """Return the largest tiles that fit on compute capability `sm`, with at most `most_rows` queries.

    `widths` are the widths of the kernel's tiles. If even the smallest tiles do not fit, it calls `want(False,
    reason)`, which raises an exception.
    """
    share = _SHARE_OF_FLOAT32 if widths.itemsize == 4 else 1
    needed = widths.shared(LEAST, LEAST)
    want(
        needed <= shared_memory(sm),
        f"the smallest tiles take {needed} bytes of shared memory, and a block has {shared_memory(sm)}",
    )
    for rows, keys in product((64, 32, LEAST), (64, 32, LEAST)):
        sums = rows * widths.sum * widths.sums
        fits = widths.shared(rows, keys) <= shared_memory(sm)
        fits &= rows == LEAST or (rows <= most_rows and sums <= _MOST_SUMS // share)
        fits &= keys == LEAST or keys * widths.key <= _MOST_KEYS // share
        if fits:
            break
    return FormTiles(rows, keys, 8 if sums > _SUMS_OF_4_WARPS // share else 4)
