"""Measure servers over HTTP: requests that arrive over time at several rates, many requests at once, and the knee.

    python benchmarks/serve_http.py ARTIFACT [--servers ingot,vllm=FOLDER,sglang=FOLDER --checkpoint CHECKPOINT]
        [--shape 1b] [--rate 16,64,128] [--arrivals 512] [--requests 512] [--direct] [--knee] [--limits 100,5]
        [--seconds 560] [--json FILE]

The load is that of serve.py, from several client processes; their own lag is among the figures. The checkpoint needs a
tokenizer (random_checkpoint.py --tokenizer), because servers detokenize. Servers are measured one after the other with
the same arrivals; NAME=FOLDER names the folder to import a server from, and one name may come with several folders.
Prompts have no common prefix, and prefix caches are off.

`--direct` measures the same load by serve.py too, without a server, and then reports what HTTP adds to Ingot's engine.
`--knee` searches for the highest arrival rate at which 99 % of the requests meet both `--limits`, to within 5 %: the
most milliseconds to the first token, and per further token. `good_RATE` is the share of requests within them at the
rates of `--rate`. The result is written after each server. A server for which no time is left is reported as missing.
"""

import argparse
import importlib.metadata
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine_figures import throughput_figure, waits
from http_load import HttpRun, send
from http_servers import HOST, KINDS, Served, free_port, model_name, running, wait_until_idle
from knee import SHARE, Knee, Probe, find_knee
from peer import environment
from peers import PEERS
from random_checkpoint import FAMILIES, SHAPES
from results import Figure, add_json_option, print_figures, read_result, write_result
from serve_method import Load, add_load_options, load_arguments, load_of, load_settings

from ingot.bench.children import ChildError, run_command
from ingot.bench.metrics import percentile, serve_metrics
from ingot.bench.workload import Lengths, arrival_times, equal_lengths, make_workload, sharegpt_lengths

HERE = Path(__file__).parent
_WARM_UP = (64, 8)  # requests, and output tokens of each, before the load
_LONGEST = 4096  # tokens of a sequence, as in peer_child.py
# Milliseconds to the first token and per further token, and the first rate of a search. A small model is chosen for
# speed: 200 tokens a second for each user. The 8B model should write 67, which is ten times as fast as people read.
_LIMITS = {"1b": "100,5", "8b": "250,15"}
_START_RATES = {"1b": 64.0, "8b": 24.0}
_ANY_LIMITS, _ANY_START = "200,10", 16.0


@dataclass(frozen=True)
class Asked:
    """A server to measure: its kind, and the folder to import it from, or None if it is installed."""

    kind: str
    site: Path | None = None

    @property
    def version(self) -> str:
        """Return the version of its package. Raises ChildError if it is not there."""
        path = {} if self.site is None else {"path": [os.fspath(self.site)]}
        found = [one.version for one in importlib.metadata.distributions(name=self.kind, **path)]
        if not found:
            raise ChildError(f"{self.kind} is not {'installed' if self.site is None else f'in {self.site}'}")
        return found[0]

    @property
    def prefix(self) -> str:
        """Return how the names of its figures begin."""
        return "" if self.kind == "ingot" else PEERS[self.kind].figure(self.version, "")


def main() -> None:
    options = parse_options()
    deadline = time.monotonic() + options.seconds
    load = replace(load_of(options), prompt=(), spread=0, sharing=0)
    figures: dict[str, Figure] = {}
    missing: dict[str, str] = {}
    if options.direct:
        figures |= {f"direct_{name}": one for name, one in _direct(options.artifact, load).items()}
    for number, asked in enumerate(options.servers):
        print(f"{asked.kind}: {deadline - time.monotonic():.0f} s are left", flush=True)
        found: dict[str, Figure] = {}
        try:
            for part in _measured(asked, load, options, deadline):
                found |= {asked.prefix + name: one for name, one in part.items()}
        except ChildError as error:
            missing[f"{asked.kind}_{number}" if asked.kind in missing else asked.kind] = str(error)
            print(f"{asked.kind} was not measured to the end: {error}", flush=True)
        if options.direct and asked.kind == "ingot":
            found |= _added({**figures, **found}, load)
        figures |= found
        print_figures(found)
        _write(options, load, figures, missing)
    _write(options, load, figures, missing)
    if missing:
        sys.exit("\n".join(f"{name}: {reason}" for name, reason in missing.items()))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--servers", type=_servers, default="ingot", help="names, separated by commas; NAME=FOLDER")
    parser.add_argument("--checkpoint", type=Path, help="what other servers serve")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"), help="weights of other servers")
    parser.add_argument("--shape", choices=(*SHAPES, *FAMILIES), help="the model's shape, which sets the next options")
    parser.add_argument("--limits", type=_limits, help="milliseconds: first token, each further token")
    parser.add_argument("--start-rate", type=float, help="the first rate of the search for the knee")
    parser.add_argument("--vocab", type=int, default=128_000, help="prompts have token ids from 256 to below this")
    parser.add_argument("--clients", type=int, default=4, help="processes that send the load")
    parser.add_argument("--direct", action="store_true", help="measure the engine without a server too")
    parser.add_argument("--knee", action="store_true", help="search for the knee of each server")
    parser.add_argument("--knee-seconds", type=float, default=90.0, help="seconds for the search, at most")
    parser.add_argument("--probe-seconds", type=float, default=6.0, help="seconds of arrivals at a rate of the search")
    parser.add_argument("--probe-least", type=int, default=256, help="arrivals at a rate of the search, at least")
    parser.add_argument("--seconds", type=float, default=math.inf, help="seconds for all servers together")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a server may take to start")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds to capture CUDA graphs in, before the load")
    parser.add_argument("--caches", type=Path, help="folder of the other servers' compiler caches, kept afterwards")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder for the servers' output")
    add_load_options(parser)
    add_json_option(parser)
    options = parser.parse_args()
    options.limits = options.limits or _limits(_LIMITS.get(options.shape, _ANY_LIMITS))
    options.start_rate = options.start_rate or _START_RATES.get(options.shape, _ANY_START)
    return options


