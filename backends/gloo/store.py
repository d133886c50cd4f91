"""The store in which the processes of gloo exchange their addresses: files in the place where ranks meet."""

from datetime import timedelta
from typing import Any
from urllib.parse import quote

import torch.distributed

from ingot.ir.errors import BackendError
from ingot.ir.machine.meeting import MeetingPlace

_DIST: Any = torch.distributed  # whose stubs lack most of what it has


class MeetingStore(_DIST.Store):  # type: ignore[misc]
    """The store of one group of processes.

    place     where they meet
    name      identifies the group there
    seconds   how long to wait for what another process stores
    """

    def __init__(self, place: MeetingPlace, name: str, seconds: float) -> None:
        super().__init__()
        self._place, self._name, self._seconds = place, name, seconds

    def set(self, key: str, value: bytes) -> None:
        self._place.leave(self._file(key), value)

    def get(self, key: str) -> bytes:
        def late() -> None:
            raise BackendError(
                f"a process of the group does not come in {self._seconds:.0f} seconds", where=f"gloo, {self._name}"
            )

        return self._place.find(self._file(key), late, self._seconds)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def _file(self, key: str) -> str:
        return f"{quote(self._name, safe='')}.{quote(key, safe='')}.gloo"  # a key of gloo has slashes
