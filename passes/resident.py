"""Read the resident memory of this process from the kernel."""

import re
from typing import NamedTuple

_KIB = 1024  # the unit of /proc/self/status (proc(5))


class Resident(NamedTuple):
    """The resident memory of this process in bytes.

    `now` is the present value, and `most` the maximum since the process started.
    """

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
    """Return the peak of the resident memory between two measurements; None if one of them is missing.

    The result is exact if the process reached a new maximum in between. Otherwise the peak is not known, and the result
    is the larger one of the two measurements.
    """
    if before is None or after is None:
        return None
    return after.most if after.most > before.most else max(before.now, after.now)
