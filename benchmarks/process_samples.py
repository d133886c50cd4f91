"""Sample the resources of a server's processes from /proc, and its gauges from /metrics."""

import shutil
import subprocess
import time
from collections.abc import Sequence
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
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines())
    anonymous = int(fields["RssAnon"].split()[0]) * 1024
    return ProcessSample(anonymous, len(list(Path(f"/proc/{pid}/fd").iterdir())), int(fields["Threads"]))


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


def _descendants(pid: int) -> list[int]:
    text = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    children = [int(one) for one in text.split()]
    return [*children, *(further for child in children for further in _descendants(child))]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
