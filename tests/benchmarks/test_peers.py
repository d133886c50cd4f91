"""Other engines are measured as Ingot is."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from drawn import drawn

from ingot.bench.workload import BenchRequest

# Holds packages with the peers' names: a token takes them a millisecond, and their first start 0.4 s more.
FAKE_PEERS = Path(__file__).parents[1] / "support" / "outside" / "fake_peers"


@pytest.mark.parametrize(
    ("name", "version", "title"), drawn(1, [("vllm", "0.0.1", "vLLM"), ("sglang", "0.0.2", "SGLang")])
)
def test_a_peer(
    name: str,
    version: str,
    title: str,
    results: ModuleType,
    call: Callable[..., None],
    committed: None,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    asked = ("peer", tmp_path, "--peer", name, "--site")
    less = ("--long", 60, "--short", 20, "--tries", 3)
    load = ("--prompt", 5000, "--requests", 8, "--input", 128, "--output", 20)
    arriving = ("--spread", 1, "--arrivals", 12, "--rate", 100, "--conversation", 64, "--sharing", 3, "--prefix", 64)
    call(*asked, FAKE_PEERS, *less, *load, *arriving, "--json", tmp_path / "found.json")
    found = results.read_result(tmp_path / "found.json")
    assert all(key.startswith(f"{name}_{version}_") for key in found.figures)
    figures = {key.removeprefix(f"{name}_{version}_"): figure for key, figure in found.figures.items()}
    for batch in (1, 32):
        assert figures[f"batch_{batch}_step"].value == pytest.approx(1e-3, rel=0.5)
    most = 8 * 20 / 20e-3  # a busy machine makes less of it
    assert most / 10 < figures["throughput"].value <= most
    assert 1e-3 <= figures["prompt_5000"].value < 0.1 and 1 < figures["spread_throughput"].value < 2e3
    for part in ("arrivals_100", "prefix"):
        assert 1e-3 <= figures[f"{part}_tpot"].value < 1
    assert figures["prefix_ttft"].value >= 1e-3 and figures["prefix_throughput"].value < 3 / 1e-3
    cold, warm = (figures[f"{start}first_token_load"].value for start in ("cold_", ""))
    assert cold >= 0.4 > warm >= 0.01
    call(*asked, FAKE_PEERS, *less, *load, *arriving, "--batch", 1, "--one-start", "--json", tmp_path / "one.json")
    once = results.read_result(tmp_path / "one.json").figures
    warm = f"{name}_{version}_first_token"
    assert once.keys() == {key for key in found.figures if not key.startswith(warm) and "batch_32" not in key}
    caches = tmp_path / "caches"
    few = ("--spread", 0, "--arrivals", 0, "--conversation", 64, "--sharing", 3, "--prefix", 64)
    short = (*load, *few, "--batch", 1, "--caches", caches)
    call(*asked, FAKE_PEERS, *less, *short, "--fill-caches", "--json", tmp_path / "filled.json")
    assert not (tmp_path / "filled.json").exists()
    call(*asked, FAKE_PEERS, *less, *short, "--json", tmp_path / "kept.json")
    kept = results.read_result(tmp_path / "kept.json").figures
    assert f"{name}_{version}_batch_1_step" in kept and not [key for key in kept if "first_token" in key]
    with pytest.raises(SystemExit, match=f"{title} is not in"):
        call(*asked, tmp_path / "nowhere")


def test_of_several_versions_of_a_peer_the_best_is_known(results: ModuleType) -> None:
    peer = importlib.import_module("peers").PEERS["vllm"]
    values = {
        peer.figure("0.9.1", "batch_1_step"): (2e-3, "s"),
        peer.figure("0.10.0", "batch_1_step"): (1e-3, "s"),
        peer.figure("0.9.1", "throughput"): (3e4, "tokens/s"),
        peer.figure("0.10.0", "throughput"): (2e4, "tokens/s"),
        peer.figure("0.9.1", "prompt_4000"): (0.1, "s"),
        "batch_1_step": (1e-4, "s"),
        "sglang_0.1_throughput": (9e4, "tokens/s"),
    }
    figures = {name: results.Figure(value=value, unit=unit, what="") for name, (value, unit) in values.items()}
    assert peer.versions(figures) == ["0.9.1", "0.10.0"]
    best = {name: peer.best(figures, name) for name in ("batch_1_step", "throughput", "prompt_4000", "first_token")}
    assert {name: one and (one[0], one[1].value) for name, one in best.items()} == {
        "batch_1_step": ("0.10.0", 1e-3),
        "throughput": ("0.9.1", 3e4),
        "prompt_4000": ("0.9.1", 0.1),
        "first_token": None,
    }


def test_a_request_that_sglang_gives_up_is_no_success(benchmarks: None) -> None:
    class Engine:
        def __init__(self) -> None:
            self.loop = asyncio.new_event_loop()

        async def async_generate(self, *, input_ids: list[int], **_: Any) -> Any:
            if input_ids == [1]:
                raise ValueError("too long")
            return {"meta_info": {"completion_tokens": 3, "finish_reason": {"type": "abort"}}}

    def drive() -> None:
        driven = importlib.import_module("sglang_child").DrivenSglang(Engine(), by_token=False)
        driven.add(4, BenchRequest((2, 3), 5))
        (progress,) = driven.step()
        assert progress.finished and progress.error == "it ended after 3 of 5 tokens: {'type': 'abort'}"
        assert not driven.has_unfinished()
        driven.add(5, BenchRequest((1,), 5))
        with pytest.raises(ValueError, match="too long"):
            list(driven.step())

    with ThreadPoolExecutor(1) as other:  # in this one, what drives a browser keeps a loop running
        other.submit(drive).result()
