"""Soak a server over HTTP: serve minutes of mixed clients, and check that nothing is kept or lost.

    python benchmarks/soak_http.py ARTIFACT --rate R [--seconds 600] [--clients 4] [--serve-options "…"] [--json FILE]

The rate should be 0.8 of the server's knee, which `serve_http.py --knee` finds. Most clients read a stream or an answer
to its end. Others close their connection midway, before the answer or in the middle of the request, read a few bytes a
second, or send bodies that must be refused (soak_mix.py). Each second, memory, file descriptors and threads of both
processes and the server's gauges are sampled; `--samples FILE.csv` keeps the samples.

The exit code is 1, with the reason, unless all this holds. Every answer is complete or refused as it must be, and no
status is 500 or above. At the end no sequence runs, waits or holds pages. File descriptors and threads are as before
the load, and so is the GPU's memory. In the last third of the time both processes take on average no more memory than
in the third before. Memory has fixed tolerances. The resources before the load are those after a minute of the same
load.
"""

import argparse
import csv
import json
import math
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from http_servers import HOST, free_port, ingot_command, model_name, running
from process_samples import ProcessSample, Sample, device_memory, engine_process, take_sample
from results import Figure, add_json_option, report
from soak_client import Ended, Work
from soak_mix import COMPLETE, SHARES

from ingot.bench.children import ChildError
from ingot.bench.metrics import percentile

_CLIENT = Path(__file__).with_name("soak_client.py")
_START_SECONDS = 2.0  # for the clients to start
_DRAIN_SECONDS = 60.0  # in which the server must be idle after the last request
_SETTLE_SECONDS = 8.0  # more than uvicorn's 5 s, after which it closes connections that were kept alive
# Growth of the mean from one third of the time to the next. Freed heap stays resident below small objects:
# three minutes of the engine alone left 0.2 to 0.8 MB (soak.py), and the number of running requests varies.
_ALLOWED_GROWTH = 16 << 20
_DEVICE_SAMPLES = 10  # seconds between two calls of nvidia-smi, which takes a tenth of one
_ALLOWED_DEVICE = 20 << 20  # one segment of torch's caching allocator, as in soak.py


@dataclass(frozen=True)
class Soaked:
    """The results of a soak over HTTP.

    ended     how each request ended
    samples   a sample for each second of the load
    before    the idle server before the load
    after     the idle server after the load
    device    bytes of the GPU's memory: before the load, every few seconds of it, and after it; empty without a GPU
    errors    lines of the server's log that begin an error's traceback
    """

    ended: Sequence[Ended]
    samples: Sequence[Sample]
    before: Sample
    after: Sample
    device: Sequence[int]
    errors: int

    @property
    def faults(self) -> list[str]:
        return [f"{one.kind} at {one.arrival:.1f} s: {one.fault}" for one in self.ended if one.fault]

    def growth(self, process: str) -> float:
        """Return the bytes by which a process's mean memory grew, from the middle third of the time to the last."""
        third = len(self.samples) // 3
        sizes = [getattr(one, process).anonymous for one in self.samples]
        if not third:
            return 0.0
        return sum(sizes[-third:]) / third - sum(sizes[-2 * third : -third]) / third

    @property
    def device_growth(self) -> int:
        """Return the bytes by which the GPU's memory grew from before the load until after it."""
        return self.device[-1] - self.device[0] if self.device else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rate", type=float, required=True, help="requests per second")
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds of the load")
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds of the same load before the measurement")
    parser.add_argument("--clients", type=int, default=4, help="processes that send the load")
    parser.add_argument("--vocab", type=int, default=128_000, help="prompts have token ids from 256 to below this")
    parser.add_argument("--conversation", type=int, default=2048, help="most tokens of a prompt and its answer")
    parser.add_argument("--serve-options", default="", help="options of `ingot serve`, as one string")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the server may take to start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=Path, help="where to write the samples, as CSV")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "soak_http.log")
    add_json_option(parser)
    options = parser.parse_args()
    soaked = soak(options)
    if options.samples is not None:
        write_samples(options.samples, soaked.samples)
    names = ("rate", "seconds", "warm_up", "clients", "conversation", "serve_options", "seed")
    settings = {"artifact": options.artifact.name, **{name: getattr(options, name) for name in names}}
    report(__file__, options.json, settings, figures(soaked))
    if found := list(failures(soaked)):
        sys.exit("\n".join(found))


