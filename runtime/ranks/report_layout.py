"""The sizes of what ranks report at the beginning of their shared memory. Importing this imports no torch."""

import mmap

# Numbers that each rank reports, 8 bytes each: `shared_area.py` names them.
WORDS = 5
# A text of each rank: the parts of an error, or the phases of its loading.
TEXT_BYTES = 1 << 13


def report_bytes(ranks: int) -> int:
    """Return the bytes of all reports, in whole pages: the slots of steps follow, and are mapped apart."""
    return -(-ranks * (8 * WORDS + TEXT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
