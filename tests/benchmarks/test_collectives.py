"""The figures of all-reduces: the median of replays, and the share of the bandwidth of a copy between GPUs."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
from benchmark_scripts import BENCHMARKS

from ingot.backends.peer.layout import (
    PUSH_CHUNK_BYTES,
    PUSH_PER_CORE,
    PUSH_PROGRAMS,
    PUSH_WARPS,
    VECTOR_BYTES,
    shared_bytes,
)


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
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
    assert "push.slower_to" not in found


def test_the_size_to_which_pushes_are_slower(collectives: ModuleType) -> None:
    times = {
        "8192": {"nccl": [7e-6], "peer": [3e-6], "push": [6e-6]},
        "1048576": {"nccl": [15e-6], "peer": [11e-6], "push": [12e-6]},
        "16777216": {"nccl": [76e-6], "push": [55e-6], "push_add": [56e-6]},
    }
    found = collectives.figures(times, 400e9, 2)
    assert found["push.slower_to"].value == 1048576 and found["all_reduce_16777216.push_add"].value == 56e-6


def test_variants_are_ordered_by_time(collectives: ModuleType) -> None:
    times = {"4096": {"nccl": [7e-6], "push_8192x2x8": [4e-6, 5e-6, 9e-6], "push_add_8192x2x8": [6e-6]}}
    assert collectives.order(times) == [
        "4096 bytes:",
        "      5.00 us  push_8192x2x8",
        "      7.00 us  nccl",
        "4096 bytes and a residual:",
        "      6.00 us  push_add_8192x2x8",
    ]


@pytest.mark.parametrize(
    ("given", "ranks", "sweep", "wanted"),
    [
        (None, 2, False, "nccl,peer,push,nccl_add,peer_add,push_add"),
        (None, 4, False, "nccl,peer,nccl_add,peer_add"),
        (None, 2, True, "nccl,push,nccl_add,push_add"),
        ("peer", 2, True, "peer"),
        ("peer,push", 2, False, "peer,push"),
    ],
)
def test_the_providers(collectives: ModuleType, given: str | None, ranks: int, sweep: bool, wanted: str) -> None:
    assert ",".join(collectives.chosen_providers(given, ranks, sweep=sweep)) == wanted


@pytest.mark.parametrize(("given", "sweep"), [("push", False), ("nccl,push_add", False), (None, True)])
def test_pushes_are_for_two_ranks(collectives: ModuleType, given: str | None, sweep: bool) -> None:
    with pytest.raises(SystemExit, match="the kernel that pushes is for 2 ranks, and these are 4"):
        collectives.chosen_providers(given, 4, sweep=sweep)


def test_variants_fit(collectives: ModuleType) -> None:
    """A thread has a vector of each chunk and no more than eight, and there are flags for all programs of an H200."""
    variants = importlib.import_module("push_variants")
    for one in variants.VARIANTS:
        assert VECTOR_BYTES <= one.chunk_bytes / (32 * one.warps) <= 8 * VECTOR_BYTES, one.name
        assert one.per_core * 132 <= PUSH_PROGRAMS
    assert variants.Variant(PUSH_CHUNK_BYTES, PUSH_PER_CORE, PUSH_WARPS) in variants.VARIANTS
    assert variants.variants_bytes(132) >= shared_bytes(2, 4 * 132, 32 << 10)


def test_an_unknown_provider(collectives: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["collectives.py", "--providers", "nccl,pear"])
    with pytest.raises(SystemExit, match="unknown provider 'pear': nccl, peer, push, nccl_add, peer_add, push_add"):
        collectives.main()


def test_fewer_gpus_than_ranks(collectives: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["collectives.py", "--ranks", "3"])
    monkeypatch.setattr(collectives.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="3 ranks need as many GPUs, and this process can use 1"):
        collectives.main()
