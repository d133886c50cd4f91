"""Read the resident memory of this process from the kernel."""

import re
from typing import NamedTuple

_KIB = 1024  # the unit of /proc/self/status (proc(5))


class Resident(NamedTuple):
    """Bytes of this process in memory: `now`, and the most since its start."""

    now: int
    most: int


def resident() -> Resident | None:
    """Return the resident memory of this process; None if the system has no procfs."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", file.read(), re.MULTILINE))
        return Resident(int(found["VmRSS"]) * _KIB, int(found["VmHWM"]) * _KIB)
    except (OSError, KeyError):
        return None


def peak_between(before: Resident | None, after: Resident | None) -> int | None:
    """Return the most bytes known to have been resident between two measurements. The number is exact if the process
    reached a new maximum between them. Otherwise it is the larger of the two. Resetting the kernel's maximum would
    always be exact, but would mislead other code that measures the process. None if a measurement is missing."""
    if before is None or after is None:
        return None
    return after.most if after.most > before.most else max(before.now, after.now)
