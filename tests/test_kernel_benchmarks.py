"""Benchmarks of kernels: what they reckon, and that wrong results become no figures. By Triton's interpreter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton_schedules  # noqa: F401, turns the interpreter on before anything imports triton

from ingot.backends.triton.tune import attention as tune_attention
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Machine

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FOLDERS = (BENCHMARKS, BENCHMARKS / "kernels")
SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")


@pytest.fixture(scope="module")
def kernels() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script by its bare name, as they import one another."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in FOLDERS:
            patch.syspath_prepend(folder)
        yield importlib.import_module
    for folder in FOLDERS:
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


class Replayed:
    """In place of a CUDA graph: calls, again and again."""

    def __init__(self, launches: Iterable[Callable[[], object]]) -> None:
        self.launches = list(launches)

    def replay(self) -> None:
        for launch in self.launches:
            launch()


@pytest.fixture
def without_gpu(kernels: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, over a small pool, by a clock that says a millisecond for every graph."""
    monkeypatch.setattr(device, "DEVICE", "cpu")
    monkeypatch.setattr(device, "POOL", 1 << 18)
    monkeypatch.setattr(device, "median_seconds", lambda work, rounds: 1e-3)
    monkeypatch.setattr(tune_attention, "LAUNCHES", (2, 2))
    times = kernels("device_times")
    monkeypatch.setattr(times, "_seconds", lambda graph: 1e-3)
    monkeypatch.setattr(times, "this_machine", lambda: Machine(90, 4, dependent=False))
