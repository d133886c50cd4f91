"""Benchmarks of kernels on a CPU: their folders, Triton's interpreter as the machine, and calls in place of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS

from ingot.backends.triton.tune.device import Machine

FOLDERS = (BENCHMARKS, BENCHMARKS / "kernels")
MACHINE = Machine(sm=90, cores=4, dependent=False)  # the interpreter knows no dependent launch
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU")
Script = Callable[[str], Any]


class Replayed:
    """In place of a CUDA graph: calls that run when they are recorded, and again at each replay."""

    def __init__(self, launches: Iterable[Callable[[], object]]) -> None:
        self.launches = list(launches)
        self.replay()

    def replay(self) -> None:
        for launch in self.launches:
            launch()
