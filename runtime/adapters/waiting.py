"""Requests that wait until their adapter is on the device."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from ingot.runtime.adapters.host_adapter import HostAdapter
from ingot.runtime.adapters.manager import AdapterManager

Waiting = TypeVar("Waiting")

# As many later requests may go ahead of one whose adapter has no slot. Then no further request begins, so that slots
# become idle.
MOST_OVERTAKING = 64


class WaitingForAdapters(Generic[Waiting]):
    """A queue of requests whose adapter is not on the device yet, in order of arrival."""

    def __init__(self, manager: AdapterManager) -> None:
        self._manager = manager
        self._waiting: dict[Waiting, HostAdapter] = {}
        self._overtaken = 0  # requests that have gone ahead of the first one

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def requests(self) -> tuple[Waiting, ...]:
        """The requests that wait, in order of arrival."""
        return tuple(self._waiting)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters that requests wait for, each once."""
        return tuple(dict.fromkeys(one.name for one in self._waiting.values()))

    def add(self, request: Waiting, adapter: HostAdapter) -> None:
        self._waiting[request] = adapter

    def drop(self, request: Waiting) -> bool:
        """Forget a request. Return whether it waited."""
        return self._waiting.pop(request, None) is not None

    def ready(self) -> Iterator[tuple[Waiting, HostAdapter]]:
        """Remove and yield the requests that can begin. The caller calls `AdapterManager.use` for each at once."""
        first = next(iter(self._waiting), None)
        for request, adapter in list(self._waiting.items()):
            if self._manager.place(adapter):
                del self._waiting[request]
                if request is first:
                    first, self._overtaken = next(iter(self._waiting), None), 0
                else:
                    self._overtaken += 1
                yield request, adapter
            elif self._overtaken >= MOST_OVERTAKING:
                return
