"""Compute the results of a run, under the field names of `vllm bench`."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.bench.drive import Record, Run

# Percentiles of latencies, as in `vllm bench latency`.
LATENCY_PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)
# The metrics of a request, in seconds: time to first token, time per output token after the first one, inter-token
# latency, and end-to-end latency.
METRICS = ("ttft", "tpot", "itl", "e2el")
SLOS = ("ttft", "tpot", "e2el")  # metrics with one value per request, which can have a limit


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of `values`, for `percent` from 0 to 100. It is 0 for no values, as in vLLM.

    It is interpolated between the two nearest values, as in numpy.
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def latency_metrics(latencies: Sequence[float]) -> dict[str, Any]:
    """Return the result fields of `vllm bench latency`. `latencies` has the seconds of each measured batch."""
    return {
        "avg_latency": statistics.fmean(latencies),
        "std_latency": statistics.pstdev(latencies),
        "latencies": list(latencies),
        "percentiles": {f"{percent:g}": percentile(latencies, percent) for percent in LATENCY_PERCENTILES},
    }


def throughput_metrics(run: Run) -> dict[str, Any]:
    """Return the result fields of `vllm bench throughput`, for requests submitted at once.

    It adds two fields for output tokens: `total_output_tokens` and `output_tokens_per_second`.
    """
    inputs, outputs = _tokens(run.completed)
    done = len(run.completed)
    return {
        "elapsed_time": run.duration,
        "num_requests": done,
        "total_num_tokens": inputs + outputs,
        "total_output_tokens": outputs,
        "requests_per_second": done / run.duration,
        "tokens_per_second": (inputs + outputs) / run.duration,
        "output_tokens_per_second": outputs / run.duration,
    }


def serve_metrics(
    run: Run, *, goodput: Mapping[str, float] | None = None, percentiles: Sequence[float] = (99.0,)
) -> dict[str, Any]:
    """Return the result fields of `vllm bench serve`, for requests that arrived over time.

    `goodput` maps metrics, such as "ttft", to limits in milliseconds. A request is good if it meets all limits. If
    `goodput` is None, the field `request_goodput` is None. `percentiles` are the percentiles to report, from 0 to 100.
    """
    done = run.completed
    inputs, outputs = _tokens(done)
    values = {metric: [value for one in done for value in _of(one, metric)] for metric in METRICS}
    return {
        "duration": run.duration,
        "completed": len(done),
        "failed": sum(1 for one in run.records if one.error),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / run.duration,
        "request_goodput": _goodput(done, goodput) / run.duration if goodput else None,
        "output_throughput": outputs / run.duration,
        "total_token_throughput": (inputs + outputs) / run.duration,
        "max_output_tokens_per_s": _most_tokens_in_a_second(done),
        "max_concurrent_requests": _most_at_once(done),
        **{name: value for metric in METRICS for name, value in _summary(metric, values[metric], percentiles)},
    }


def detail(run: Run) -> dict[str, Any]:
    """Return the fields that `vllm bench serve --save-detailed` adds, each a list with a value per request.

    They are the numbers of tokens, the errors, and times in seconds.
    """
    return {
        "input_lens": [len(one.request.prompt) for one in run.records],
        "output_lens": [len(one.token_times) if one.completed else 0 for one in run.records],
        "start_times": [one.started for one in run.records],
        "ttfts": [_first(one) if one.token_times else 0.0 for one in run.records],
        "itls": [_gaps(one) for one in run.records],
        "errors": [one.error for one in run.records],
    }


def _tokens(records: Sequence[Record]) -> tuple[int, int]:
    """Return (number of prompt tokens, number of generated tokens) of all requests together."""
    return sum(len(one.request.prompt) for one in records), sum(len(one.token_times) for one in records)


def _of(record: Record, metric: str) -> Sequence[float]:
    """Return the values of a metric for one request, in seconds. `metric` is "ttft", "tpot", "itl" or "e2el".

    The result is empty if the metric needs two output tokens and the request has one.
    """
    match metric:
        case "ttft":
            return (_first(record),)
        case "tpot":
            return (_per_token(record),) if len(record.token_times) > 1 else ()
        case "itl":
            return _gaps(record)
        case _:
            return (record.token_times[-1] - record.started,)


def _first(record: Record) -> float:
    return record.token_times[0] - record.started


def _per_token(record: Record) -> float:
    times = record.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def _gaps(record: Record) -> list[float]:
    times = record.token_times
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _summary(metric: str, seconds: Sequence[float], percentiles: Sequence[float]) -> list[tuple[str, float]]:
    """Return the mean, median, standard deviation and percentiles of a metric. `seconds` are its values.

    Each result is (field's name, such as "mean_ttft_ms", value in milliseconds).
    """
    known = seconds or (0.0,)
    named = [
        (f"mean_{metric}_ms", statistics.fmean(known)),
        (f"median_{metric}_ms", statistics.median(known)),
        (f"std_{metric}_ms", statistics.pstdev(known)),
        *((f"p{percent:g}_{metric}_ms", percentile(known, percent)) for percent in percentiles),
    ]
    return [(name, value * 1e3) for name, value in named]


def _goodput(records: Sequence[Record], most: Mapping[str, float]) -> int:
    """Return how many requests met all limits. `most` maps "ttft", "tpot" or "e2el" to a limit in milliseconds.

    The time per output token is 0 for a request with one output token.
    """
    kept = 0
    for one in records:
        found = {"ttft": _first(one), "tpot": _per_token(one), "e2el": one.token_times[-1] - one.started}
        kept += all(found[name] * 1e3 <= limit for name, limit in most.items())
    return kept


def _most_tokens_in_a_second(records: Sequence[Record]) -> float:
    """Return the largest number of tokens that were generated in one second.

    Seconds are counted from the start of the first request.
    """
    if not records:
        return 0.0
    first = min(one.started for one in records)
    counts: dict[int, int] = {}
    for one in records:
        for moment in one.token_times:
            second = int(moment - first)
            counts[second] = counts.get(second, 0) + 1
    return float(max(counts.values()))


def _most_at_once(records: Sequence[Record]) -> int:
    """Return the largest number of requests that ran at the same time."""
    # At equal times, an end sorts before a start.
    events = sorted([(one.started, 1) for one in records] + [(one.token_times[-1], -1) for one in records])
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most
