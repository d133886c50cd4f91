"""`ingot bench serve-sim`: measure latencies of requests that arrive over time, without a server."""

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from ingot.cli.commands import ArtifactFolder, Flag, Variant
from ingot.cli.commands.bench import options, tell
from ingot.cli.commands.bench.requests import SPREAD, SpreadRequests
from ingot.cli.commands.bench.served import serve
from ingot.ir.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between tokens",
    "e2el": "end to end",
}


def bench_serve_sim(
    artifact: ArtifactFolder,
    /,
    *,
    requests: SpreadRequests = SPREAD,
    request_rate: float = float("inf"),
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    goodput: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative="", show_default=False)] = (),
    metric_percentiles: str = "99",
    save_detailed: Flag = False,
    variant: Variant = None,
    json: options.JsonFile = None,
) -> None:
    """Measure the token latencies of requests that arrive over time. The engine runs in this process.

    Prompts are random token ids. Outputs are greedy and ignore the end tokens. Times begin when a request arrives. With
    --max-concurrency, they begin when it is admitted. Ctrl-C stops the measurement and reports what was measured so
    far.

    Parameters
    ----------
    request_rate
        Requests that arrive per second, or inf for all at once.
    burstiness
        1 is a Poisson process. Below 1, arrivals come in bursts. Above 1, they are more even.
    max_concurrency
        Maximum requests that are admitted at a time. The others wait. Default: all.
    goodput
        Limits in milliseconds, as in ttft:200 tpot:50 e2el:5000. Goodput is the number of requests per second that meet
        all limits.
    metric_percentiles
        Percentiles to report, as in "50,90,99".
    save_detailed
        Also write the lengths and times of each request into the JSON.
    json
        Also write the result to this file. "-" writes only the result to stdout. Its fields are those of `vllm bench
        serve`.
    """
    requests.check()
    options.at_least(1, max_concurrency=max_concurrency)
    options.positive(request_rate=request_rate, burstiness=burstiness)
    slos, percentiles = _slos(goodput), _percentiles(metric_percentiles)
    options.check_file(json)
    from ingot.bench.answer import answer
    from ingot.bench.metrics import detail, serve_metrics
    from ingot.bench.workload import arrival_times
    from ingot.runtime.loading.artifact import open_artifact

    opened = open_artifact(artifact, verify=False, variant=variant)
    lengths = requests.lengths(opened)
    arrivals = arrival_times(requests.num_prompts, request_rate, burstiness, requests.seed)
    run, steps = serve(
        opened,
        lengths,
        prefix_len=requests.prefix_len,
        seed=requests.seed,
        stream=True,
        arrivals=arrivals,
        max_concurrency=max_concurrency,
    )
    metrics = serve_metrics(run, goodput=slos, percentiles=percentiles)
    asked = {
        **requests.asked(),
        "request_rate": request_rate,
        "burstiness": burstiness,
        "max_concurrency": max_concurrency,
        "interrupted": run.interrupted,
    }
    found = {**metrics, "steps": steps, **(detail(run) if save_detailed else {})}
    title = f"{requests.dataset}, {request_rate:g} requests/s"
    rows = [*_rows(metrics, percentiles), *tell.step_rows(steps)]
    tell.report(json, answer(opened, asked, found), title, rows)
    if run.interrupted:
        raise KeyboardInterrupt


def _rows(metrics: "Mapping[str, Any]", percentiles: "Sequence[float]") -> "Iterator[tuple[str, str]]":
    failed = f", {metrics['failed']:,} failed" if metrics["failed"] else ""
    yield "requests", f"{metrics['completed']:,} in {tell.seconds(metrics['duration'])}{failed}"
    yield "throughput", tell.per_second(metrics["request_throughput"], "requests")
    yield "", tell.per_second(metrics["output_throughput"], "tokens", ", out alone")
    yield "", tell.per_second(metrics["total_token_throughput"], "tokens", ", in and out")
    if metrics["request_goodput"] is not None:
        yield "goodput", tell.per_second(metrics["request_goodput"], "requests")
    for metric, name in _NAMES.items():
        parts = [("mean", f"mean_{metric}_ms"), ("median", f"median_{metric}_ms")]
        parts += [(f"{percent:g} %", f"p{percent:g}_{metric}_ms") for percent in percentiles]
        yield name, ", ".join(f"{part} {tell.milliseconds(metrics[field])}" for part, field in parts)


def _slos(texts: "Sequence[str]") -> dict[str, float]:
    """Parse the values of --goodput, such as "ttft:200". Return the limits in milliseconds, by metric.

    Raises OptionError for a malformed value.
    """
    from ingot.bench.metrics import SLOS

    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        limit = _number(value)
        if name not in SLOS or name in found or limit is None or limit <= 0:
            expected = f"{', '.join(f'{one}:MILLISECONDS' for one in SLOS)}, each at most once"
            raise OptionError(f"--goodput is '{text[:40]}'", expected=expected)
        found[name] = limit
    return found


def _percentiles(text: str) -> list[float]:
    found = [_number(part) for part in text.split(",")]
    if any(one is None or not 0 <= one <= 100 for one in found):
        raise OptionError(f"--metric-percentiles is '{text[:40]}'", expected="numbers from 0 to 100, as in 50,90,99")
    return [one for one in found if one is not None]


def _number(text: str) -> float | None:
    """Parse a number. Return None if the text is not a number, or is NaN."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value else None
