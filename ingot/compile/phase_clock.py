"""Measure the phases of a compile, and tell its progress."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ingot.cli.progress import OnProgress


@dataclass
class PhaseClock:
    """Measures the phases of a compile. `seconds` has the time of each phase by name, in order.

    It calls `progress` when a phase starts.
    """

    progress: OnProgress
    seconds: dict[str, float] = field(default_factory=dict)
    target: str = ""

    def of(self, target: str) -> "PhaseClock":
        """Return a clock whose phases are named after one of several targets; "" is the only target."""
        return PhaseClock(self.progress, self.seconds, target) if target else self

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        name = f"{self.target}: {name}" if self.target else name
        begin = time.perf_counter()
        self.progress(name, 0, 0)
        yield lambda done, total: self.progress(name, done, total)
        self.seconds[name] = time.perf_counter() - begin
