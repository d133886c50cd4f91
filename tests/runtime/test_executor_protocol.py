"""One protocol for the executors of all devices: each gives what it asks, and nothing asks which of them it has."""

import inspect
import re
from pathlib import Path

import pytest

from ingot.runtime.cpu.executor import CpuExecutor
from ingot.runtime.cuda.executor import CudaExecutor
from ingot.runtime.steps.executor import Executor, StepLauncher

ROOT = Path(__file__).parents[2]
ROOMS = ("backends", "frontend", "ingot", "ir", "models", "passes", "runtime")
# Of a GPU's executor alone: a rank decides how a step is computed, and other ranks execute it so.
OWN = {CpuExecutor: set(), CudaExecutor: {"decide", "execute"}}


def asked(protocol: type) -> set[str]:
    return {name for name, value in vars(protocol).items() if not name.startswith("_") and callable(value)}


@pytest.mark.parametrize("executor", OWN)
def test_an_executor_gives_all_that_is_asked_and_no_more(executor: type) -> None:
    wanted = asked(StepLauncher) | asked(Executor)
    assert {"launch", "warm_up", "capture", "capture_all", "prepare", "synchronize"} == wanted
    assert asked(executor) == wanted | OWN[executor]
    assert "captured" in vars(executor), "it would read as what the protocol says of itself"
    for name in wanted:
        theirs, ours = (inspect.signature(getattr(one, name)).parameters for one in (Executor, executor))
        assert list(theirs) == list(ours) and [one.default for one in theirs.values()] == [
            one.default for one in ours.values()
        ]


def test_only_the_loader_knows_which_executor_it_makes() -> None:
    naming = re.compile(r"\bC(?:pu|uda)Executor\b|getattr\((?:\w+\.)*_?executor,")
    found = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if naming.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"runtime/cpu/executor.py", "runtime/cuda/executor.py", "runtime/loading/loader.py"}
