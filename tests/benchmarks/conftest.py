"""What tests of benchmarks share: the scripts, a call of one of them, and a tiny artifact."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import BENCHMARKS, config_of

from ingot import compile_model

NAMES = {path.stem for path in BENCHMARKS.glob("*.py")}


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[None]:
    """The scripts of the folder, importable by their bare names, as they import one another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def results(benchmarks: None) -> ModuleType:
    return importlib.import_module("results")


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that results can name, in checkouts without git too."""
    monkeypatch.setenv("INGOT_REVISION", "0" * 40)


@pytest.fixture
def call(benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a script in this process, which has imported torch already."""

    def run(name: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        importlib.import_module(name).main()

    return run


@pytest.fixture(scope="module")
def artifact(benchmarks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, compiled for the reference backend."""
    folder = tmp_path_factory.mktemp("benchmarks")
    write = importlib.import_module("random_checkpoint").write_checkpoint
    checkpoint = write(folder / "checkpoint", config_of("1b"))
    compile_model(checkpoint, folder / "tiny.ingot", backend="reference", max_seq_len=256, max_batch=4)
    return folder / "tiny.ingot"
