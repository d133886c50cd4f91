"""The report of a rank of another host, as the content of a frame. Importing this imports no torch."""

import struct
from dataclasses import dataclass

from ingot.runtime.ranks.report_layout import WORDS

_FIXED = struct.Struct(f"<I?q{8 * WORDS}s")
# In place of the exit status of a process that runs: no status of `subprocess` is as low.
_RUNS = -(1 << 40)


@dataclass(frozen=True)
class RankReport:
    """The state of a rank's process.

    rank      its index
    stopped   whether a signal has stopped it
    status    how it ended, as `subprocess` has it; None while it runs
    numbers   what `Reports.numbers` returns
    """

    rank: int
    stopped: bool
    status: int | None
    numbers: bytes

    @property
    def state(self) -> bytes:
        """The number that holds the rank's state, which is the first one. The rank's text changes with it."""
        return self.numbers[:8]

    def packed(self) -> bytes:
        """Return the report as bytes; `read_report` reads them."""
        return _FIXED.pack(self.rank, self.stopped, _RUNS if self.status is None else self.status, self.numbers)


def read_report(content: bytes) -> tuple[RankReport, bytes]:
    """Return a report, and the text of the rank that follows it: b"" if it has not changed."""
    rank, stopped, status, numbers = _FIXED.unpack_from(content)
    return RankReport(rank, stopped, None if status == _RUNS else status, numbers), content[_FIXED.size :]
