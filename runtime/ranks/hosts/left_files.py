"""The files that ranks leave for each other in a folder, copied between hosts."""

import os
from collections.abc import Iterator
from pathlib import Path

from ingot.ir.errors import RankError
from ingot.ir.machine.meeting import UNWRITTEN, leave_file


class LeftFiles:
    """The files in the folder where the ranks of this host meet, as one connection to another host has seen them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[str] = set()

    def new(self) -> Iterator[tuple[str, bytes]]:
        """Yield the name and the content of each file that the other host lacks."""
        for name in sorted(set(os.listdir(self._folder)) - self._seen):
            if not name.endswith(UNWRITTEN):
                self._seen.add(name)
                yield name, (self._folder / name).read_bytes()

    def add(self, name: str, content: bytes) -> None:
        """Write a file that a rank of the other host has left. Raises RankError for a name that is a path."""
        if Path(name).name != name:
            raise RankError(f"a rank of another host leaves a file with the name {name!r:.80}", expected="no path")
        self._seen.add(name)
        leave_file(self._folder / name, content)
