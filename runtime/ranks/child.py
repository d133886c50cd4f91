"""The process of another rank, as rank 0 sees it: on this host, or on another one. Importing this imports no torch."""

import signal
import subprocess
from pathlib import Path
from typing import Protocol


class RankChild(Protocol):
    """The process of another rank.

    pid     its process id on its host
    where   says on which host it is, as " on 10.0.0.2"; "" on this host
    ahead   the seconds by which the monotonic clock of its host is ahead of the clock here
    """

    pid: int
    where: str
    ahead: float

    def ended(self) -> str | None:
        """Return how it ended, as "ended: it exited with status 1"; None while it runs."""
        ...

    def stopped(self) -> bool:
        """Return whether a signal or a debugger has stopped it."""
        ...

    def kill(self) -> None:
        """End it, also if it is stopped."""
        ...


class LocalRank(subprocess.Popen[bytes]):
    """The process of a rank on this host."""

    where = ""
    ahead = 0.0

    def ended(self) -> str | None:
        status = self.poll()
        return None if status is None else status_text(status)

    def stopped(self) -> bool:
        """Return whether the process is stopped, from its state in /proc/PID/stat (proc(5))."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] in ("T", "t")


def status_text(status: int) -> str:
    """Return how a process ended, from its status as `subprocess` has it: negative for a signal."""
    if status >= 0:
        return f"ended: it exited with status {status}"
    return f"ended: it was killed by signal {-status} ({signal.Signals(-status).name})"
