"""The figures of all-reduces: the median of replays, and the share of the bandwidth of a copy between GPUs."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from benchmark_scripts import BENCHMARKS


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import importlib

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "kernels"))
    return importlib.import_module("collectives")


def test_figures(collectives: ModuleType) -> None:
    times = {
        "8192": {"nccl": [9e-6, 6e-6, 7e-6], "peer": [3e-6], "peer_add": [4e-6]},
        "65536": {"nccl": [9e-6], "peer": [10e-6]},
        "16777216": {"nccl": [60e-6]},
    }
    found = collectives.figures(times, 400e9, 4)
    assert found["all_reduce_8192.nccl"].value == 7e-6
    # Of four ranks, each sends and receives one and a half times the bytes.
    assert found["all_reduce_16777216.nccl.of_copy"].value == pytest.approx(1.5 * 16777216 / 400e9 / 60e-6)
    assert found["all_reduce_8192.peer_add"].value == 4e-6
    assert found["peer_copy"].value == 400e9
    assert found["all_reduce_8192.peer"].value == 3e-6 and found["peer.faster_to"].value == 8192


def test_an_unknown_provider(collectives: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["collectives.py", "--providers", "nccl,pear"])
    with pytest.raises(SystemExit, match="unknown provider 'pear': nccl, peer, nccl_add, peer_add are known"):
        collectives.main()


def test_fewer_gpus_than_ranks(collectives: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["collectives.py", "--ranks", "3"])
    monkeypatch.setattr(collectives.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="3 ranks need as many GPUs, and this process can use 1"):
        collectives.main()
