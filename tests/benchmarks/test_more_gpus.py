"""Estimates of more GPUs than were measured: two GPUs have what was measured, and parts scale as the page says."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

KIB = 1 << 10
COPY, LINK = 4e12, 4e11  # bytes per second in a GPU, and between two
WEIGHTS, SHARED = 16e9, 1e9  # bytes that one GPU reads in a step; those of them that every rank reads


@pytest.fixture
def more_gpus(benchmarks: None) -> ModuleType:
    return importlib.import_module("more_gpus")


def result(results: ModuleType, name: str, figures: dict[str, float], **settings: str | int) -> object:
    return results.Result.model_construct(
        name=name,
        settings=settings,
        figures={one: results.Figure(value=value, unit="", what="") for one, value in figures.items()},
    )


def test_the_parts_of_a_time(more_gpus: ModuleType, results: ModuleType) -> None:
    one, two = 5e-3, 3.2e-3
    rank = SHARED + (WEIGHTS - SHARED) / 2
    mesh = {
        "copy": COPY,
        "one.batch_1_step": one,
        "one.batch_1_of_copy": WEIGHTS / one / COPY,
        "tp.batch_1_step": two,
        "tp.batch_1_of_copy": rank / two / COPY,
        "one.first_token": 0.08,
        "tp.first_token": 0.05,
    }
    sums = {"peer_copy": LINK}
    for size, peer, nccl in ((8 * KIB, 4e-6, 7e-6), (16 * KIB, 5e-6, 8e-6), (1 << 24, 0.0, 8e-5)):
        sums |= {f"all_reduce_{size}.peer_add": peer or 1e-4, f"all_reduce_{size}.nccl": nccl}
        sums[f"all_reduce_{size}.nccl.of_copy"] = 0.5
    step, prompt = more_gpus.estimates(
        result(results, "mesh_8b", mesh, batch="1", prompt=4096), result(results, "collectives", sums)
    )
    assert step.what == "a decode step of 1 sequence" and step.seconds[0] == pytest.approx(one)
    assert step.seconds[1] == pytest.approx(two) and prompt.seconds[1] == pytest.approx(0.05), "what was measured"
    # 8B: 32 layers of two sums, of rows of 8 KiB. Each further GPU adds the reading of a row.
    assert step.sums == pytest.approx((0, 64 * 4e-6, 64 * (4e-6 + 2 * 8192 / LINK), 64 * (4e-6 + 6 * 8192 / LINK)))
    assert step.read == pytest.approx([one * (SHARED + (WEIGHTS - SHARED) / n) / WEIGHTS for n in (1, 2, 4, 8)])
    assert step.between[0] == 0 and step.between[1] == step.between[2] == step.between[3] > 0
    # A prompt of 4096 has sums of 32 MiB, twice the largest that was measured: NCCL moves 1, 1.5 and 1.75 of its bytes.
    assert prompt.sums == pytest.approx((0, 64 * 16e-5, 64 * 24e-5, 64 * 28e-5))
    assert prompt.read == pytest.approx((0.08, 0.04, 0.02, 0.01))


def test_sums_between_two_measured_sizes(more_gpus: ModuleType, results: ModuleType) -> None:
    def figure(value: float) -> object:
        return results.Figure(value=value, unit="s", what="")

    figures = {f"all_reduce_{size}.peer_add": figure(took) for size, took in ((8 * KIB, 4e-6), (16 * KIB, 6e-6))}
    figures |= {"all_reduce_2097152.nccl": figure(2e-5), "peer_copy": figure(LINK)}
    times = more_gpus.SumTimes(figures)
    assert times.of(12 * KIB, 2) == pytest.approx(5e-6) and times.of(4 * KIB, 2) == pytest.approx(4e-6)
    assert times.of(2 << 20, 2) == 2e-5
    figures["all_reduce_2097152.push"] = figure(1e-5)
    assert more_gpus.SumTimes(figures).of(2 << 20, 2) == 1e-5
    assert more_gpus.SumTimes(figures).of(2 << 20, 4) == pytest.approx(3e-5), "the kernel of large sums is for two GPUs"
