"""The search for the highest arrival rate that a server sustains."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def knee(benchmarks: None) -> ModuleType:
    return importlib.import_module("knee")


class Server:
    """Sustains rates up to `limit`. Each probe takes 10 s of a clock that stands still otherwise."""

    def __init__(self, knee: ModuleType, limit: float) -> None:
        self._probe, self._limit, self.now = knee.Probe, limit, 0.0

    def measure(self, rate: float) -> object:
        self.now += 10
        return self._probe(rate, 1.0 if rate <= self._limit else 0.5)

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("limit", [3.0, 15.9, 16.0, 60.0, 500.0])
def test_the_knee_is_found_to_within_five_percent(knee: ModuleType, limit: float) -> None:
    server = Server(knee, limit)
    found = knee.find_knee(server.measure, 16.0, seconds=1e6, clock=server.clock)
    assert found.complete and found.rate <= limit < found.failed <= found.rate * 1.05
    assert len(found.probes) <= 14


def test_a_search_ends_in_time(knee: ModuleType) -> None:
    server = Server(knee, 60.0)
    found = knee.find_knee(server.measure, 16.0, seconds=45.0, clock=server.clock)
    assert [one.rate for one in found.probes] == [16.0, 24.0, 36.0, 54.0]
    assert not found.complete and found.rate == 54.0 and found.failed == float("inf") and server.now == 40.0


def test_a_server_that_sustains_nothing(knee: ModuleType) -> None:
    server = Server(knee, 0.0)
    found = knee.find_knee(server.measure, 16.0, seconds=1e6, most_steps=5, clock=server.clock)
    assert not found.complete and found.rate == 0.0 and len(found.probes) == 6


def test_a_rate_that_passes_above_one_that_failed_does_not_count(knee: ModuleType) -> None:
    found = knee.Knee((knee.Probe(10.0, 1.0), knee.Probe(15.0, 0.98), knee.Probe(22.5, 0.999)), True)
    assert found.rate == 10.0 and found.failed == 15.0


def test_servers_are_named_with_their_folders(benchmarks: None, tmp_path: Path) -> None:
    serve_http = importlib.import_module("serve_http")
    for name in ("vllm", "sglang"):
        (tmp_path / f"{name}-0.1.2.dist-info").mkdir()
        (tmp_path / f"{name}-0.1.2.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 0.1.2\n")
    own, vllm, sglang = serve_http._servers(f"ingot,vllm={tmp_path},sglang={tmp_path}")
    assert [one.prefix for one in (own, vllm, sglang)] == ["", "vllm_0.1.2_", "sglang_0.1.2_"]
    (nowhere,) = serve_http._servers(f"vllm={tmp_path / 'nowhere'}")
    with pytest.raises(serve_http.ChildError, match="vllm is not in "):
        _ = nowhere.prefix
    with pytest.raises(serve_http.argparse.ArgumentTypeError, match="'other': choose from ingot, vllm, sglang"):
        serve_http._servers("other")


def test_commands_of_servers(benchmarks: None, tmp_path: Path) -> None:
    """Prefix caches are off, and all servers allow sequences of the same length."""
    servers = importlib.import_module("http_servers")
    served = servers.Served(tmp_path / "m.ingot", tmp_path / "m", 4096, "dummy")
    lines = {name: " ".join(kind.command(served, 7)) for name, kind in servers.KINDS.items()}
    assert "--no-prefix-caching" in lines["ingot"] and "--no-enable-prefix-caching" in lines["vllm"]
    assert "--disable-radix-cache" in lines["sglang"] and "--context-length 4104" in lines["sglang"]
    assert "--max-model-len 4096" in lines["vllm"] and "--port 7" in lines["vllm"]
    with pytest.raises(servers.ChildError, match="--checkpoint"):
        servers.KINDS["vllm"].command(servers.Served(tmp_path, None, 4096), 7)
