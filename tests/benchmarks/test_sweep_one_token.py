"""The search of tile sizes for one token: what it times, compares and reports. By Triton's interpreter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS
from triton_interpreter import eight_bits_converted, language_patched_once

from ingot.backends.triton.lower.linear.tiles import Product
from ingot.backends.triton.lower.quant import matvec
from ingot.backends.triton.lower.quant.tiles import QuantMatvecTiles
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Machine
from ingot.ir.formats import find_format

MACHINE = Machine(sm=90, cores=2, dependent=False)  # the interpreter knows no dependent launch
BASE = QuantMatvecTiles(rows=4, block_k=512, warps=1, held=4, programs=1)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")


class Replayed:
    """In place of a CUDA graph: calls that run at each replay. As a capture does, recording them computes nothing."""

    def __init__(self, launches: Iterable[Callable[[], object]]) -> None:
        self.launches = list(launches)

    def replay(self) -> None:
        for launch in self.launches:
            launch()


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, on a CPU. A graph takes a millisecond by its clock."""
    folders: tuple[Path, ...] = (BENCHMARKS, BENCHMARKS / "kernels")
    for folder in folders:
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(device, "DEVICE", "cpu")
    monkeypatch.setattr(matvec, "one_token_elements", lambda form, *_: replace(form.elements, assembly=False))
    with language_patched_once(), eight_bits_converted():
        module = importlib.import_module("sweep_one_token")
        products = importlib.import_module("quant_linear")
        monkeypatch.setattr(importlib.import_module("device_times"), "_seconds", lambda graph: 1e-3)
        monkeypatch.setattr(products.Case, "calls", 2)  # launches of a graph, each with other inputs
        for one in (module, products):
            monkeypatch.setattr(one, "captured", Replayed)
        monkeypatch.setattr(module, "pause", lambda: None)
        for name in ("LAYERS", "ROUNDS"):
            monkeypatch.setattr(module, name, 1)
        yield module
    for folder in folders:
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


def cases_of(name: str) -> list[Any]:
    """Matmuls without a norm: a small change of a normed x may change its codes in float8.

    qkv and up have as few rows as one group of a program, because each row takes the interpreter long.
    """
    products = importlib.import_module("quant_linear")
    return list(products.cases(products.Decoder("small", 1, 16, 4, 16, 4, 64, gated=False), [name], [1]))


def done(sweep: ModuleType, *tiles: QuantMatvecTiles) -> dict[Future[Any], QuantMatvecTiles]:
    """Compiles that have ended: those with a number of programs below 0 failed."""
    found: dict[Future[Any], QuantMatvecTiles] = {}
    for one in tiles:
        future: Future[Any] = Future()
        if one.programs < 0:
            future.set_exception(RuntimeError("no such kernel"))
        else:
            future.set_result(sweep.Usage(32, 0))
        found[future] = one
    return found


@interpreted
def test_times_and_layers(sweep: ModuleType) -> None:
    search, cases = sweep.Sweep(MACHINE), {case.part: case for case in cases_of("fp8")}
    assert list(cases) == ["qkv", "o", "up", "down"]
    fast, layer = replace(BASE, cores=1, fetched=4), [cases["qkv"], cases["up"]]
    for case in layer:
        search.time_case(case, done(sweep, BASE, fast), deadline=float("inf"))
        assert {one.tiles for one in search.best(case)} == {BASE, fast}
        assert all(one.microseconds == pytest.approx(1e3 / case.calls, abs=1e-3) for one in search.best(case))
    layers = search.best_layers(layer, dict.fromkeys(layer, BASE))
    assert layers["best"] == layers["fastest"] == layers["compile"] == pytest.approx(1e3)
    assert set(layers["tiles"]) == {"qkv", "up"}


def test_a_layer_takes_the_tile_sizes_that_are_fastest_together(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not always those that are the fastest alone."""
    search, (qkv, _, up, _) = sweep.Sweep(MACHINE), cases_of("fp8")
    alone = [replace(BASE, rows=rows) for rows in (4, 8, 16)]
    search.found = [
        sweep.Found(case, tiles, microseconds=time) for case in (qkv, up) for time, tiles in enumerate(alone, 1)
    ]
    together = {(4, 4): 9.0, (8, 4): 7.0, (8, 16): 6.0, (16, 16): 5.0}
    monkeypatch.setattr(search, "layers", lambda chosen: together.get((chosen[qkv].rows, chosen[up].rows), 8.0))
    found = search.best_layers([qkv, up], {qkv: alone[2], up: alone[1]})
    assert (found["compile"], found["fastest"], found["best"]) == (8.0, 9.0, 6.0)
    assert [found["tiles"][part]["rows"] for part in ("qkv", "up")] == [8, 16]


@interpreted
def test_failures_are_reported_and_the_search_goes_on(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    search, case = sweep.Sweep(MACHINE), cases_of("fp8")[1]
    refused, broken = replace(BASE, cores=1, held=3), replace(BASE, programs=-1)
    search.time_case(case, done(sweep, refused, broken, BASE), deadline=float("inf"))
    assert [one.tiles for one in search.best(case)] == [BASE]
    errors = {one.tiles: one.error for one in search.found}
    assert errors[refused].startswith("Refused: tensor cores cannot multiply one token")
    assert errors[broken] == "RuntimeError: no such kernel"
    assert "no such kernel" in capsys.readouterr().out
    search.time_case(case, done(sweep, replace(BASE, rows=8)), deadline=0.0)
    assert search.found[-1].row()["error"] == "RuntimeError: no time was left"
    products = importlib.import_module("quant_linear")
    monkeypatch.setattr(products, "check", wrong_check(products.check))
    search.time_case(case, done(sweep, replace(BASE, rows=2)), deadline=float("inf"))
    assert "the result is wrong" in search.found[-1].error


def wrong_check(check: Callable[..., Any]) -> Callable[..., Any]:
    """A check that expects another result."""
    return lambda recorded, result, expected: check(recorded, result, expected + 1.0)


@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("depth", (4096, 14336))
def test_tile_sizes_are_for_the_format(sweep: ModuleType, depth: int, gated: bool) -> None:
    tiles = importlib.import_module("one_token_tiles").one_token_tiles
    product = Product(4096, depth, gated)
    found = tiles(BASE, product, find_format("fp8"))
    assert found[0] == BASE
    assert len(set(found)) == len(found)
    assert any(one.cores for one in found)
    assert all(one.block_k >= depth and one.block_k % (512 * one.warps) == 0 for one in found if one.cores)
    for name in ("int8", "int4_g128", "f8e4m3/1x*:f32"):
        assert not any(one.cores for one in tiles(BASE, product, find_format(name)))
