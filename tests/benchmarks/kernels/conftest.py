"""What tests of kernel benchmarks share: the scripts, a run of one on a CPU, and launches with wrong results."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from kernel_benchmarks import FOLDERS, Replayed, Script
from triton_interpreter import language_patched_once

from ingot.backends.triton.tune import attention as tune_attention
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune import experts as tune_experts
from ingot.backends.triton.tune.device import Launcher


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    """Imports a script by its bare name, as they import one another."""
    with pytest.MonkeyPatch.context() as patch, language_patched_once():
        for folder in FOLDERS:
            patch.syspath_prepend(folder)
        yield importlib.import_module
    for folder in FOLDERS:
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


@pytest.fixture
def on_cpu(script: Script, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Imports a script that runs over a small pool, by a clock that says a millisecond for every graph."""
    monkeypatch.setattr(device, "DEVICE", "cpu")
    monkeypatch.setattr(device, "POOL", 1 << 18)
    monkeypatch.setattr(device, "median_seconds", lambda work, rounds: 1e-3)
    monkeypatch.setattr(tune_attention, "LAUNCHES", (2, 2))
    monkeypatch.setattr(tune_experts, "MOST_CALLS", 2)
    monkeypatch.setattr(script("device_times"), "_seconds", lambda graph: 1e-3)
    monkeypatch.setattr(script("linear"), "TRAFFIC", 1 << 10)

    def imported(name: str) -> ModuleType:
        module = script(name)
        monkeypatch.setattr(module, "captured", Replayed)
        return module

    return imported


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth too much in the first row of each result."""
    right = Launcher.__call__

    def call(self: Launcher, inputs: Any) -> None:
        right(self, inputs)
        self.output[:1] = (self.output[:1] * 1.1).to(self.output.dtype)

    monkeypatch.setattr(Launcher, "__call__", call)
