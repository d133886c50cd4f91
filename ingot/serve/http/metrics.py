"""The metrics of the server in Prometheus' form, under vLLM's names, so that its dashboards show them."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ingot.runtime.engines.outputs import FinishReason
from ingot.serve.engine.client import EngineClient
from ingot.serve.engine.served_engine import ServedEngine

_LABELS = ("model_name", "engine")  # vLLM's (vllm/v1/metrics/loggers.py); the engine is a number from 0
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
    """Counters and histograms of requests, and gauges of the engines. Each engine has values of its own."""

    def __init__(self, engine: ServedEngine, model_name: str, page_size: int) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model_name, page_size))
        families = _Families(self._registry)
        self._of_engines = [EngineMetrics(families, model_name, str(one.index)) for one in engine.engines]
        self._registry.register(_TokenCollector(self._of_engines, model_name))

    def of_engine(self, index: int) -> "EngineMetrics":
        """Return the metrics of the requests that an engine has served."""
        return self._of_engines[index]

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text form."""
        return generate_latest(self._registry)


class _Families:
    """The counters and histograms, without labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, _LABELS, buckets=buckets, registry=registry)

        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens of requests.", _LABELS, registry=registry)
        self.finished = Counter(
            "vllm:request_success", "Requests that ended, by reason.", (*_LABELS, "finished_reason"), registry=registry
        )
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", _FIRST_TOKEN_S
        )
        self.per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time of a request's tokens after the first.", _TOKEN_S
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From the request to its end.", _REQUEST_S)
        self.prompt_lengths = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_lengths = histogram("vllm:request_generation_tokens", "Generated tokens of a request.", _TOKENS)


class EngineMetrics:
    """Counters and histograms of the requests that one engine serves.

    engine   the number of the engine
    tokens   what is counted at every token
    """

    def __init__(self, families: _Families, model_name: str, engine: str) -> None:
        labels = model_name, engine
        self.engine = engine
        self.tokens = TokenCounts()
        self.prompt_tokens = families.prompt_tokens.labels(*labels)
        self.finished: dict[str, Counter] = {reason: families.finished.labels(*labels, reason) for reason in _REASONS}
        self.first_token = families.first_token.labels(*labels)
        self.per_token = families.per_token.labels(*labels)
        self.whole = families.whole.labels(*labels)
        self.prompt_lengths = families.prompt_lengths.labels(*labels)
        self.output_lengths = families.output_lengths.labels(*labels)


class TokenCounts:
    """What is counted at every token. prometheus-client's counters take a lock at each call, and ten times as long."""

    def __init__(self) -> None:
        self.generated = 0
        self.buckets = [0] * (len(_TOKEN_S) + 1)
        self.seconds = 0.0

    def count(self, number: int) -> None:
        """Count generated tokens."""
        self.generated += number

    def observe(self, seconds: float) -> None:
        """Count the time between two deltas of a stream, divided by the tokens of the second one."""
        self.buckets[bisect_left(_TOKEN_S, seconds)] += 1
        self.seconds += seconds


class _TokenCollector(Collector):
    """Reads the counts of tokens when Prometheus collects them."""

    def __init__(self, engines: Sequence[EngineMetrics], model_name: str) -> None:
        self._engines, self._model_name = engines, model_name

    def collect(self) -> Iterator[Metric]:
        generated = CounterMetricFamily("vllm:generation_tokens", "Generated tokens.", labels=_LABELS)
        text = "Between two deltas of a stream, for each token."
        times = HistogramMetricFamily("vllm:inter_token_latency_seconds", text, labels=_LABELS)
        bounds = [*map(floatToGoString, _TOKEN_S), "+Inf"]
        for one in self._engines:
            labels, tokens = [self._model_name, one.engine], one.tokens
            generated.add_metric(labels, tokens.generated)
            buckets = list(zip(bounds, accumulate(tokens.buckets), strict=True))
            times.add_metric(labels, buckets, tokens.seconds)
        yield generated
        yield times


class _EngineCollector(Collector):
    """Reads the engines' counts when Prometheus collects them. Counters start again with a restarted engine."""

    def __init__(self, engine: ServedEngine, model_name: str, page_size: int) -> None:
        self._engine, self._model_name, self._page_size = engine, model_name, page_size

    def collect(self) -> Iterator[Metric]:
        for name, text, value in _GAUGES:
            yield self._filled(GaugeMetricFamily(name, text, labels=_LABELS), value)
        for name, text, value in _COUNTERS:
            yield self._filled(CounterMetricFamily(name, text, labels=_LABELS), value)
        # The endpoint picker of the Gateway API reads these two labels (llm-d-router, docs/model-server-protocol.md).
        labels = (*_LABELS, "block_size", "num_gpu_blocks")
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, in the labels; always 1.", labels=labels)
        for engine in self._engine.engines:
            pages = str(engine.stats.pages)
            info.add_metric([self._model_name, str(engine.index), str(self._page_size), pages], 1)
        yield info
        yield self._adapters()

    def _adapters(self) -> Metric:
        """Return vLLM's metric of LoRA adapters: its labels are the names, and its value is the present time."""
        labels = ("engine", "max_lora", "waiting_lora_adapters", "running_lora_adapters")
        gauge = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters of requests.", labels=labels)
        for engine in self._engine.engines:
            if engine.max_loras:
                names = (",".join(some) for some in (engine.stats.waiting_adapters, engine.stats.running_adapters))
                gauge.add_metric([str(engine.index), str(engine.max_loras), *names], time.time())
        return gauge

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: Callable[[EngineClient], float]
    ) -> Metric:
        for engine in self._engine.engines:
            family.add_metric([self._model_name, str(engine.index)], value(engine))
        return family


def _used_pages(engine: EngineClient) -> float:
    stats = engine.stats
    return (stats.pages_held + stats.pages_releasing) / stats.pages if stats.pages else 0.0


def _seconds_waited(engine: EngineClient) -> float:
    return engine.stats.seconds_waited


# The name, the text and the value of each count of an engine.
_Counts = tuple[tuple[str, str, Callable[[EngineClient], float]], ...]
_GAUGES: _Counts = (
    ("vllm:num_requests_running", "Sequences in the running batch.", lambda one: one.stats.running),
    ("vllm:num_requests_waiting", "Sequences that wait for a place in the batch.", lambda one: one.stats.waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV pages that sequences hold; 1 is all.", _used_pages),
    ("ingot:engine_ready", "1 if requests can go to the engine, else 0.", lambda one: float(one.state == "ready")),
)
_COUNTERS: _Counts = (
    ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda one: one.stats.cache_queries),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda one: one.stats.cache_hits),
    ("vllm:num_preemptions", "Preemptions.", lambda one: one.stats.preemptions),
    ("ingot:forced_tokens", "Forced tokens without a step of their own.", lambda one: one.stats.forced_tokens),
    ("ingot:engine_steps", "Steps that have ended.", lambda one: one.stats.steps),
    ("ingot:engine_wait_seconds", "Seconds that the engine's thread waited for steps.", _seconds_waited),
    ("ingot:engine_restarts", "Restarts of the engine process.", lambda one: one.restarts),
)