def soak(options: argparse.Namespace) -> Soaked:
    port = free_port()
    serving = shlex.split(options.serve_options)
    # All graphs first: a later capture would look like growth.
    command = [*ingot_command(options.artifact, port, caching=True), "--cuda-graphs", "all", *serving]
    with running(command, port, env={}, timeout=options.timeout, log=options.log) as server:
        pids = server.pid, engine_process(server.pid)
        name = model_name(port)
        _load(options, port, name, options.warm_up, "warm-up", pids)
        before, device = _idle(port, pids), [device_memory(pids)]
        ended, samples = _load(options, port, name, options.seconds, "load", pids, device)
        after = _idle(port, pids)
        device.append(device_memory(pids))
    errors = options.log.read_text(encoding="utf-8", errors="replace").count("Traceback (most recent call last)")
    return Soaked(ended, samples, before, after, [one for one in device if one is not None], errors)


def _load(
    options: argparse.Namespace,
    port: int,
    name: str,
    seconds: float,
    seed: str,
    pids: tuple[int, int],
    device: "list[int | None] | None" = None,
) -> tuple[list[Ended], list[Sample]]:
    """Send the load from all clients. Return how each request ended, and the samples until the last arrival. `device`
    gets samples of the GPU's memory."""
    ended: list[Ended] = []
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="ingot-soak-") as folder:
        begin = time.monotonic() + _START_SECONDS
        processes, answers = [], []
        for number in range(options.clients):
            work, answer = Path(folder) / f"{number}.json", Path(folder) / f"{number}.answer.json"
            rate = options.rate / options.clients
            seeded = f"{options.seed} {seed} {number}"
            vocab = (256, options.vocab)
            share = Work(HOST, port, name, begin, rate, seconds, vocab, options.conversation, seeded)
            work.write_text(json.dumps(asdict(share)), encoding="utf-8")
            processes.append(subprocess.Popen([sys.executable, _CLIENT, work, "--json", answer]))
            answers.append(answer)
        while any(process.poll() is None for process in processes):
            time.sleep(1.0)
            if begin <= time.monotonic() <= begin + seconds:
                samples.append(take_sample(port, *pids))
                if device is not None and len(samples) % _DEVICE_SAMPLES == 0:
                    device.append(device_memory(pids))
        if any(process.returncode for process in processes):
            raise ChildError("a client of the soak failed")
        for answer in answers:
            ended += [Ended(**one) for one in json.loads(answer.read_text(encoding="utf-8"))]
    return sorted(ended, key=lambda one: one.arrival), samples


def _idle(port: int, pids: tuple[int, int]) -> Sample:
    """Wait until the server is idle or long enough, and until kept connections are closed. Return its state."""
    end = time.monotonic() + _DRAIN_SECONDS
    while not take_sample(port, *pids).idle and time.monotonic() < end:
        time.sleep(0.5)
    time.sleep(_SETTLE_SECONDS)
    return take_sample(port, *pids)


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    def row(one: Sample) -> dict[str, float]:
        parts = {"server": one.server, "engine": one.engine}
        held = {f"{name}_{field}": value for name, part in parts.items() for field, value in asdict(part).items()}
        return {"second": one.moment, **held, "running": one.running, "waiting": one.waiting, "held": one.held}

    rows = [row(one) for one in samples]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["second"])
        writer.writeheader()
        writer.writerows(rows)


