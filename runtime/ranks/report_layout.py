"""The layout of the memory that the ranks of a host share: reports, then slots. Importing this imports no torch."""

import mmap
import os

# Numbers that each rank reports, 8 bytes each: `reports.py` names them.
WORDS = 5
# A text of each rank: the parts of an error, or the phases of its loading.
TEXT_BYTES = 1 << 13
# The inputs of so many more steps than there are stages are kept, so that rank 0 can prepare a step while other ranks
# run the ones before.
_MORE_SLOTS = 3


def report_bytes(ranks: int) -> int:
    """Return the bytes of all reports, in whole pages: the slots of steps follow, and are mapped apart."""
    return -(-ranks * (8 * WORDS + TEXT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def slot_count(stages: int) -> int:
    """Return the number of slots of a mesh with so many pipeline stages."""
    return stages + _MORE_SLOTS


def map_slots(fd: int, ranks: int, slots: int, words: int) -> mmap.mmap:
    """Return the slots, each of so many 4-byte words, after the reports of so many ranks. The memory grows first if it
    has none."""
    start, size = report_bytes(ranks), slots * words * 4
    if os.fstat(fd).st_size < start + size:
        os.ftruncate(fd, start + size)  # untouched pages take no memory
    return mmap.mmap(fd, size, offset=start)
