"""Time a step of one bucket class: roofline and prediction from the artifact alone, and measurements if there are
any."""

from collections.abc import Sequence
from dataclasses import replace

from ingot.debug.step_time.closing import gaps_of
from ingot.debug.step_time.device import Device
from ingot.debug.step_time.measurement import StepMeasurement
from ingot.debug.step_time.predict import captured_seconds, device_seconds, host_seconds, launched_seconds
from ingot.debug.step_time.times import CallTime, StepTime, kind_times
from ingot.debug.step_time.work import Work


def time_step(
    works: Sequence[Work],
    device: Device,
    *,
    captured: bool,
    taken: StepMeasurement | None = None,
) -> tuple[list[CallTime], StepTime]:
    """Return the times of each call of a step, and the time of the step.

    `works` has the work of each call. `captured` is True if a CUDA graph replays the step. `taken` has measured times.
    If it is None, all measured times in the result are None.
    """
    calls = [_call_time(work, device) for work in works]
    if taken is not None:
        calls = [
            replace(time, measured=one.device if work.launches else 0.0)
            for work, time, one in zip(works, calls, taken.instructions, strict=True)
        ]
    trace = taken.trace if taken is not None else None
    if trace is not None:
        calls = [replace(time, traced=seconds) for time, seconds in zip(calls, trace.calls, strict=True)]
    measured = None if taken is None else taken.seconds
    traced = None if trace is None else trace.step
    predicted = [time.predicted for time in calls]
    host = device.times.host
    step = StepTime(
        device=device.gpu.product,
        bandwidth=device.bandwidth,
        rate=device.rate(_dtype(works)),
        basis=device.basis,
        captured=captured,
        roofline=sum(time.roofline for time in calls),
        predicted=captured_seconds(predicted, device)
        if captured
        else launched_seconds([host_seconds(work, host) for work in works], predicted, host.step),
        measured=measured,
        traced=traced,
        kinds=(),
        gaps=(),
    )
    step = replace(step, kinds=kind_times(calls, step.predicted, measured, traced))
    return calls, replace(step, gaps=gaps_of(works, calls, step, device))


def _call_time(work: Work, device: Device) -> CallTime:
    moving, computing = work.least.bytes / device.bandwidth, work.least.flops / device.rate(work.dtype)
    return CallTime(
        kind=work.kind,
        bound="memory" if moving >= computing else "compute",
        roofline=max(moving, computing),
        predicted=device_seconds(work, device),
    )


def _dtype(works: Sequence[Work]) -> str:
    """Return the dtype of the step's first matmul; "f32" if there is no matmul.

    The GPU's rate in this dtype is used for the whole step, since matmuls have most of the flops.
    """
    return next((work.dtype for work in works if work.kind == "products"), "f32")
