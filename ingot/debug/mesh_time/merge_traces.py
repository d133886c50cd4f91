"""Merge the profiler's traces of all ranks into one: a process of the trace is a rank, and has its name."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.ir.errors import OutputError

# The events that connect others by the field "id", which is unique within one rank's trace (Chrome's trace format).
_FLOWS = frozenset("stf")
_MICROSECONDS = 1e-3  # in a nanosecond
_HOST = "CPU"  # the label of the host's process in torch's traces; a GPU has "GPU 0"
_PROCESSES = 100  # the numbers of processes that a rank has


def merge_traces(traces: Mapping[str, bytes], path: Path) -> None:
    """Write one trace to `path`, compressed if its name ends in .gz. `traces` has the JSON text of each, by the name of
    its rank. Raises OutputError if the file cannot be written."""
    read = {name: json.loads(text) for name, text in traces.items()}
    base = min(int(one.get("baseTimeNanoseconds", 0)) for one in read.values())
    events: list[dict[str, Any]] = []
    for place, (name, trace) in enumerate(read.items()):
        later = (int(trace.get("baseTimeNanoseconds", 0)) - base) * _MICROSECONDS
        events += _events(name, place, trace["traceEvents"], later)
    first = next(iter(read.values()))
    merged = {**first, "baseTimeNanoseconds": base, "traceEvents": events}
    text = json.dumps(merged).encode()
    try:
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    except OSError as error:
        raise OutputError(
            f"the trace cannot be written: {error.strerror}", where=str(path), expected="a file that can be written"
        ) from error


def _events(name: str, place: int, events: list[dict[str, Any]], later: float) -> list[dict[str, Any]]:
    """Return the events of a rank, with names and numbers that no other rank has.

    name    the name of the rank, and `place`, its number
    later   the microseconds to add to all times

    A rank has a process of the trace for the host, and one for its GPU. Events of the profiler itself are left out.
    """
    ids = {one["pid"] for one in events if one.get("ph") == "X" and isinstance(one["pid"], int)}
    labels = {one["pid"]: one["args"]["labels"] for one in events if one["name"] == "process_labels"}
    hosts_first = sorted(ids, key=lambda pid: (labels.get(pid) != _HOST, pid))
    numbers = {pid: place * _PROCESSES + number for number, pid in enumerate(hosts_first)}
    found: list[dict[str, Any]] = []
    for pid, number in numbers.items():
        label = labels.get(pid, _HOST)
        titles = {"name": name if label == _HOST else f"{name}, {label}"}
        found.append({"ph": "M", "name": "process_name", "pid": number, "args": titles})
        found.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
    for one in events:
        if one["pid"] not in numbers or one["name"].startswith("process_"):
            continue
        moved = {**one, "pid": numbers[one["pid"]]}
        if "ts" in one:
            moved["ts"] = one["ts"] + later
        if one["ph"] in _FLOWS:
            moved["id"] = f"{place}.{one['id']}"
        found.append(moved)
    return found
