"""The GPU that step times are predicted for, with its peak bandwidth and rates."""

from dataclasses import dataclass

from ingot.ir.errors import TargetError
from ingot.ir.machine.find_gpu import find_gpu
from ingot.ir.machine.gpu_times import H200_TIMES, GpuTimes
from ingot.ir.machine.gpus import TYPICAL, Gpu, matmul_rate


@dataclass(frozen=True)
class Device:
    """A GPU that step times are predicted for.

    `bandwidth` is its memory bandwidth in bytes a second. `times` are time constants of kernels, perhaps measured on
    another GPU.
    """

    gpu: Gpu
    bandwidth: int
    times: GpuTimes

    def rate(self, dtype: str) -> float:
        return matmul_rate(self.gpu, dtype)

    @property
    def slower_memory(self) -> float:
        """Return the factor that converts times of memory-bound kernels to this GPU.

        It is the bandwidth of the GPU on which the times were measured, divided by this GPU's bandwidth.
        """
        measured = self.times.gpu.bandwidth
        assert measured is not None
        return measured / self.bandwidth

    @property
    def basis(self) -> str:
        """Return text that names the GPU on which the time constants were measured.

        The text also says whether the constants are scaled to this GPU.
        """
        measured = self.times.gpu.product
        if measured == self.gpu.product:
            return f"constants measured on {measured}"
        return f"constants measured on {measured}, scaled by the bandwidth and rate of {self.gpu.product}"


def device_of(target: str) -> Device | None:
    """Return the GPU to predict step times for; None if `target` is not a GPU or the bandwidth is unknown.

    `target` is the artifact's target, such as "sm_90". This machine's GPU is used if it matches the target. Otherwise a
    typical GPU of the target is used. Published figures of a GPU take precedence over the driver's.
    """
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
