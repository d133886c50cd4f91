"""Kernels for a GPU that this machine need not have."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ingot.ir.machine.target
from ingot.ir.errors import TargetError
from ingot.ir.machine.gpus import Gpu

NO_GPU = "this machine has no GPU that can be used"


def unplug(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, wherever the tests run."""

    def find() -> Gpu:
        raise TargetError(NO_GPU)

    monkeypatch.setattr(ingot.ir.machine.target, "find_gpu", find)


def kernels_artifact(artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps of up to two tokens, for sm_90. Tests that ask for it belong into the group "sm-90-kernels"."""
    unplug(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # other tests in this process may want the interpreter
    return artifact("llama-plain", target="sm_90", dtype="bfloat16", max_batch=2, max_tokens=2)


def run_without_interpreter(script: Path) -> Any:
    """What `script` prints as JSON, run in a process of its own: a kernel that is imported under Triton's interpreter
    cannot be compiled."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    made = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)
