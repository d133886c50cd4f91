"""`/metrics` under vLLM's names, as Prometheus' own parser reads it."""

from __future__ import annotations

import pytest
from http_server import HttpServer
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.xdist_group("serve")

# docs.vllm.ai, "Production metrics"; those that dashboards and the Gateway API's picker read. llm-d-router's
# docs/model-server-protocol.md lists the picker's.
NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
}


def values(server: HttpServer) -> dict[tuple[str, str], float]:
    """The samples by name and by the reason that a request ended."""
    families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    assert {family.name for family in families} >= NAMES
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels["model_name"] == "tiny" for sample in samples)
    return {
        (sample.name, sample.labels.get("finished_reason", "")): sample.value
        for sample in samples
        if "le" not in sample.labels
    }


def test_metrics_count_requests_and_tokens(server: HttpServer) -> None:
    before = values(server)
    server.complete(prompt="abc", max_tokens=5, ignore_eos=True)
    # So many that a busy server, which merges deltas, sends more than one.
    server.complete(prompt="abcd", max_tokens=40, ignore_eos=True, stream=True)
    server.until_idle()
    after = values(server)
    grown = {key: after[key] - before[key] for key in after}
    assert grown["vllm:prompt_tokens_total", ""] == 7 and grown["vllm:generation_tokens_total", ""] == 45
    assert grown["vllm:request_success_total", "length"] == 2 and grown["vllm:request_success_total", "stop"] == 0
    assert grown["vllm:e2e_request_latency_seconds_count", ""] == 2
    assert grown["vllm:time_to_first_token_seconds_count", ""] == 1, "only streams have a first token of their own"
    assert 1 <= grown["vllm:inter_token_latency_seconds_count", ""] <= 39


def test_version_and_load(server: HttpServer) -> None:
    assert server.http.get("/version").json()["version"]
    assert server.http.get("/load").json() == {"server_load": 0}
    assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 200


def test_the_picker_reads_the_size_of_the_cache(server: HttpServer) -> None:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    (info,) = (one for family in families for one in family.samples if one.name == "vllm:cache_config_info")
    assert info.labels["engine"] == "0" and int(info.labels["block_size"]) > 0
    assert int(info.labels["num_gpu_blocks"]) > 0, "also before the first request"
