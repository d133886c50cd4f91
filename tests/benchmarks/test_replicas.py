"""The figures of `benchmarks/replicas.py`, from loads that were not measured, and the CPU times that it reads."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import ModuleType

import pytest


@pytest.fixture
def replicas(benchmarks: None) -> ModuleType:
    return importlib.import_module("replicas")


@pytest.mark.parametrize(("server", "limit"), [(0.5, 2.0), (8.0, 1.25)])
def test_what_the_server_allows(replicas: ModuleType, server: float, limit: float) -> None:
    """A server that is busy for 8 of 10 seconds with one replica cannot write for two."""
    one, two = replicas.Load(10.0, 1000, server, 9.0), replicas.Load(6.0, 1000, server, 9.5)
    figures = replicas._figures(one, two, 2)
    assert figures["one"].value == 100 and figures["ratio"].value == pytest.approx(10 / 6)
    assert figures["one_server_cpu"].value == server / 1000 and figures["several_engines_cpu"].value == 0.0095
    assert figures["server_limit"].value == 1000 / server and figures["ratio_limit"].value == limit


def test_cpu_times_of_children(replicas: ModuleType) -> None:
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True); input()"
    command = [sys.executable, "-c", busy, "60123"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            child.stdout.readline()
            found, listening = set(replicas._children(os.getpid())), replicas._listening_process(60123)
            used = replicas._cpu(child.pid)
        finally:
            child.kill()
    assert child.pid in found and listening == child.pid
    assert used == pytest.approx(0.2, abs=0.1), "the kernel counts ticks"
