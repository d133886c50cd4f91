"""The part of docs/benchmarks.md that compares servers over HTTP: a table for each question."""

import re
from collections.abc import Iterator, Mapping, Sequence

from gpu_page import Engine, cell_of, device_of, engines_of, label_of, missing, provenance, shown
from markdown_table import table
from natural_order import natural_order
from results import Result

HEAD = """\
Several client processes send requests as streamed completions to a server on the same machine. Prompts are token ids,
prefix caches are off, and servers detokenize. Lengths are like ShareGPT's, unless a table says otherwise. Cells of
other servers end with how many times better Ingot is. `python benchmarks/serve_http.py --help` describes the loads.
"""
KNEE = """\
The knee is the highest arrival rate at which 99 % of the requests meet both limits, to within 5 %. The limits are the
longest time to the first token, and the mean time per further token of a request.
"""
AT_ONCE = "Output tokens per second of {requests}.\n"
ADDED = """\
The same arrivals go to the engine in a process of its own, without a server, and to Ingot's server over HTTP. Times
count from the arrival. "Adds" is the difference for the first token, and the ratio for further tokens.
"""
ARRIVALS = "The times of the requests, and the share of them within the limits of the knee.\n"
_WAITS = {
    "ttft_p50": "first token, p50",
    "ttft_p99": "first token, p99",
    "tpot_p50": "later tokens, p50",
    "tpot_p99": "later tokens, p99",
}


def is_http(result: Result) -> bool:
    """Return whether a result is one of serve_http.py's of a published shape."""
    return result.script == "serve_http.py" and "shape" in result.settings


def http_sections(results: Sequence[Result]) -> Iterator[str]:
    """Yield the sections of all results of one machine, as lines."""
    yield f"## Servers over HTTP on {device_of(results[0])}\n"
    yield HEAD
    yield from _knees(results)
    yield from _at_once(results)
    yield from _added(results)
    yield from _arrivals(results)
    for result in results:
        yield from missing(result)
        yield f"- {label_of(result)} ({result.name}): {provenance(result)}"
    yield ""


def _knees(results: Sequence[Result]) -> Iterator[str]:
    rows = [
        [label_of(result), _limits(result), *_cells(result, engine, ("knee", "knee_failed"))]
        for result in results
        for engine in engines_of(result)
        if engine.figure("knee")
    ]
    if rows:
        yield "### At which arrival rate do requests still meet limits?\n"
        yield KNEE
        yield from table(("model", "limits", "server", "knee", "lowest rate that failed"), rows)
        yield ""


def _at_once(results: Sequence[Result]) -> Iterator[str]:
    having = [result for result in results if "throughput" in result.figures]
    rows = [
        [label_of(result), *_cells(result, engine, ("throughput", "start"))]
        for result in having
        for engine in engines_of(result)
        if engine.figure("throughput")
    ]
    if rows:
        yield "### How many tokens per second when many requests arrive at once?\n"
        yield AT_ONCE.format(requests=having[0].figures["throughput"].what)
        yield from table(("model", "server", "output", "start of the server"), rows)
        yield ""


def _added(results: Sequence[Result]) -> Iterator[str]:
    rows = []
    for result in results:
        direct = Engine("", "direct_", result.figures)
        for rate in _rates(result.figures):
            added = [f"{kind}_{rate}_{name}" for kind, name in _pairs()]
            if not all(name in result.figures for name in added):
                continue
            for name, extra in zip(_WAITS, added, strict=True):
                without, whole = direct.figure(f"arrivals_{rate}_{name}"), result.figures[f"arrivals_{rate}_{name}"]
                figure = result.figures[extra]
                more = shown(figure) if figure.unit else f"{figure.value:.3g} ×"
                before = shown(without) if without else "–"
                rows.append([label_of(result), rate, _WAITS[name], before, shown(whole), more])
    if rows:
        yield "### What does HTTP add to the engine?\n"
        yield ADDED
        yield from table(("model", "requests/s", "time", "engine", "over HTTP", "adds"), rows)
        yield ""


def _arrivals(results: Sequence[Result]) -> Iterator[str]:
    rows = []
    for result in results:
        servers = [one for one in engines_of(result) if one.figure("start")]
        if len(servers) < 2:
            continue
        for rate in _rates(result.figures):
            names = [f"arrivals_{rate}_{name}" for name in _WAITS]
            for engine in servers:
                good = engine.figure(f"good_{rate}")
                if good is not None:
                    rows.append([label_of(result), rate, *_cells(result, engine, names), f"{good.value:.1%}"])
    if rows:
        yield "### How long do requests wait over HTTP?\n"
        yield ARRIVALS
        yield from table(("model", "requests/s", "server", *_WAITS.values(), "within the limits"), rows)
        yield ""


def _cells(result: Result, engine: Engine, names: Sequence[str]) -> list[str]:
    return [engine.title, *(cell_of(engine, name, result.figures.get(name)) for name in names)]


def _limits(result: Result) -> str:
    first, further = str(result.settings["limits"]).split(",")
    return f"{first} ms, {further} ms a token"


def _pairs() -> Iterator[tuple[str, str]]:
    yield from (("added" if name.startswith("ttft") else "ratio", name) for name in _WAITS)


def _rates(figures: Mapping[str, object]) -> list[str]:
    found = (re.fullmatch(r"arrivals_([0-9.]+)_ttft", name) for name in natural_order(figures))
    return [one[1] for one in found if one]
