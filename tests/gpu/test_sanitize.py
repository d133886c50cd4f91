"""The script for compute-sanitizer, on a CPU: its steps are right, and wrong ones end it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ingot.runtime.cpu.executor import CpuExecutor, CpuStepHandle

SCRIPT = Path(__file__).parent / "sanitize.py"
STEPS = [1, 7, 20, 40, 70, 3, 1, 2]


def run(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(artifact)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.xdist_group("sanitize")
def test_it_runs_its_steps(
    artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(artifact("llama-plain", backend="reference"), monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == [*STEPS, *STEPS, len(STEPS)]


@pytest.mark.xdist_group("sanitize")
@pytest.mark.parametrize(
    ("first", "value", "said"), [(len(STEPS), 1.0, "a captured graph gives other bits"), (0, torch.nan, "not finite")]
)
def test_wrong_logits_end_it(
    first: int, value: float, said: str, artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, launch, launched = artifact("llama-plain", backend="reference"), CpuExecutor.launch, 0

    def changed(*args: CpuExecutor) -> CpuStepHandle:
        nonlocal launched
        handle = launch(*args)  # type: ignore[arg-type]
        if launched >= first:
            handle.outputs["logits"][0, 0] += value
        launched += 1
        return handle

    monkeypatch.setattr(CpuExecutor, "launch", changed)
    with pytest.raises(SystemExit, match=f"step 0: .*{said}"):
        run(folder, monkeypatch)