def _servers(text: str) -> list[Asked]:
    found = []
    for one in text.split(","):
        kind, _, site = one.partition("=")
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{kind!r}: choose from {', '.join(KINDS)}")
        found.append(Asked(kind, Path(site).resolve() if site else None))
    return found


def _limits(text: str) -> tuple[float, float]:
    first, further = map(float, text.split(","))
    return first, further


def _write(options: argparse.Namespace, load: Load, figures: Mapping[str, Figure], missing: Mapping[str, str]) -> None:
    if options.json is None:
        return
    names = ("clients", "load_format", "direct", "knee", "start_rate", "probe_seconds", "probe_least")
    settings = {
        "artifact": options.artifact.name,
        **({"shape": options.shape} if options.shape else {}),
        "servers": ",".join(one.kind for one in options.servers),
        "limits": "{:g},{:g}".format(*options.limits),
        **{name: getattr(options, name) for name in names},
        **load_settings(load),
    }
    write_result(__file__, options.json.stem, settings, figures, folder=options.json.parent, missing=missing)


def _direct(artifact: Path, load: Load) -> dict[str, Figure]:
    """Return the figures of serve.py for the same load."""
    with tempfile.TemporaryDirectory(prefix="ingot-direct-") as folder:
        found = Path(folder) / "found.json"
        run_command([sys.executable, HERE / "serve.py", artifact, *load_arguments(load), "--json", found])
        return read_result(found).figures


