"""Which GPU each rank of a mesh has, and the GPUs that cannot form a mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ingot.ir.errors import TargetError
from ingot.ir.machine.gpus import TYPICAL, Gpu
from ingot.ir.mesh import parse_mesh
from ingot.runtime.ranks import gpus as module
from ingot.runtime.ranks.gpus import check_gpus, find_rank_gpus

H200 = Gpu("NVIDIA H200", 90, 150_754_820_096, 132, 4_916_736_000_000, links=True, driver="13.0")


def machine(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], cut: set[tuple[int, int]]) -> list[str]:
    """A machine with these GPUs; returns the warnings that follow. `cut` has the pairs without a link."""
    said: list[str] = []
    monkeypatch.setattr(module.log, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(module, "find_gpus", lambda: tuple(gpus))
    monkeypatch.setattr(module, "reaches", lambda *pair: pair not in cut)
    return said


def test_each_rank_has_the_gpu_of_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    said = machine(monkeypatch, [H200] * 4, set())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 3,GPU-7,2")
    assert find_rank_gpus(parse_mesh("tp=3")) == ["5", "3", "GPU-7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert find_rank_gpus(parse_mesh("pp=2 tp=2")) == ["0", "1", "2", "3"]
    assert not said


@pytest.mark.parametrize(("count", "text"), [(1, "can use 1 GPU\\n"), (3, "can use 3 GPUs\\n")])
def test_fewer_gpus_than_ranks(count: int, text: str) -> None:
    with pytest.raises(TargetError, match=rf"compiled for 4 ranks \(pp=2 tp=2\), and this process {text}") as caught:
        check_gpus(parse_mesh("pp=2 tp=2"), [H200] * count)
    assert "at least 4 GPUs" in caught.value.expected and "CUDA_VISIBLE_DEVICES" in caught.value.hint


@pytest.mark.parametrize(
    "other", [TYPICAL["sm_80"], replace(H200, product="NVIDIA H100"), replace(H200, memory=1 << 36)]
)
def test_gpus_of_two_kinds(other: Gpu) -> None:
    with pytest.raises(TargetError, match="the GPUs of rank 0 and rank 1 differ: NVIDIA H200") as caught:
        check_gpus(parse_mesh("tp=2"), [H200, other])
    assert other.product in caught.value.what
    check_gpus(parse_mesh("tp=2"), [H200, H200, other])  # which no rank uses


def test_gpus_without_a_link_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ranks that communicate: rank 0 and rank 3 of two by two do not."""
    said = machine(monkeypatch, [H200] * 4, {(2, 0), (0, 3)})
    find_rank_gpus(parse_mesh("pp=2 tp=2"))
    assert len(said) == 1
    assert "rank 0 and rank 2 cannot access each other's memory: NCCL copies through the host" in said[0]
