"""The connections of a rank, made in a thread while the rank reads its weights."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait

from ingot.ir.machine.load_context import Communicator
from ingot.ir.mesh import Rank

# Between two looks for a fault of another rank.
_LOOK_SECONDS = 0.02


class Connecting(Mapping[str, Communicator]):
    """The connections of a rank by mesh axis. Reading one waits until all of them are made.

    rank      the rank, whose axes are the keys
    connect   waits for the other ranks, and returns the connections. It runs in a thread at once
    check     called while something waits; raises the fault of another rank
    """

    def __init__(
        self, rank: Rank, connect: Callable[[], Mapping[str, Communicator]], check: Callable[[], None] = lambda: None
    ) -> None:
        self._axes = tuple(axis for axis, _, _ in rank.axes)
        self._check = check
        self._made: Future[Mapping[str, Communicator]] = Future()
        self._found: Mapping[str, Communicator] | None = None
        self._aborted = False
        self._lock = threading.Lock()

        def run() -> None:
            try:
                found = connect()
            except BaseException as error:
                self._made.set_exception(error)
                return
            with self._lock:
                self._made.set_result(found)
                aborted = self._aborted
            if aborted:
                _abort(found)

        # A daemon: the process must be able to exit while the thread waits for a rank that is gone.
        threading.Thread(target=run, name="connect", daemon=True).start()

    def __getitem__(self, axis: str) -> Communicator:
        if axis not in self._axes:
            raise KeyError(axis)
        return (self._wait() if self._found is None else self._found)[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def abort(self) -> None:
        """Abort the connections; those that are not made yet, as soon as they are. Any thread may call it."""
        with self._lock:
            self._aborted = True
            made = self._made.done() and self._made.exception() is None
        if made:
            _abort(self._made.result())

    def _wait(self) -> Mapping[str, Communicator]:
        while not self._made.done():
            self._check()
            wait([self._made], _LOOK_SECONDS)
        self._found = self._made.result()
        return self._found


def _abort(found: Mapping[str, Communicator]) -> None:
    for communicator in found.values():
        communicator.abort()
