"""The fit of constants: steps that other constants predict are measurements enough to find these again."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import TypeAdapter

from ingot.debug.step_time.device import Device
from ingot.debug.step_time.measurement import InstructionTime, StepMeasurement
from ingot.debug.step_time.predict import device_seconds
from ingot.debug.step_time.programs import Launched
from ingot.debug.step_time.timed import time_step
from ingot.debug.step_time.work import Work
from ingot.ir.artifact.tuning import Choice
from ingot.ir.errors import OptionError
from ingot.ir.machine.gpu_times import H200_TIMES, KernelTime
from ingot.ir.ops.registry import Cost

US = 1e-6
KERNELS = {
    "norm": KernelTime(1.5 * US, 0.8, wave=0.5 * US),
    "tile": KernelTime(3 * US, 0.9, beyond=1 * US),
    "cublas linear": KernelTime(4 * US, 0.85, 0.7, wave=2 * US, stream=150e9),
    "feed": KernelTime(1 * US, 0.75),
}
TRUE = replace(H200_TIMES, kernels=KERNELS, between=9 * US)
WRONG = replace(
    TRUE,
    kernels={
        "norm": KernelTime(3 * US, 0.5, wave=0.2 * US),
        "tile": KernelTime(1 * US, 0.6, beyond=0.3 * US),
        "cublas linear": KernelTime(2 * US, 0.6, 0.9, wave=1 * US, stream=300e9),
        "feed": KERNELS["feed"],
    },
    between=1 * US,
)


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    yield importlib.import_module("fit_times")
    sys.modules.pop("fit_times")


def work(kind: str, *launches: Launched, flops: int = 0, moved: int = 0, **more: Any) -> Work:
    cost = Cost(flops, moved)
    return Work("n", kind, kind, cost, cost, "bf16", "triton", launches, compiled=True, **more)


def works(rows: int) -> list[Work]:
    found = [work("products", Launched("tile"), moved=rows * size << 10) for size in (1, 100)]
    for columns, depth in ((2048, 8192), (16384, 2048)):
        size = 2 * (rows * depth + columns * depth + rows * columns)
        found.append(work("norms", Launched("norm", 1 + rows // 264), moved=4 * rows * depth))
        found.append(work("products", Launched("norm"), Launched("tile"), moved=2 * columns * depth))
        library = {"product": (rows, columns, depth), "flops": 2 * rows * columns * depth, "moved": size}
        found += [work("products", Launched("cublas linear"), **library)] * 3  # type: ignore[arg-type]
    log = Choice(kernel="linear", problem={}, tiles={}, source="measured", microseconds=5.0)
    return [*found, work("products", Launched("tile"), choice=log), work("rest")]


def bucket(rows: int) -> dict[str, Any]:
    """What explain --measure --json prints of a step that the true constants are true of."""
    assert TRUE.gpu.bandwidth is not None
    device = Device(TRUE.gpu, TRUE.gpu.bandwidth, TRUE)
    calls = works(rows)
    seconds = [device_seconds(one, device) for one in calls]
    taken = StepMeasurement(sum(seconds) + 9 * US, tuple(InstructionTime(one, 0.0) for one in seconds))
    times, step = time_step(calls, device, captured=True, taken=taken)
    of_calls: list[dict[str, Any]] = [
        {"work": TypeAdapter(Work).dump_python(one, mode="json"), "time": asdict(time)}
        for one, time in zip(calls, times, strict=True)
    ]
    inside = {"work": None, "time": None}  # a call of a region
    asked = {"tokens": rows, "sequences": 1, "context": 512}
    return {"step": asked, "time": asdict(step), "calls": [*of_calls, inside]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"buckets": [bucket(rows) for rows in (1, 16, 128, 512, 2048)]}))
    return path


def test_constants_are_found_again(fit: ModuleType, file: Path) -> None:
    steps = fit.read_steps(file)
    assert [step.works for step in steps] == [tuple(works(rows)) for rows in (1, 16, 128, 512, 2048)]
    found = fit.fitted(WRONG, steps)
    assert found.between == pytest.approx(9 * US)
    assert found.kernels["feed"] == KERNELS["feed"], "of what no step has, nothing is learnt"
    for step in steps:
        assert step.predicted(WRONG).predicted != pytest.approx(step.time.measured, rel=0.03)
        assert step.predicted(found).predicted == pytest.approx(step.time.measured, rel=0.03)
    assert found.kernels["tile"].bandwidth == pytest.approx(0.9, rel=0.05)
    assert found.kernels["tile"].beyond > 0.45 * US
    # What is printed is as it stands in the source.
    text = fit.source_of(found)
    kernels, between = text.rsplit("\n", 1)
    names = {"KernelTime": KernelTime, "_US": US}
    read = eval(f"{{{kernels}}}", names)
    assert {name: asdict(one) for name, one in read.items()} == {
        name: pytest.approx(asdict(one)) for name, one in found.kernels.items()
    }
    assert eval(f"dict({between})", names) == {"between": pytest.approx(found.between)}


def test_a_trace_tells_what_is_between_steps(fit: ModuleType, file: Path) -> None:
    steps = fit.read_steps(file)
    late = [replace(kind, traced=30 * US) if kind.kind == "gaps" else kind for kind in steps[0].time.kinds]
    seen = replace(steps[0], time=replace(steps[0].time, kinds=tuple(late)))
    assert fit.fitted(TRUE, [seen, *steps[1:]]).between == pytest.approx(30 * US)
    launched = replace(steps[0], time=replace(steps[0].time, captured=False))
    assert fit.fitted(TRUE, [launched]).between == TRUE.between


def test_the_command(
    fit: ModuleType, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = file.with_name("other.json")
    other.write_text(json.dumps({"buckets": [bucket(64)]}))
    monkeypatch.setattr(fit, "H200_TIMES", WRONG)
    monkeypatch.setattr(sys, "argv", ["fit_times.py", str(file), "--check", str(other), "--leave-out"])
    fit.main()
    said = capsys.readouterr().out
    assert said.startswith('"norm": KernelTime(') and said.count("mean, without sign") == 3
    # The one that nothing was fitted to, and that no step was left out for.
    (checked,) = [line for line in said.splitlines() if line.startswith("other T=64")]
    before, after = (float(one.strip("%")) for one in checked.split("µs")[1].split()[0:3:2])
    assert abs(after) < 4 < abs(before)


def test_what_is_no_measurement(fit: ModuleType, tmp_path: Path) -> None:
    unmeasured = bucket(1)
    unmeasured["time"]["measured"] = None
    other = bucket(1)
    other["time"]["device"] = "another GPU"
    for value, message in (
        ([], "list indices"),
        ({"buckets": [unmeasured]}, "has no measured step"),
        ({"buckets": [other]}, "is of another GPU"),
        ({"buckets": [{**bucket(1), "calls": [{"work": {}}]}]}, "validation error"),
    ):
        path = tmp_path / "steps.json"
        path.write_text(json.dumps(value))
        with pytest.raises(OptionError, match=message):
            fit.read_steps(path)
