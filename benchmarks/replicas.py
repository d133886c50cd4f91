"""Measure how the throughput of a server grows with its replicas, and how much of it one server process allows.

    python benchmarks/replicas.py ARTIFACT [--replicas 2] [--requests 256] [--input 64] [--output 64] [--clients 2]
        [--json FILE]

The server runs with one replica and then with `--replicas`, under the same load: streamed requests that are given at
once. Each replica has a GPU. On a machine without one, each has an equal share of the cores, and so has the only one.
The server process and the clients need cores too: the measured ratio means little on a machine where they compete.
So the script also takes the CPU times of the server's processes. A server process that does nothing but write events
reaches `server_limit` tokens per second; `ratio_limit` is the most that so many replicas could reach with it.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from http_load import send
from http_servers import HOST, free_port, ingot_command, model_name, running
from results import Figure, add_json_option, report

from ingot.bench.workload import equal_lengths, make_workload

_WARM_UP = 16  # requests before the load
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    """What a server did under the load: seconds of the load, and CPU seconds of its processes in it.

    tokens    generated tokens
    engines   of all engine processes together
    """

    seconds: float
    tokens: int
    server: float
    engines: float

    @property
    def throughput(self) -> float:
        return self.tokens / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--vocab", type=int, default=4000, help="prompts have token ids from 256 to below this")
    parser.add_argument("--clients", type=int, default=2, help="processes that send the load")
    parser.add_argument("--tries", type=int, default=3, help="loads for each server; the best one counts")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the server may take to start")
    add_json_option(parser)
    options = parser.parse_args()
    one, several = (_best(number, options) for number in (1, options.replicas))
    figures = _figures(one, several, options.replicas)
    names = ("replicas", "requests", "input", "output", "clients", "tries")
    settings = {"artifact": options.artifact.name, "cores": len(os.sched_getaffinity(0))}
    report(__file__, options.json, {**settings, **{name: getattr(options, name) for name in names}}, figures)


def _best(replicas: int, options: argparse.Namespace) -> Load:
    """Return the load with the highest throughput of a server with so many replicas."""
    # An only replica has as many threads as each of several.
    share = max(1, len(os.sched_getaffinity(0)) // options.replicas)
    log = Path(tempfile.gettempdir()) / f"replicas_{replicas}.log"
    port = free_port()
    command = [*ingot_command(options.artifact, port), "--replicas", str(replicas)]
    with running(command, port, env=_threads(share), timeout=options.timeout, log=log):
        loads = [_load(port, options, str(number)) for number in range(options.tries)]
    return max(loads, key=lambda load: load.throughput)


def _threads(share: int) -> Mapping[str, str]:
    return {"OMP_NUM_THREADS": str(share)}


def _load(port: int, options: argparse.Namespace, seed: str) -> Load:
    name, tokens = model_name(port), range(256, options.vocab)

    def drive(seed: str, requests: int, output: int) -> float:
        work = make_workload(equal_lengths(requests, options.input, output), tokens, seed)
        run = send(HOST, port, name, work, options.clients).run
        if failed := [one.error for one in run.records if one.error]:
            sys.exit(f"{len(failed)} of {requests} requests failed: {failed[0]}")
        return run.duration

    drive(f"before {seed}", _WARM_UP, 8)
    server = _listening_process(port)
    engines = list(_children(server))
    before, before_engines = _cpu(server), sum(map(_cpu, engines))
    seconds = drive(seed, options.requests, options.output)
    time.sleep(0.1)
    server_s, engines_s = _cpu(server) - before, sum(map(_cpu, engines)) - before_engines
    return Load(seconds, options.requests * options.output, server_s, engines_s)


def _figures(one: Load, several: Load, replicas: int) -> dict[str, Figure]:
    def seconds(load: Load, which: str) -> Figure:
        each = getattr(load, which) / load.tokens
        return Figure(value=each, unit="s", what=f"CPU time of the {which} for each generated token")

    limit = one.tokens / one.server
    return {
        "one": Figure(value=one.throughput, unit="tokens/s", what="one replica"),
        "several": Figure(value=several.throughput, unit="tokens/s", what=f"{replicas} replicas"),
        "ratio": Figure(value=several.throughput / one.throughput, unit="", what="several replicas over one"),
        "one_server_cpu": seconds(one, "server"),
        "one_engines_cpu": seconds(one, "engines"),
        "several_server_cpu": seconds(several, "server"),
        "several_engines_cpu": seconds(several, "engines"),
        "server_limit": Figure(value=limit, unit="tokens/s", what="a server process that does nothing but write"),
        "ratio_limit": Figure(
            value=min(replicas, limit / one.throughput),
            unit="",
            what=f"{replicas} replicas over one, if each process had cores of its own: the server's limit",
        ),
    }


def _cpu(process: int) -> float:
    """Return the CPU seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS  # utime and stime, see proc_pid_stat(5)


def _listening_process(port: int) -> int:
    """Return the server process: of this process's children the one that has the port in its command."""
    for process in _children(os.getpid()):
        if str(port).encode() in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0"):
            return process
    sys.exit("the server's process is not found")


def _children(parent: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            yield int(stat.parent.name)


if __name__ == "__main__":
    main()
