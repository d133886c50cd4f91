"""Send a workload to an OpenAI server from several processes, and record it as `drive` records an engine."""

import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from http_client import Limits, Seen, Share

from ingot.bench.children import ChildError
from ingot.bench.drive import Record, Run
from ingot.bench.workload import BenchRequest

_CLIENT = Path(__file__).with_name("http_client.py")
_START_SECONDS = 1.0  # for the clients to start and read their shares
_PATH = "/v1/completions"
# Each client then has a core of its own, beside the server, the engine and the engine's threads.
_POLLING_CORES = 12
_COUNT_BYTES = 4  # of a client's count in the shared file


@dataclass(frozen=True)
class HttpRun:
    """The record of a workload, and the lags of all clients' event loops, in seconds.

    `exceeded` is how many requests failed or exceeded the limits of latency, as far as the clients have counted; None
    without limits.
    """

    run: Run
    lags: tuple[float, ...]
    exceeded: int | None = None


def send(
    host: str,
    port: int,
    model: str,
    requests: Sequence[BenchRequest],
    clients: int,
    *,
    most: tuple[float, float] | None = None,
    failed: int = 0,
) -> HttpRun:
    """Send `requests` to the server at `host`:`port` as streamed completions of `model`, from `clients` processes.

    Request i goes to client i % clients. `most` has limits of latency: the most seconds to the first token, and the
    most seconds per further token. With limits, the load ends early once more than `failed` requests have exceeded one;
    requests that run then get an error. Raises ChildError if a client fails.
    """
    with tempfile.TemporaryDirectory(prefix="ingot-http-") as folder:
        counts = Path(folder) / "counts"
        counts.write_bytes(bytes(_COUNT_BYTES * clients))
        limits = None if most is None else Limits(*most, failed, str(counts))
        begin = time.monotonic() + _START_SECONDS
        processes, answers = [], []
        for number in range(clients):
            work, answer = Path(folder) / f"{number}.json", Path(folder) / f"{number}.answer.json"
            own = [(index, one.arrival, _body(model, one)) for index, one in enumerate(requests)][number::clients]
            share = Share(host, port, _PATH, begin, own, number, limits, polls=_cores() >= _POLLING_CORES)
            work.write_text(json.dumps(asdict(share)), encoding="utf-8")
            processes.append(subprocess.Popen([sys.executable, _CLIENT, work, "--json", answer]))
            answers.append(answer)
        if any([process.wait() for process in processes]):
            raise ChildError("a client of the load failed")
        found = [json.loads(answer.read_text(encoding="utf-8")) for answer in answers]
        words = struct.iter_unpack("=I", counts.read_bytes())
        exceeded = None if limits is None else sum(word for (word,) in words)
    seen = {one["index"]: Seen(**one) for answer in found for one in answer["seen"]}
    none = Seen(-1, 0.0, error="the load ended early")
    records = tuple(_record(request, seen.get(index, none)) for index, request in enumerate(requests))
    last = max((one.token_times[-1] for one in records if one.token_times), default=0.0)
    return HttpRun(Run(records, last), tuple(lag for answer in found for lag in answer["lags"]), exceeded)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _body(model: str, request: BenchRequest) -> str:
    fields = {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields, separators=(",", ":"))


def _record(request: BenchRequest, seen: Seen) -> Record:
    """Return the record of a request. A time counts from the arrival that the workload says, not from the sending.

    Some events have several tokens, and do not say how many: the events' times are then spread evenly over the tokens.
    The first and the last token have the times of the first and the last event.
    """
    tokens, events = seen.tokens, seen.events
    if seen.error or not events:
        return Record(request, request.arrival, [], True, seen.error or "no event has arrived")
    most = max(tokens - 1, 1)
    times = [events[token * (len(events) - 1) // most] for token in range(tokens)]
    return Record(request, request.arrival, times, True)
