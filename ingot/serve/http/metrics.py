"""The metrics of the server in Prometheus' form, under vLLM's names, so that its dashboards show them."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ingot.runtime.outputs import FinishReason
from ingot.serve.engine.client import EngineClient

_LABELS = ("model_name",)
# Upper bounds of the histograms' buckets, in seconds, tokens: vLLM's (vllm/v1/metrics/loggers.py), so that
# dashboards can compare the two.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


class Metrics:
    """Counters and histograms of requests, and gauges of the engine."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model_name))
        self.tokens = TokenMetrics(model_name)
        self.registry.register(self.tokens)

        def counter(name: str, text: str) -> Any:
            return Counter(name, text, _LABELS, registry=self.registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry).labels(model_name)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        ended = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.finished: dict[str, Any] = {reason: ended.labels(model_name, reason) for reason in _REASONS}
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", _FIRST_TOKEN_S
        )
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.", _TOKEN_S
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From the request to its end.", _REQUEST_S)
        self.prompt_lengths = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_lengths = histogram("vllm:request_generation_tokens", "Generated tokens of a request.", _TOKENS)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text form."""
        return generate_latest(self.registry)


class TokenMetrics(Collector):
    """What is counted at every token. prometheus-client's counters take a lock at each call, and ten times as long."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._generated = 0
        self._buckets = [0] * (len(_TOKEN_S) + 1)
        self._seconds = 0.0

    def count(self, number: int) -> None:
        """Count generated tokens."""
        self._generated += number

    def observe(self, seconds: float) -> None:
        """Count the time between two deltas of a stream, divided by the tokens of the second one."""
        self._buckets[bisect_left(_TOKEN_S, seconds)] += 1
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        generated = CounterMetricFamily("vllm:generation_tokens", "Generated tokens.", labels=_LABELS)
        generated.add_metric([self._model_name], self._generated)
        yield generated
        text = "Between two deltas of a stream, for each token."
        times = HistogramMetricFamily("vllm:inter_token_latency_seconds", text, labels=_LABELS)
        bounds = [*map(floatToGoString, _TOKEN_S), "+Inf"]
        times.add_metric([self._model_name], list(zip(bounds, accumulate(self._buckets), strict=True)), self._seconds)
        yield times


class _EngineCollector(Collector):
    """Reads the engine's counts when Prometheus collects them. Counters start again with a restarted engine."""

    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        used = (stats.pages_held + stats.pages_releasing) / stats.pages if stats.pages else 0.0
        gauges = {
            "vllm:num_requests_running": ("Sequences in the running batch.", stats.running),
            "vllm:num_requests_waiting": ("Sequences that wait for a place in the batch.", stats.waiting),
            "vllm:kv_cache_usage_perc": ("Share of KV pages that sequences hold; 1 is all.", used),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric([self._model_name], value)
            yield gauge
        counters = {
            "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.cache_queries),
            "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.cache_hits),
            "vllm:num_preemptions": ("Preemptions.", stats.preemptions),
            "ingot:engine_restarts": ("Restarts of the engine process.", self._engine.restarts),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric([self._model_name], value)
            yield counter