def figures(soaked: Soaked) -> dict[str, Figure]:
    kinds = Counter(one.kind for one in soaked.ended)
    before, after = soaked.before, soaked.after
    what = {
        "stream": "streams read to their end",
        "whole": "answers read in one piece",
        "cancel": "connections closed midway",
        "drop": "connections closed before the answer or in the middle of the request",
        "slow": "clients that read a few bytes a second, then closed",
        "bad": "bodies that the server must refuse",
    }
    most = {
        "running": max((one.running for one in soaked.samples), default=0.0),
        "waiting": max((one.waiting for one in soaked.samples), default=0.0),
    }
    counts = {
        "requests": (len(soaked.ended), "requests that arrived"),
        **{f"requests_{kind}": (kinds[kind], what[kind]) for kind in SHARES},
        "tokens": (sum(one.tokens for one in soaked.ended), "tokens in complete answers"),
        "faults": (len(soaked.faults), "requests that did not end as they had to"),
        "status_5xx": (sum(one.status >= 500 for one in soaked.ended), "answers with a status of 500 or above"),
        "tracebacks": (soaked.errors, "tracebacks in the server's log"),
        "running": (most["running"], "sequences that ran at a time, the most"),
        "waiting": (most["waiting"], "sequences that waited at a time, the most"),
        "held": (after.held, "share of KV pages held at the end"),
        **{
            f"{process}_{field}": (
                getattr(getattr(after, process), field) - getattr(getattr(before, process), field),
                f"more {said} of the {process} process at the end",
            )
            for process in ("server", "engine")
            for field, said in (("fds", "file descriptors"), ("threads", "threads"))
        },
    }
    found = {name: Figure(value=value, unit="", what=said) for name, (value, said) in counts.items()}
    for process in ("server", "engine"):
        said = f"more memory of the {process} process, mean of the last third against the middle third"
        found[f"{process}_memory_growth"] = Figure(value=soaked.growth(process), unit="B", what=said)
        taken = getattr(after, process).anonymous
        found[f"{process}_memory"] = Figure(value=taken, unit="B", what=f"memory of the {process} process at the end")
    if soaked.device:
        said, values = "more memory of the GPU at the end", tuple(soaked.device)
        found["device_memory_growth"] = Figure(value=soaked.device_growth, unit="B", what=said, values=values)
    for name, waits in _waits(soaked.ended).items():
        for percent in (50.0, 99.0):
            said = f"until the first token of a stream, percentile {percent:g}, {name} third"
            found[f"first_p{percent:g}_{name}"] = Figure(value=percentile(waits, percent), unit="s", what=said)
    return found


def _waits(ended: Sequence[Ended]) -> dict[str, list[float]]:
    """Return the seconds to the first token of the streams that arrived in the first and last third of the time."""
    streams = [one for one in ended if one.kind == "stream" and one.first]
    third = max((one.arrival for one in ended), default=0.0) / 3
    first = [one.first for one in streams if one.arrival <= third]
    return {"first": first, "last": [one.first for one in streams if one.arrival > 2 * third]}


def failures(soaked: Soaked) -> Iterator[str]:
    """Yield a message for each failure of the soak."""
    before, after = soaked.before, soaked.after
    yield from soaked.faults[:10]
    if len(soaked.faults) > 10:
        yield f"{len(soaked.faults)} requests did not end as they had to"
    if not any(one.kind in COMPLETE for one in soaked.ended):
        yield "no request was to be completed"
    if worst := [one.status for one in soaked.ended if one.status >= 500]:
        yield f"{len(worst)} answers had a status of 500 or above"
    if soaked.errors:
        yield f"the server's log has {soaked.errors} tracebacks"
    if not after.idle:
        running, waiting, held = after.running, after.waiting, after.held
        yield f"at the end {running:g} sequences run, {waiting:g} wait, and {held:.2%} of the pages are held"
    for process in ("server", "engine"):
        yield from _grown(process, getattr(before, process), getattr(after, process), soaked.growth(process))
    if soaked.device_growth > _ALLOWED_DEVICE:
        yield f"the GPU's memory grew by {soaked.device_growth} bytes"


def _grown(process: str, before: ProcessSample, after: ProcessSample, growth: float) -> Iterator[str]:
    if after.fds > before.fds:
        yield f"the {process} process has {after.fds} open file descriptors at the end, {before.fds} before"
    if after.threads > before.threads:
        yield f"the {process} process has {after.threads} threads at the end, {before.threads} before"
    if growth > _ALLOWED_GROWTH or math.isnan(growth):
        yield f"the {process} process took {growth / 1e6:.1f} MB more in the last third than in the third before"


if __name__ == "__main__":
    main()
