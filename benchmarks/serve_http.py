"""Measure a server over HTTP: requests that arrive over time at several rates, and many requests at once.

    python benchmarks/serve_http.py ARTIFACT [--rate 16,64,128] [--arrivals 512] [--requests 512] [--clients 4]
        [--direct] [--peer vllm --checkpoint CHECKPOINT [--site FOLDER]] [--limits 200,10] [--json FILE]

The load is that of serve.py, from several client processes; their own lag is among the figures. The checkpoint needs a
tokenizer (random_checkpoint.py --tokenizer), because servers detokenize. `--direct` measures the same load by serve.py
too, without a server, and then reports what HTTP adds. `--peer` measures another server on the same load in place of
Ingot's. `--limits` are the most milliseconds to the first token and per further token that a good request may take:
`good_RATE` is the share of good requests. Prompts have no common prefix, and prefix caches are off.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine_figures import throughput_figure, waits
from http_load import HttpRun, send
from http_servers import HOST, free_port, ingot_command, model_name, running, vllm_command
from peer import environment
from peers import PEERS
from results import Figure, add_json_option, read_result, report
from serve_method import Load, add_load_options, load_arguments, load_of, load_settings
from vllm_child import SETTINGS as VLLM_SETTINGS

from ingot.bench.children import run_command
from ingot.bench.metrics import percentile, serve_metrics
from ingot.bench.workload import Lengths, arrival_times, equal_lengths, make_workload, sharegpt_lengths

HERE = Path(__file__).parent
_WARM_UP = (64, 8)  # requests, and output tokens of each, before the load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--vocab", type=int, default=128_000, help="prompts have token ids from 256 to below this")
    parser.add_argument("--clients", type=int, default=4, help="processes that send the load")
    parser.add_argument("--direct", action="store_true", help="measure the engine without a server too")
    parser.add_argument("--peer", choices=("vllm",), help="measure this server instead")
    parser.add_argument("--checkpoint", type=Path, help="what the peer serves")
    parser.add_argument("--site", type=Path, help="folder to import the peer from")
    parser.add_argument("--limits", default="200,10", help="milliseconds: first token, each further token")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the server may take to start")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds to capture CUDA graphs in, before the load")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "serve_http.log")
    add_load_options(parser)
    add_json_option(parser)
    options = parser.parse_args()
    load = replace(load_of(options), prompt=(), spread=0, sharing=0)
    figures: dict[str, Figure] = {}
    if options.direct:
        figures |= {f"direct_{name}": one for name, one in _direct(options.artifact, load).items()}
    port = free_port()
    if options.peer is None:
        command, env = ingot_command(options.artifact, port), {}
    else:
        if options.checkpoint is None:
            sys.exit("--peer needs --checkpoint")
        command = vllm_command(options.checkpoint.resolve(), port, load.longest)
        env = {**VLLM_SETTINGS, **environment(PEERS["vllm"], options.site, Path(tempfile.mkdtemp()))}
    with running(command, port, env=env, timeout=options.timeout, log=options.log) as server:
        figures["start"] = Figure(value=server.seconds, unit="s", what="from the server's start to its first answer")
        time.sleep(options.settle)
        figures |= _served(port, load, options)
    if options.direct:
        figures |= dict(_added(figures, load))
    settings = {"artifact": options.artifact.name, "clients": options.clients, "peer": options.peer or "none"}
    report(options.json, {**settings, "limits": options.limits, **load_settings(load)}, figures)


def _direct(artifact: Path, load: Load) -> dict[str, Figure]:
    """Return the figures of serve.py for the same load."""
    with tempfile.TemporaryDirectory(prefix="ingot-direct-") as folder:
        found = Path(folder) / "found.json"
        run_command([sys.executable, HERE / "serve.py", artifact, *load_arguments(load), "--json", found])
        return read_result(found).figures


def _served(port: int, load: Load, options: argparse.Namespace) -> dict[str, Figure]:
    """Send all parts of the load to the server, and return their figures."""
    name, tokens = model_name(port), range(256, options.vocab)
    found: dict[str, Figure] = {}
    lags: list[float] = []

    def drive(seed: str, lengths: Sequence[Lengths], arrivals: Sequence[float] | None) -> HttpRun:
        few, most = _WARM_UP
        short = [Lengths(one.prompt, min(one.output, most)) for one in lengths[:few]]
        send(HOST, port, name, make_workload(short, tokens, f"before {seed}"), options.clients)
        done = send(HOST, port, name, make_workload(lengths, tokens, seed, arrivals=arrivals), options.clients)
        lags.extend(done.lags)
        failed = [one.error for one in done.run.records if one.error]
        if failed:
            sys.exit(f"{len(failed)} of {len(lengths)} requests failed: {failed[0]}")
        return done

    lengths = sharegpt_lengths(load.arrivals, 0, load.conversation)
    for rate in load.rate if load.arrivals else ():
        done = drive(f"arrivals at {rate:g}", lengths, arrival_times(load.arrivals, rate, 1.0, 0))
        asked = f"{load.arrivals} requests like ShareGPT's, {rate:g} of them a second"
        found |= waits(f"arrivals_{rate:g}", done.run, asked)
        found[f"good_{rate:g}"] = _good(done, options.limits)
    if load.requests:
        what = f"{load.requests} requests of {load.input} tokens in and {load.output} out, given at once"
        done = drive("requests", equal_lengths(load.requests, load.input, load.output), None)
        found["throughput"] = throughput_figure(done.run, what)
    for percent in (50.0, 99.0):
        what = f"delay of the clients' event loops, percentile {percent:g}"
        found[f"client_lag_p{percent:g}"] = Figure(value=percentile(lags, percent), unit="s", what=what)
    return found


def _good(done: HttpRun, limits: str) -> Figure:
    first, further = map(float, limits.split(","))
    run = done.run
    good = serve_metrics(run, goodput={"ttft": first, "tpot": further})["request_goodput"] * run.duration
    what = f"share of requests with at most {first:g} ms to the first token and {further:g} ms a token after"
    return Figure(value=good / len(run.records), unit="", what=what)


def _added(figures: dict[str, Figure], load: Load) -> "list[tuple[str, Figure]]":
    """Return what HTTP adds: seconds until the first token, and the ratio of the times per further token."""
    found = []
    for rate in load.rate:
        for which in ("p50", "p99"):
            name = f"arrivals_{rate:g}_ttft_{which}"
            more = figures[name].value - figures[f"direct_{name}"].value
            found.append((f"added_{rate:g}_ttft_{which}", Figure(value=more, unit="s", what=f"HTTP, {which}, adds")))
            name = f"arrivals_{rate:g}_tpot_{which}"
            ratio = figures[name].value / figures[f"direct_{name}"].value
            found.append(
                (f"ratio_{rate:g}_tpot_{which}", Figure(value=ratio, unit="", what=f"HTTP over direct, {which}"))
            )
    return found


if __name__ == "__main__":
    main()
