"""The GPU that times are for, and what it moves and computes at best."""

from dataclasses import dataclass

from ingot.ir.errors import TargetError
from ingot.ir.machine.find_gpu import find_gpu
from ingot.ir.machine.gpu_times import H200_TIMES, GpuTimes
from ingot.ir.machine.gpus import TYPICAL, Gpu, product_rate


@dataclass(frozen=True)
class Device:
    """A GPU with its bandwidth in bytes a second, and the constants of the kernels that run on it."""

    gpu: Gpu
    bandwidth: int
    times: GpuTimes

    def rate(self, dtype: str) -> float:
        return product_rate(self.gpu, dtype)

    @property
    def slower_memory(self) -> float:
        """How much longer a byte takes than on the device that the constants were measured on."""
        measured = self.times.gpu.bandwidth
        assert measured is not None
        return measured / self.bandwidth

    @property
    def basis(self) -> str:
        """What the constants are of."""
        measured = self.times.gpu.product
        if measured == self.gpu.product:
            return f"constants measured on {measured}"
        return f"constants measured on {measured}, scaled by the bandwidth and rate of {self.gpu.product}"


def device_of(target: str) -> Device | None:
    """This machine's GPU where it is one of the target, else the typical one; None for a target that is no GPU, or one
    whose bandwidth nobody says. Published numbers come before those that a driver reports."""
    typical = TYPICAL.get(target)
    try:
        here = find_gpu()
    except TargetError:
        here = None
    gpu = here if here is not None and here.target == target else typical
    if gpu is not None and typical is not None and gpu.product == typical.product:
        gpu = typical
    if gpu is None or gpu.bandwidth is None:
        return None
    return Device(gpu, gpu.bandwidth, H200_TIMES)
