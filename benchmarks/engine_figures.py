"""Convert the measurements of an engine into figures, in the same way for every engine."""

from collections.abc import Iterator

from decode_method import Decoded
from results import Figure
from serve_method import Served

from ingot.bench.drive import Run
from ingot.bench.metrics import serve_metrics, throughput_metrics

# For requests that arrive over time: the field of `serve_metrics`, and its description.
_WAITS = {
    "ttft": ("mean_ttft_ms", "until the first token, on average"),
    "ttft_p50": ("median_ttft_ms", "until the first token, the median"),
    "ttft_p99": ("p99_ttft_ms", "until the first token, the 99th percentile"),
    "tpot": ("mean_tpot_ms", "a token after the first, on average"),
    "tpot_p50": ("median_tpot_ms", "a token after the first, the median"),
    "tpot_p99": ("p99_tpot_ms", "a token after the first, the 99th percentile"),
}
# Limits of a good request, in milliseconds: MLPerf Inference v5.0, Llama-2-70B, interactive.
_GOOD = {"ttft": 450.0, "tpot": 40.0}


def step_figures(batch: int, decoded: Decoded) -> dict[str, Figure]:
    lengths = decoded.lengths
    return {
        f"batch_{batch}_step": Figure(
            value=decoded.step, unit="s", what=f"a decode step of {batch}, at a mean context of {lengths.context:g}"
        ),
        f"batch_{batch}_long": _tries(decoded.long, f"{batch} outputs of {lengths.long} tokens"),
        f"batch_{batch}_short": _tries(decoded.short, f"{batch} outputs of {lengths.short} tokens"),
    }


def serve_figures(served: Served) -> dict[str, Figure]:
    load = served.load
    found: dict[str, Figure] = {}
    for tokens, tries in zip(load.prompt, served.prompt, strict=True):
        found[f"prompt_{tokens}"] = _tries(
            tuple(one.duration for one in tries), f"the first token after a prompt of {tokens}"
        )
    if load.requests:
        what = f"{load.requests} requests of {load.input} tokens in and {load.output} out, given at once"
        found["throughput"] = throughput_figure(served.requests, what)
    if load.spread:
        found["spread_throughput"] = throughput_figure(
            served.spread, f"{load.spread} requests of spread lengths at once"
        )
    for rate, run in zip(load.rate, served.arrivals, strict=False):  # no runs without arrivals
        arriving = f"{load.arrivals} requests like ShareGPT's, {rate:g} of them a second"
        found |= waits(f"arrivals_{rate:g}", run, arriving)
        found[f"arrivals_{rate:g}_goodput"] = _goodput(run, arriving)
    if load.sharing:
        sharing = f"{load.sharing} requests at once with {load.prefix} tokens in common"
        found |= waits("prefix", served.prefix, sharing)
        found["prefix_throughput"] = throughput_figure(served.prefix, f"{sharing}: tokens made in a second")
    return found


def waits(part: str, run: Run, asked: str) -> Iterator[tuple[str, Figure]]:
    metrics = serve_metrics(run)
    for name, (field, what) in _WAITS.items():
        yield f"{part}_{name}", Figure(value=metrics[field] / 1e3, unit="s", what=f"{asked}: {what}")


def _goodput(run: Run, asked: str) -> Figure:
    """Return the goodput of a run: the requests per second that met all latency limits of _GOOD.

    `asked` describes the workload.
    """
    good = " and ".join(f"{most:g} ms of {metric}" for metric, most in _GOOD.items())
    value = serve_metrics(run, goodput=_GOOD)["request_goodput"]
    return Figure(value=value, unit="requests/s", what=f"{asked}: ended within {good}")


def throughput_figure(run: Run, what: str) -> Figure:
    """Return the throughput of a run: generated tokens per second. `what` describes the workload."""
    return Figure(value=throughput_metrics(run)["output_tokens_per_second"], unit="tokens/s", what=what)


def _tries(seconds: tuple[float, ...], what: str) -> Figure:
    return Figure(value=min(seconds), unit="s", what=f"{what}, the least", values=seconds)
