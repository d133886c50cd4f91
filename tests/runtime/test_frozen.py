"""Serving needs nothing that builds: in a process without compilers and other processes the tokens are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from frozen_serve import Job, serve, serve_frozen
from tiny import CHECKPOINTS

pytestmark = pytest.mark.one_in_file(3)

SUPPORT = Path(__file__).parents[1] / "support" / "serving"


@pytest.mark.xdist_group("parity-llama-biased")
def test_a_frozen_process_serves_what_was_compiled(artifact: Callable[..., Path], tmp_path: Path) -> None:
    compiled = artifact("llama-biased", backend="inductor")
    assert list(compiled.glob("exe/*/*/*.so"))
    prompts = CHECKPOINTS["llama-biased"].prompts()
    job = Job(str(compiled), [prompts[:1], prompts], 5)
    frozen = serve_frozen(job, os.environ, tmp_path)
    assert frozen == serve(job)
    assert frozen.buckets == ["decode", "extend"] and frozen.refused == []


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        ("import triton", "import of triton halted"),
        ("import triton.language", "No module named 'triton.language'"),
        ("import ingot.passes.pipeline", "ingot.passes is a compiler's"),
        ("import importlib.util; sys.exit(str(importlib.util.find_spec('triton')))", "None"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
        ("import os; os.system('true')", "os.system"),
        ("import os; os.posix_spawn('/bin/true', ['true'], {})", "os.posix_spawn"),
        ("import os; os.execv('/bin/true', ['true'])", "os.exec"),
        ("import os; os.fork()", "os.fork"),
    ],
)
def test_what_a_frozen_process_refuses(attempt: str, said: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(SUPPORT)!r}); import frozen_serve; frozen_serve.freeze(); {attempt}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1]
