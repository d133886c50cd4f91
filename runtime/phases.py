"""How long the phases of a start take."""

import contextlib
import os
import time
from collections.abc import Iterator


class Phases:
    """Seconds by phase, in the order in which they ended. Phases may run beside each other, so they need not add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What runs within is the phase `name`, or more of it."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def process_age() -> float | None:
    """Seconds since this process was started, in hundredths; None where the kernel does not tell."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # Field 22 in clock ticks since boot (proc(5)); the second field, a name, may hold spaces and parentheses.
            started = int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
