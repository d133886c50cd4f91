"""Sample the resources of processes from /proc, and a server's gauges from /metrics."""

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from http_servers import gauges

_ENGINE = "ingot.serve.engine.process"  # in the command line of the engine process
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True)
class ProcessSample:
    """The resources of a process: resident bytes that no file backs, open file descriptors, and threads."""

    anonymous: int
    fds: int
    threads: int


@dataclass(frozen=True)
class Sample:
    """The state of a server at `moment`, a value of time.monotonic().

    `server` and `engine` are its two processes. `running` and `waiting` count sequences. `held` is the share of the KV
    pages that sequences hold.
    """

    moment: float
    server: ProcessSample
    engine: ProcessSample
    running: float
    waiting: float
    held: float

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.held)


def take_sample(port: int, server: int, engine: int) -> Sample:
    """Return the state of the server at `port`, whose processes have the ids `server` and `engine`."""
    running, waiting, held = (sum(gauges(port, [name])) for name in GAUGES)
    return Sample(time.monotonic(), process_sample(server), process_sample(engine), running, waiting, held)


def process_sample(pid: int) -> ProcessSample:
    fields = _status(pid)
    fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return ProcessSample(_anonymous_bytes(fields), fds, int(fields["Threads"]))


def engine_process(server: int) -> int:
    """Return the id of the engine process that the server process has started."""
    found = [pid for pid in _descendants(server) if _ENGINE in _command(pid)]
    if len(found) != 1:
        raise RuntimeError(f"process {server} has {len(found)} engine processes")
    return found[0]


def device_memory(pids: Sequence[int]) -> int | None:
    """Return the bytes of GPU memory that these processes use, as nvidia-smi says; None without it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line.split(",") for line in done.stdout.splitlines() if line.count(",") == 1]
    own = [int(used) for pid, used in rows if int(pid) in pids and used.strip().isdigit()]
    # In a container, nvidia-smi may name the processes by their ids outside, or not at all.
    return sum(own) * (1 << 20) if own else None


@dataclass
class PeakMemory:
    """The most memory that processes had at a time, in bytes.

    `together` is the anonymous memory of all of them, and `largest` that of one. `shared` is the shared memory of all,
    such as the blocks through which weights are copied to a GPU: what several processes map counts for each. `locked`
    is what the kernel counts as locked or pinned in all. Drivers pin memory that it does not count.
    """

    together: int = 0
    largest: int = 0
    shared: int = 0
    locked: int = 0


@contextlib.contextmanager
def children_memory(interval: float = 0.02) -> Iterator[PeakMemory]:
    """Sample the memory of the processes that this one has started, until the block ends.

    Samples are `interval` seconds apart. They are fields of /proc/PID/status: RssAnon, RssShmem, and VmLck and VmPin.
    Memory that files on a disk back, such as mapped weights, does not count.
    """
    peak, ended = PeakMemory(), threading.Event()

    def sample() -> None:
        while not ended.wait(interval):
            now = [_memory(pid) for pid in _descendants(os.getpid())]
            anonymous, shared, locked = (sum(part) for part in zip((0, 0, 0), *now, strict=True))
            peak.together = max(peak.together, anonymous)
            peak.largest = max([peak.largest, *(one[0] for one in now)])
            peak.shared = max(peak.shared, shared)
            peak.locked = max(peak.locked, locked)

    thread = threading.Thread(target=sample, name="children's memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _memory(pid: int) -> tuple[int, int, int]:
    """Return the anonymous, the shared and the locked memory of a process in bytes; zeros if it has ended."""
    with contextlib.suppress(OSError, KeyError):
        fields = _status(pid)
        return _anonymous_bytes(fields), _bytes(fields, "RssShmem"), _bytes(fields, "VmLck") + _bytes(fields, "VmPin")
    return 0, 0, 0


def _status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status, as they are written there."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return dict(line.split(":", 1) for line in lines)


def _anonymous_bytes(fields: Mapping[str, str]) -> int:
    return _bytes(fields, "RssAnon")


def _bytes(fields: Mapping[str, str], name: str) -> int:
    return int(fields[name].split()[0]) * 1024


def _descendants(pid: int) -> list[int]:
    """Return the ids of the processes that a process has started, and of those that they have started."""
    text = ""
    with contextlib.suppress(OSError):  # the process or a thread of it may have ended
        text = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    children = [int(one) for one in text.split()]
    return [*children, *(further for child in children for further in _descendants(child))]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