def _measured(asked: Asked, load: Load, options: argparse.Namespace, deadline: float) -> Iterator[dict[str, Figure]]:
    """Start a server, send the parts of the load to it, and yield the figures of each.

    Raises ChildError if the server fails, or if no time is left.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise ChildError("no time was left")
    port, kind = free_port(), KINDS[asked.kind]
    served = Served(options.artifact, options.checkpoint, max(_LONGEST, load.longest), options.load_format)
    env = dict(kind.settings)
    if asked.kind != "ingot":
        caches = options.caches or Path(tempfile.mkdtemp(prefix="ingot-caches-"))
        env |= environment(PEERS[asked.kind], asked.site, caches / f"{asked.kind}-{asked.version}")
    log = options.logs / f"serve_http_{asked.prefix or 'ingot_'}{options.shape or 'model'}.log"
    with running(kind.command(served, port), port, env=env, timeout=min(options.timeout, left), log=log) as server:
        yield {"start": Figure(value=server.seconds, unit="s", what="from the server's start to its first answer")}
        time.sleep(options.settle)
        target = Target(asked, port, model_name(port), options)
        yield from target.loads(load)
        if options.knee:
            yield target.knee(load, deadline)
        yield target.lag_figures()


class Target:
    """A server that runs, and the load that is sent to it."""

    def __init__(self, asked: Asked, port: int, name: str, options: argparse.Namespace) -> None:
        self._asked, self._port, self._name, self._options = asked, port, name, options
        self._tokens = range(256, options.vocab)
        self._lags: list[float] = []

    def loads(self, load: Load) -> Iterator[dict[str, Figure]]:
        """Send the requests that arrive over time, and those that arrive at once. Yield the figures of each."""
        lengths = sharegpt_lengths(load.arrivals, 0, load.conversation)
        for rate in load.rate if load.arrivals else ():
            done = self._drive(f"arrivals at {rate:g}", lengths, arrival_times(load.arrivals, rate, 1.0, 0))
            asked = f"{load.arrivals} requests like ShareGPT's, {rate:g} of them a second"
            yield {**dict(waits(f"arrivals_{rate:g}", done.run, asked)), f"good_{rate:g}": self._good(done)}
        if load.requests:
            what = f"{load.requests} requests of {load.input} tokens in and {load.output} out, given at once"
            done = self._drive("requests", equal_lengths(load.requests, load.input, load.output), None)
            yield {"throughput": throughput_figure(done.run, what)}

    def knee(self, load: Load, deadline: float) -> dict[str, Figure]:
        """Search for the knee. Return the figures."""
        options = self._options
        self._warm_up("knee", sharegpt_lengths(_WARM_UP[0], 0, load.conversation))
        seconds = min(options.knee_seconds, deadline - time.monotonic())
        found = find_knee(lambda rate: self._probe(load, rate), options.start_rate, seconds=seconds)
        return dict(self._knee_figures(found))

    def lag_figures(self) -> dict[str, Figure]:
        return {
            f"client_lag_p{percent:g}": Figure(
                value=percentile(self._lags, percent),
                unit="s",
                what=f"delay of the clients' event loops, percentile {percent:g}",
            )
            for percent in (50.0, 99.0)
        }

    def _probe(self, load: Load, rate: float) -> Probe:
        """Load the server at a rate, until its end or until too many requests have exceeded the limits."""
        options = self._options
        begin = time.monotonic()
        count = max(options.probe_least, round(rate * options.probe_seconds))
        lengths = sharegpt_lengths(count, 0, load.conversation)
        times = arrival_times(count, rate, 1.0, 0)
        requests = make_workload(lengths, self._tokens, f"knee at {rate:g}", arrivals=times)
        first, further = (one / 1e3 for one in options.limits)
        failed = math.floor(count * (1 - SHARE) + 1e-9)
        done = send(HOST, self._port, self._name, requests, options.clients, most=(first, further), failed=failed)
        wait_until_idle(KINDS[self._asked.kind], self._port)
        assert done.exceeded is not None
        self._lags.extend(done.lags)
        probe = Probe(rate, 1 - done.exceeded / count, any(one.error for one in done.run.records))
        said = "at most " if probe.ended_early else ""
        took = f"{count} requests, {time.monotonic() - begin:.1f} s"
        print(f"  {rate:.4g} a second: {said}{probe.good:.2%} are good ({took})", flush=True)
        return probe

    def _knee_figures(self, found: Knee) -> "list[tuple[str, Figure]]":
        first, further = self._options.limits
        within = f"{first:g} ms to the first token and {further:g} ms a token after"
        what = f"the highest rate at which {SHARE:.0%} of the requests take at most {within}"
        figures = [("knee", Figure(value=found.rate, unit="requests/s", what=what))]
        if found.failed < math.inf:
            what = "the lowest rate at which fewer do"
            figures.append(("knee_failed", Figure(value=found.failed, unit="requests/s", what=what)))
        values = tuple(one.rate for one in found.probes)
        tried = "rates tried" if found.complete else "rates tried until the time was up"
        figures.append(("knee_probes", Figure(value=len(values), unit="", what=tried, values=values)))
        shares = tuple(one.good for one in found.probes)
        what = "the least share of good requests at these rates; of a load that was ended early, the most possible"
        return [*figures, ("knee_shares", Figure(value=min(shares, default=0.0), unit="", what=what, values=shares))]

    def _drive(self, seed: str, lengths: Sequence[Lengths], arrivals: Sequence[float] | None) -> HttpRun:
        self._warm_up(seed, lengths)
        workload = make_workload(lengths, self._tokens, seed, arrivals=arrivals)
        done = send(HOST, self._port, self._name, workload, self._options.clients)
        self._lags.extend(done.lags)
        failed = [one.error for one in done.run.records if one.error]
        if failed:
            raise ChildError(f"{len(failed)} of {len(lengths)} requests failed: {failed[0]}")
        return done

    def _warm_up(self, seed: str, lengths: Sequence[Lengths]) -> None:
        few, most = _WARM_UP
        short = [Lengths(one.prompt, min(one.output, most)) for one in lengths[:few]]
        send(HOST, self._port, self._name, make_workload(short, self._tokens, f"before {seed}"), self._options.clients)

    def _good(self, done: HttpRun) -> Figure:
        first, further = self._options.limits
        run = done.run
        good = serve_metrics(run, goodput={"ttft": first, "tpot": further})["request_goodput"] * run.duration
        what = f"share of requests with at most {first:g} ms to the first token and {further:g} ms a token after"
        return Figure(value=good / len(run.records), unit="", what=what)


def _added(figures: Mapping[str, Figure], load: Load) -> dict[str, Figure]:
    """Return what HTTP adds: seconds until the first token, and the ratio of the times per further token."""
    found = {}
    for rate in load.rate if load.arrivals else ():
        if f"arrivals_{rate:g}_ttft" not in figures:
            continue  # the server failed before
        for which in ("p50", "p99"):
            name = f"arrivals_{rate:g}_ttft_{which}"
            more = figures[name].value - figures[f"direct_{name}"].value
            found[f"added_{rate:g}_ttft_{which}"] = Figure(value=more, unit="s", what=f"HTTP, {which}, adds")
            name = f"arrivals_{rate:g}_tpot_{which}"
            ratio = figures[name].value / figures[f"direct_{name}"].value
            found[f"ratio_{rate:g}_tpot_{which}"] = Figure(value=ratio, unit="", what=f"HTTP over direct, {which}")
    return found


if __name__ == "__main__":
    main()
