"""The cpu backend's library of kernels, built once for the tests of a process."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ingot.backends.cpu.emit import Cpu
from ingot.backends.cpu.load import load_library
from ingot.compile.emitter import Emitter
from ingot.ir.machine.target import Target
from ingot.runtime.loading.load_context import on_one_device


@pytest.fixture(scope="session")
def library(ingot_cache: Path) -> Mapping[str, Callable[..., Any]]:
    emitter = Emitter({}, Target.detect("cpu"), 1)
    executable = emitter.emit_library(Cpu())
    return load_library(executable, emitter.folders[executable.id], on_one_device("cpu"))
