"""A profiler's trace of steps: written by hand, with kernels that overlap as dependent ones do."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ingot.debug.step_time.trace import CALL, read_trace
from ingot.ir.errors import InternalError

US = 1e-6


class Recorded:
    """Events as torch writes them; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
        self._launches = 0

    def add(self, cat: str, name: str, begin: float, end: float, **args: object) -> None:
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": args})

    def call(self, number: int, begin: float, end: float, *kernels: tuple[str, float, float]) -> None:
        """A call that the host runs from `begin` to `end`, and its kernels."""
        self.add("user_annotation", f"{CALL}{number}", begin, end)
        for kernel in kernels:
            self._launched("cuda_driver", "cuLaunchKernelEx", begin + 1, kernel)

    def graph(self, begin: float, *kernels: tuple[str, float, float]) -> None:
        self._launched("cuda_runtime", "cudaGraphLaunch", begin, *kernels)

    def _launched(self, cat: str, name: str, at: float, *kernels: tuple[str, float, float]) -> None:
        self._launches += 1
        self.add(cat, name, at, at + 1, correlation=self._launches)
        for kernel, begin, end in kernels:
            self.add("kernel", kernel, begin, end, correlation=self._launches)

    def write(self, path: Path) -> Path:
        data = json.dumps({"traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def launched(offset: float = 0.0) -> Recorded:
    """Four calls: of two kernels, of none, of one, and of a library's that has the name of the first."""
    recorded = Recorded()
    recorded.call(0, offset, offset + 5, ("norm", offset + 10, offset + 14), ("tile", offset + 12, offset + 20))
    recorded.call(1, offset + 6, offset + 7)
    recorded.add("user_annotation", "somebody else's", offset, offset + 50)
    recorded.call(2, offset + 8, offset + 12, ("attention", offset + 30, offset + 37))
    recorded.call(3, offset + 13, offset + 17, ("norm", offset + 36, offset + 40))
    return recorded


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_replayed_steps(tmp_path: Path, name: str) -> None:
    """Each kernel begins before the one in front has ended, or after a pause that it is the reason of."""
    recorded = launched()
    for begin, slower in ((100.0, 0.0), (130.0, 2.0), (160.0, 0.0)):
        recorded.graph(
            begin - 20,
            ("move", begin, begin + 2),
            ("norm", begin + 1, begin + 5),  # adds 3
            ("tile", begin + 3, begin + 9 + slower),  # adds 4, or 6
            ("attention", begin + 12, begin + 15),  # adds 6, or 4
            ("norm", begin + 14, begin + 16),  # adds 1
            ("move", begin + 16, begin + 18),
        )
    trace = read_trace(recorded.write(tmp_path / name), 4)
    assert trace.calls == pytest.approx((7 * US, 0, 6 * US, 1 * US))
    assert trace.step == pytest.approx(30 * US)


def test_a_call_whose_kernels_are_not_there_is_not_known(tmp_path: Path) -> None:
    recorded = launched()
    recorded.graph(80, ("move", 100, 102), ("tile", 103, 109), ("other attention", 112, 115), ("norm", 114, 116))
    trace = read_trace(recorded.write(tmp_path / "trace.json"), 4)
    assert trace.calls == (None, 0.0, None, pytest.approx(1 * US)) and trace.step is None


def test_steps_that_wait_for_the_host(tmp_path: Path) -> None:
    """A pause in front of a kernel is the host's."""
    recorded = launched()
    recorded.events += launched(1000.0).events
    shifted = [event["args"] for event in recorded.events[len(launched().events) :] if event["ph"] == "X"]
    for args in shifted:
        if "correlation" in args:
            args["correlation"] += 100
    trace = read_trace(recorded.write(tmp_path / "trace.json"), 4)
    assert trace.calls == pytest.approx((10 * US, 0, 7 * US, 3 * US)) and trace.step is None


def test_a_trace_of_something_else(tmp_path: Path) -> None:
    recorded = Recorded()
    recorded.graph(80, ("move", 100, 102))
    with pytest.raises(InternalError, match=f"has no '{CALL}0'"):
        read_trace(recorded.write(tmp_path / "trace.json"), 4)
