"""Measured times of a step: every call that runs has one, in a row and in a trace, and together they are about what the
step takes."""

from pathlib import Path

import pytest
from gpu_model import LIMITS, MODEL

from ingot import compile_model
from ingot.debug.explain import explain
from ingot.debug.requested_step import RequestedStep
from ingot.debug.step_time.times import GAPS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step-time")
    output = folder / "a.ingot"
    compile_model(MODEL.write(folder / "checkpoint"), output, target="cuda", dtype="bfloat16", **LIMITS)
    return output


@pytest.mark.parametrize("step", ["T=1,context=40", "T=5,context=40", "T=70,B=1,context=80"])
def test_what_is_measured_is_about_the_step(made: Path, step: str) -> None:
    (bucket,) = explain(made, RequestedStep.parse(step), measure=True).buckets
    time = bucket.time
    assert time is not None and time.measured is not None and 5e-6 < time.measured < 0.1
    runs = [call.time for call in bucket.calls if call.time is not None and call.time.predicted]
    assert runs and all(one.measured is not None and 1e-7 < one.measured < 1e-3 for one in runs)
    views = [call.time for call in bucket.calls if call.time is not None and not call.time.predicted]
    assert all(one.measured == 0 for one in views)
    assert sum(one.taken for one in runs) < 2 * time.measured
    assert sum(one.measured or 0 for one in time.kinds) == pytest.approx(time.measured)


@pytest.mark.parametrize("step", ["T=5,context=40", "T=70,B=1,context=80"])
def test_a_trace_finds_every_call_of_a_replayed_step(made: Path, tmp_path: Path, step: str) -> None:
    path = tmp_path / "trace.json.gz"
    (bucket,) = explain(made, RequestedStep.parse(step), measure=True, trace=path).buckets
    time = bucket.time
    assert time is not None and time.captured and time.measured is not None and path.stat().st_size
    for call in bucket.calls:
        if call.work is not None:
            assert call.time is not None and call.time.traced is not None
            assert (call.time.traced > 0) == bool(call.work.launches), call.op
    assert sum(one.traced or 0 for one in time.kinds) == pytest.approx(time.traced)
    # What is between calls grows with whatever else the GPU does.
    calls = [one for one in time.kinds if one.kind != GAPS]
    measured, traced = (sum(getattr(one, name) or 0 for one in calls) for name in ("measured", "traced"))
    assert 0.3 * measured < traced < 3 * measured
