"""The device rows of sequences: a running sequence has one row in each tensor that is kept per sequence, such as its
last token.

Unlike pages, a row is usually free at once when its sequence ends: the next one starts with explicit tokens and
positions, in a step after those in flight. On pipeline stages, a later step begins before the endings of steps in
flight write their rows. There, a row is free after the last step that writes it.
"""

from collections import deque


class DeviceRows:
    """Assigns rows to running sequences.

    count    the number of rows
    staged   whether pipeline stages compute steps
    """

    def __init__(self, count: int, *, staged: bool) -> None:
        self._staged = staged
        self._free = list(reversed(range(count)))
        self._ending: deque[tuple[int, int]] = deque()  # (the last step that writes a row, the row), oldest step first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_ending(self) -> int:
        """The number of rows whose sequences have ended, and which a step in flight still writes."""
        return len(self._ending)

    def take(self) -> int:
        """Return a free row, which the caller then has."""
        return self._free.pop()

    def release(self, row: int, busy_until: int | None) -> None:
        """Give a row back. `busy_until` is the newest step in flight; None: there is none."""
        if self._staged and busy_until is not None:
            self._ending.append((busy_until, row))
        else:
            self._free.append(row)

    def retire(self, oldest: int) -> None:
        """Free the rows that no step from `oldest` on writes: the oldest step in flight, or the next one."""
        while self._ending and self._ending[0][0] < oldest:
            self._free.append(self._ending.popleft()[1])
