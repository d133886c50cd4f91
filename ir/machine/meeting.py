"""The place where the ranks of a mesh axis meet, before a backend connects them. Importing this imports no torch."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
# Between two looks for what another rank leaves. Loading takes seconds.
_POLL_SECONDS = 0.01
# Ends the name of a file that is not written yet.
UNWRITTEN = ".new"


@dataclass(frozen=True)
class MeetingPlace:
    """The place where the ranks of a mesh axis meet.

    folder     a folder that only the user can read. All ranks find the files that one leaves there; on several hosts,
               agents copy them
    address    the IPv4 address at which other hosts reach the host of this rank
    one_host   whether all ranks of the axis are on one host
    """

    folder: Path
    address: str = LOOPBACK
    one_host: bool = True

    def leave(self, name: str, content: bytes) -> None:
        """Leave a file for the other ranks, all at once. `name` is the name of a file."""
        leave_file(self.folder / name, content)

    def find(self, name: str, late: Callable[[], None], seconds: float) -> bytes:
        """Wait for a file that another rank leaves, and return its content. After `seconds`, `late` raises an error."""
        file, end = self.folder / name, time.monotonic() + seconds
        while not file.exists():
            if time.monotonic() > end:
                late()
            time.sleep(_POLL_SECONDS)
        return file.read_bytes()


def leave_file(file: Path, content: bytes) -> None:
    """Write a file all at once."""
    beside = file.with_name(file.name + UNWRITTEN)
    beside.write_bytes(content)
    os.replace(beside, file)
