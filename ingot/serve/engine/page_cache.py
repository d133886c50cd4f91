"""The files of an artifact in the kernel's page cache, from which a new engine process reads its weights."""

import os
from collections.abc import Callable
from pathlib import Path

_PIECE_BYTES = 64 << 20


def read_into_page_cache(folder: Path) -> None:
    """Read all files of a folder, so that the page cache has them. The kernel drops them again if memory is short."""

    def read(descriptor: int) -> None:
        offset = 0
        while done := os.sendfile(sink, descriptor, offset, _PIECE_BYTES):
            offset += done

    with open(os.devnull, "wb") as file:
        sink = file.fileno()
        _each_file(folder, read)


def drop_from_page_cache(folder: Path) -> None:
    """Remove all files of a folder from the page cache. Pages that another process has mapped stay."""
    _each_file(folder, lambda descriptor: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED))


def _each_file(folder: Path, action: Callable[[int], None]) -> None:
    """Call `action` with a descriptor of each file in a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                action(file.fileno())
