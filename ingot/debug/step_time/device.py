"""The GPU that step times are predicted for, with its peak bandwidth and rates."""

from dataclasses import dataclass

from ingot.ir.errors import TargetError
from ingot.ir.machine.find_gpu import find_gpu
from ingot.ir.machine.gpu_times import H200_TIMES, GpuTimes
from ingot.ir.machine.gpus import TYPICAL, Gpu, matmul_rate


@dataclass(frozen=True)
class Device:
    """A GPU with its bandwidth in bytes a second, and the time constants of the kernels that run on it."""

    gpu: Gpu
    bandwidth: int
    times: GpuTimes

    def rate(self, dtype: str) -> float:
        return matmul_rate(self.gpu, dtype)

    @property
    def slower_memory(self) -> float:
        """Return the memory bandwidth of the GPU that the constants were measured on, divided by this GPU's. Times of
        memory-bound kernels scale with it."""
        measured = self.times.gpu.bandwidth
        assert measured is not None
        return measured / self.bandwidth

    @property
    def basis(self) -> str:
        """Return a phrase that names the GPU that the constants were measured on, and whether they are scaled."""
        measured = self.times.gpu.product
        if measured == self.gpu.product:
            return f"constants measured on {measured}"
        return f"constants measured on {measured}, scaled by the bandwidth and rate of {self.gpu.product}"


def device_of(target: str) -> Device | None:
    """Return this machine's GPU if it matches the target, else the typical GPU of the target. None for a target that is
    not a GPU, or for a GPU of unknown bandwidth. Published numbers take precedence over the driver's."""
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
