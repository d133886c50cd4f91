"""Read a profiler trace of some steps, which torch writes in the format of Chrome and Perfetto."""

import gzip
import json
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any

from ingot.debug.step_time.measurement import StepTrace
from ingot.ir.errors import InternalError

# The host's span of a call; the call's number follows.
CALL = "ingot call "
_HOST = frozenset({"cuda_runtime", "cuda_driver"})
_GRAPHS = frozenset({"cudaGraphLaunch", "cuGraphLaunch"})
_SECONDS = 1e-6  # seconds per unit of a trace


@dataclass(frozen=True)
class _Kernel:
    """A kernel that ran from `begin` to `end`, in seconds.

    `call` is the number of the call that launched it, counted from the begin of the step. It is None if unknown.
    """

    name: str
    begin: float
    end: float
    call: int | None = None


def read_trace(path: Path, calls: int) -> StepTrace:
    """Read a profiler trace that `record_trace` wrote. Return the time of a step, and the time of each of its calls.

    `calls` is the number of calls of a step. Times are medians over the traced steps. Raises InternalError if the trace
    has no spans of calls.

    In a step that the host launched, each call has a span "ingot call N". The span shows which kernels belong to the
    call. If a CUDA graph replayed steps too, the times of the replays are returned. A graph runs these kernels in the
    same order.

    A kernel may begin before the previous kernel ends. In a replay, it adds the time from the previous kernel's end to
    its own end. In a launched step, only the time in which the kernel runs counts. The gaps between kernels come from
    the host.
    """
    launched, replayed = _steps(_events(path))
    if not launched:
        raise InternalError(f"the trace has no '{CALL}0'", where=str(path), expected="a span for each call of a step")
    wanted = Counter(kernel.call for kernel in launched[-1])
    steps = [_numbered(step, launched[-1]) for step in replayed] or launched
    added = [_added(step, wanted, calls, waiting=not replayed) for step in steps]
    whole = _median([later[-1].end - sooner[-1].end for sooner, later in pairwise(steps)])
    of_calls = tuple(_median([one[number] for one in added]) for number in range(calls))
    return StepTrace(of_calls, whole if replayed else None)


def _events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    value = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return [event for event in value["traceEvents"] if event.get("ph") == "X"]


def _steps(events: Sequence[dict[str, Any]]) -> tuple[list[list[_Kernel]], list[list[_Kernel]]]:
    """Find the steps in a profiler trace. A step is the list of its kernels, in the order in which they end.

    Return two lists. The first has the steps that the host launched call by call. The second has the steps that were
    replayed from a CUDA graph.
    """
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], int(event["name"].removeprefix(CALL)))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(CALL)
    )
    begins = [begin for begin, _, _ in spans]
    firsts = [begin for begin, _, number in spans if number == 0]
    hosts = {event["args"].get("correlation"): event for event in events if event.get("cat") in _HOST}
    launched: dict[int, list[_Kernel]] = {}
    replayed: dict[int, list[_Kernel]] = {}
    for event in sorted(events, key=lambda one: one["ts"] + one["dur"]):
        number = event.get("args", {}).get("correlation")
        if event.get("cat") != "kernel" or number not in hosts:
            continue
        begin, host = event["ts"] * _SECONDS, hosts[number]
        kernel = _Kernel(event["name"], begin, begin + event["dur"] * _SECONDS)
        place = bisect_right(begins, host["ts"]) - 1
        if host["name"] in _GRAPHS:
            replayed.setdefault(number, []).append(kernel)
        elif place >= 0 and host["ts"] <= spans[place][1]:
            step = bisect_right(firsts, host["ts"])
            launched.setdefault(step, []).append(_of(kernel, spans[place][2]))
    return list(launched.values()), list(replayed.values())


def _of(kernel: _Kernel, call: int | None) -> _Kernel:
    return _Kernel(kernel.name, kernel.begin, kernel.end, call)


def _numbered(step: Sequence[_Kernel], known: Sequence[_Kernel]) -> list[_Kernel]:
    """Find which call launched each kernel of a replayed step. Return the kernels with the numbers of their calls.

    `known` are the kernels of a step that was launched call by call, with their calls' numbers. Equal sequences of
    kernel names match. A replay has a few more kernels, which copy inputs and tokens.
    """
    matcher = SequenceMatcher(None, [one.name for one in step], [one.name for one in known], autojunk=False)
    calls = {
        block.a + place: known[block.b + place].call
        for block in matcher.get_matching_blocks()
        for place in range(block.size)
    }
    return [_of(kernel, calls.get(place)) for place, kernel in enumerate(step)]


def _added(step: Sequence[_Kernel], wanted: Counter[int | None], calls: int, *, waiting: bool) -> list[float | None]:
    """Return the seconds that each of the `calls` calls adds to a step.

    The result is None for a call if some of its kernels are not in the step. `wanted` maps each call's number to the
    number of its kernels. With `waiting`, the time between kernels is left out.
    """
    added: list[float | None] = [0.0] * calls
    found = Counter(kernel.call for kernel in step)
    ended = step[0].begin
    for kernel in step:
        since = max(ended, kernel.begin) if waiting else ended
        ended = kernel.end
        if kernel.call is not None:
            added[kernel.call] = (added[kernel.call] or 0.0) + kernel.end - since
    return [seconds if found[number] == wanted[number] else None for number, seconds in enumerate(added)]


def _median(seconds: Sequence[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return statistics.median(known) if known else None
