"""Measurement of how long each phase of loading a model takes."""

import contextlib
import os
import time
from collections.abc import Iterator


class Phases:
    """Measures how long phases take, such as those of loading a model. `seconds` maps the name of a phase to its time,
    in the order in which the phases ended. Phases may run in parallel, so the sum may exceed the total time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time inside the `with` block, and add it to the phase `name`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def process_age() -> float | None:
    """Return the seconds since this process started, to 0.01 s. Return None if the operating system does not report
    it."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # Field 22 in clock ticks since boot (proc(5)); the second field, a name, may hold spaces and parentheses.
            started = int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
