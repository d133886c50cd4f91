"""The time of a step of one bucket class: roofline and prediction from the artifact alone, beside measurements."""

from collections.abc import Sequence
from dataclasses import replace

from ingot.debug.step_time.closing import gaps_of
from ingot.debug.step_time.device import Device
from ingot.debug.step_time.predict import captured_seconds, device_seconds, host_seconds, launched_seconds
from ingot.debug.step_time.times import CallTime, StepTime, kind_times
from ingot.debug.step_time.work import Work


def time_step(
    works: Sequence[Work],
    device: Device,
    *,
    captured: bool,
    measured: Sequence[float] | None = None,
    whole: float | None = None,
) -> tuple[list[CallTime], StepTime]:
    """The times of calls, and of the step that they make. `measured` are seconds of the calls and `whole` of the step,
    where somebody measured them."""
    calls = [_call_time(work, device) for work in works]
    if measured is not None:
        calls = [
            replace(time, measured=seconds if work.launches else 0.0)
            for work, time, seconds in zip(works, calls, measured, strict=True)
        ]
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
        measured=whole,
        kinds=(),
        gaps=(),
    )
    step = replace(step, kinds=kind_times(calls, step.predicted, whole))
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
    """Of the products, which are most of the flops."""
    return next((work.dtype for work in works if work.kind == "products"), "f32")
