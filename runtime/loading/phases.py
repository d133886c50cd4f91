"""Measurement of how long each phase of loading a model takes."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """When a phase ran, in seconds of the system's monotonic clock, which all processes of a machine share."""

    name: str
    begin: float
    end: float


class Phases:
    """Measures how long phases take, such as those of loading a model.

    seconds   maps the name of a phase to its time, in the order in which the phases ended. Phases may run in parallel,
              so the sum may exceed the total time
    spans     when each ran, in the same order. A phase that ran several times has as many
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time inside the `with` block, and add it to the phase `name`."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(Span(name, begin, time.monotonic()))

    def add(self, span: Span) -> None:
        """Add a phase that ran."""
        self.spans.append(span)
        self.seconds[span.name] = self.seconds.get(span.name, 0.0) + span.end - span.begin


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
