"""The GPU that step times are predicted for, with its peak bandwidth and rates."""

from dataclasses import dataclass

from ingot.ir.errors import TargetError
from ingot.ir.machine.find_gpu import find_gpu
from ingot.ir.machine.gpu_times import H200_TIMES, GpuTimes
from ingot.ir.machine.gpus import TYPICAL, Gpu, matmul_rate


@dataclass(frozen=True)
class Device:
    """A GPU that step times are predicted for: its memory bandwidth in bytes a second, and the measured time constants
    of kernels."""

    gpu: Gpu
    bandwidth: int
    times: GpuTimes

    def rate(self, dtype: str) -> float:
        return matmul_rate(self.gpu, dtype)

    @property
    def slower_memory(self) -> float:
        """Return the factor for times of memory-bound kernels that were measured on another GPU: that GPU's memory
        bandwidth divided by this one's."""
        measured = self.times.gpu.bandwidth
        assert measured is not None
        return measured / self.bandwidth

    @property
    def basis(self) -> str:
        """Return text for reports: which GPU the time constants were measured on, and whether they are scaled to this
        GPU."""
        measured = self.times.gpu.product
        if measured == self.gpu.product:
            return f"constants measured on {measured}"
        return f"constants measured on {measured}, scaled by the bandwidth and rate of {self.gpu.product}"


def device_of(target: str) -> Device | None:
    """Return the GPU to predict step times for: this machine's, if it matches `target` such as "sm_90", else a typical
    GPU of the target. None if the target is not a GPU, or the bandwidth is unknown. Published numbers take precedence
    over the driver's."""
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
