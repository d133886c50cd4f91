"""Send a workload to an OpenAI server from several processes, and record it as `drive` records an engine."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from http_client import Seen, Share

from ingot.bench.children import ChildError
from ingot.bench.drive import Record, Run
from ingot.bench.workload import BenchRequest

_CLIENT = Path(__file__).with_name("http_client.py")
_START_SECONDS = 1.0  # for the clients to start and read their shares
_PATH = "/v1/completions"


@dataclass(frozen=True)
class HttpRun:
    """The record of a workload, and the lags of all clients' event loops, in seconds."""

    run: Run
    lags: tuple[float, ...]


def send(host: str, port: int, model: str, requests: Sequence[BenchRequest], clients: int) -> HttpRun:
    """Send `requests` to the server at `host`:`port` as streamed completions of `model`, from `clients` processes.

    Request i goes to client i % clients. Raises ChildError if a client fails.
    """
    with tempfile.TemporaryDirectory(prefix="ingot-http-") as folder:
        begin = time.monotonic() + _START_SECONDS
        processes, answers = [], []
        for number in range(clients):
            work, answer = Path(folder) / f"{number}.json", Path(folder) / f"{number}.answer.json"
            own = [(index, one.arrival, _body(model, one)) for index, one in enumerate(requests)][number::clients]
            work.write_text(json.dumps(asdict(Share(host, port, _PATH, begin, own))), encoding="utf-8")
            processes.append(subprocess.Popen([sys.executable, _CLIENT, work, "--json", answer]))
            answers.append(answer)
        if any([process.wait() for process in processes]):
            raise ChildError("a client of the load failed")
        found = [json.loads(answer.read_text(encoding="utf-8")) for answer in answers]
    seen = sorted((Seen(**one) for answer in found for one in answer["seen"]), key=lambda one: one.index)
    records = tuple(_record(request, one) for request, one in zip(requests, seen, strict=True))
    last = max((one.token_times[-1] for one in records if one.token_times), default=0.0)
    return HttpRun(Run(records, last), tuple(lag for answer in found for lag in answer["lags"]))


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
