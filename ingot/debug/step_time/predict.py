"""Times that follow from what a call does and from constants of its kernels: nothing is run."""

from collections.abc import Iterable, Sequence

from ingot.backends.triton.lower.linear_problem import LINEAR
from ingot.debug.step_time.device import Device
from ingot.debug.step_time.work import Work
from ingot.ir.gpu_times import HostTime, KernelTime


def device_seconds(work: Work, device: Device) -> float:
    """What a call takes on the device, in a row of calls: by the tuning log where that has a time, else by its
    kernels."""
    choice = work.choice
    # What attention takes depends on contexts, which the log does not tell.
    if choice is not None and choice.microseconds is not None and choice.kernel == LINEAR:
        # A time of the table is of one device; one that was measured or given is of the one that is compiled for.
        return choice.microseconds * 1e-6 * (device.slower_memory if choice.source == "table" else 1.0)
    kernels = [device.times.of(name) for name in work.kernels]
    carried = max((_carried(work, one, device) for one in kernels), default=0.0)
    return sum(one.latency for one in kernels) + carried


def _carried(work: Work, kernel: KernelTime, device: Device) -> float:
    if not kernel.bandwidth:
        return 0.0
    moving = work.done.bytes / (kernel.bandwidth * device.bandwidth)
    computing = work.done.flops / (kernel.rate * device.rate(work.dtype))
    return max(moving, computing, kernel.position * work.positions)


def host_seconds(work: Work, host: HostTime) -> float:
    """Until the host has launched a call."""
    if work.compiled:
        return host.call + host.kernel * len(work.kernels)
    return host.library if work.kernels else host.view


def captured_seconds(device: Iterable[float], device_model: Device) -> float:
    """A step that is a captured graph: its calls, and what stands between two steps."""
    return sum(device) + device_model.times.between


def launched_seconds(host: Sequence[float], device: Sequence[float], around: float) -> float:
    """A step that the host launches call by call: a call begins when it was launched and the one in front of it has
    ended. `around` passes on the host before the first one."""
    launched, ended = around, 0.0
    for launching, running in zip(host, device, strict=True):
        launched += launching
        ended = max(ended, launched) + running
    return ended
