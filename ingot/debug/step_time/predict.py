"""Predict times from the work of calls and the constants of their kernels, without running anything."""

from collections.abc import Iterable, Sequence

from ingot.backends.triton.lower.linear.problem import LINEAR
from ingot.debug.step_time.device import Device
from ingot.debug.step_time.library_product import product_seconds
from ingot.debug.step_time.programs import Launched
from ingot.debug.step_time.work import Work
from ingot.ir.machine.gpu_times import HostTime, KernelTime


def device_seconds(work: Work, device: Device) -> float:
    """Predict the device time of a call that runs among other calls.

    For a matmul kernel with a measured time in the tuning log, that time is used. Otherwise the time is computed from
    flops, bytes and launches.
    """
    choice = work.choice
    # The time of attention depends on contexts, which the log does not record.
    if choice is not None and choice.microseconds is not None and choice.kernel == LINEAR:
        # A time in the table is for one device; a measured or given time is for the target's.
        slower = device.slower_memory if choice.source == "table" else 1.0
        return choice.microseconds * 1e-6 * slower + sum(device.times.of(one.name).beyond for one in work.launches)
    kernels = [(one, device.times.of(one.name)) for one in work.launches]
    begun = sum(kernel.latency + kernel.wave * one.waves for one, kernel in kernels)
    return begun + max((_carried(work, one, kernel, device) for one, kernel in kernels), default=0.0)


def _carried(work: Work, launch: Launched, kernel: KernelTime, device: Device) -> float:
    if not kernel.bandwidth:
        return 0.0
    if work.product is not None and kernel.stream:
        return product_seconds(work.product, work.done, work.dtype, kernel, device)
    moving = work.done.bytes / (kernel.bandwidth * device.bandwidth)
    computing = work.done.flops * launch.uneven / (kernel.rate * device.rate(work.dtype))
    streaming = work.done.bytes * launch.uneven / (kernel.stream * device.gpu.cores) if kernel.stream else 0.0
    return max(moving, computing, streaming)


def host_seconds(work: Work, host: HostTime) -> float:
    """Predict the seconds that the host needs to launch a call, from the time constants in `host`."""
    if work.compiled:
        return host.call + host.kernel * len(work.launches)
    return host.library if work.launches else host.view


def captured_seconds(device: Iterable[float], device_model: Device) -> float:
    """Predict the time of a step that is replayed from a CUDA graph.

    It is the sum of the calls' times and the gap between two steps. `device` has the device seconds of each call.
    `device_model` is the GPU.
    """
    return sum(device) + device_model.times.between


def launched_seconds(host: Sequence[float], device: Sequence[float], around: float) -> float:
    """Predict the time of a step with calls that the host launches one by one.

    `host` has the seconds that the host needs to launch each call. `device` has the seconds of each call on the device.
    A call begins when it has been launched and the previous call has ended. `around` is the host's time before the
    first launch.
    """
    launched, ended = around, 0.0
    for launching, running in zip(host, device, strict=True):
        launched += launching
        ended = max(ended, launched) + running
    return ended
