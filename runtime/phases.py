"""Measurement of how long each phase of loading a model takes."""

import contextlib
import os
import time
from collections.abc import Iterator


class Phases:
    """The `seconds` that each named phase took, in the order in which phases ended. Phases may run in parallel, so
    their sum may exceed the total."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that the code within takes to the phase `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def process_age() -> float | None:
    """Return the seconds since this process started, exact to a hundredth; None if the operating system does not
    say."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # Field 22 in clock ticks since boot (proc(5)); the second field, a name, may hold spaces and parentheses.
            started = int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
