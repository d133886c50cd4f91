"""How much memory this process holds."""

import re
from typing import NamedTuple

_KIB = 1024  # the unit of /proc/self/status (proc(5))


class Resident(NamedTuple):
    """Resident bytes of the process: at present, and at their most since it began."""

    now: int
    most: int


def resident() -> Resident | None:
    """What the kernel counts; None where there is no procfs."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            found = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", file.read(), re.MULTILINE))
        return Resident(int(found["VmRSS"]) * _KIB, int(found["VmHWM"]) * _KIB)
    except (OSError, KeyError):
        return None


def peak_between(before: Resident | None, after: Resident | None) -> int | None:
    """The most that is known to have been resident between two looks: exact where the process never held so much
    before, else what it held at the two. Resetting the kernel's mark would tell more, and mislead other code that
    measures the whole process."""
    if before is None or after is None:
        return None
    return after.most if after.most > before.most else max(before.now, after.now)
