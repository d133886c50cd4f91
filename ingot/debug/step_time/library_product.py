"""Model the time of a library's matmul. Its tiling is not published, so assume the tiling that the model finds
fastest."""

import math
from collections.abc import Iterator

from ingot.debug.step_time.device import Device
from ingot.ir.machine.gpu_times import KernelTime
from ingot.ir.ops.registry import Cost
from ingot.ir.types import DTYPES

# Rows and columns of a tile, and splits of the depth, for which cuBLAS has kernels on compute capability 9.0 (seen in
# profiles of 64 to 2048 rows).
_SIZES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 128))
_PARTS = (1, 2, 3, 4, 6, 8)
# Partial sums are written in float32 and read again to add them up.
_PART_BYTES = 2 * 4


def product_seconds(product: tuple[int, int, int], done: Cost, dtype: str, kernel: KernelTime, device: Device) -> float:
    """Predict the seconds of a library's matmul on a GPU, without its launch.

    `product` is [rows, columns, depth] of the matmul. `done` has its flops and bytes. `kernel` has the measured
    constants of such matmuls.

    The time is predicted for each tiling, and the fastest tiling counts. A multiprocessor computes one tile after
    another. It reads operands at `kernel.stream` bytes a second. Partly empty tiles take as long as full ones. If the
    depth is split, adding the partial sums costs `kernel.wave` seconds for another launch, and memory traffic.
    """
    moving = done.bytes / (kernel.bandwidth * device.bandwidth)
    return min(max(moving, computing) + adding for computing, adding in _cuts(product, dtype, kernel, device))


def _cuts(
    product: tuple[int, int, int], dtype: str, kernel: KernelTime, device: Device
) -> Iterator[tuple[float, float]]:
    """Yield two times, in seconds, for each tiling that a library may choose for a matmul.

    `product` is [rows, columns, depth] of the matmul. The first time is the busiest multiprocessor's. The second is the
    time to add partial sums. It is 0 if the depth is not split.
    """
    rows, columns, depth = product
    rate = kernel.rate * device.rate(dtype) / device.gpu.cores
    for high, wide in _SIZES:
        for parts in _PARTS:
            tiles = math.ceil(rows / high) * math.ceil(columns / wide) * parts
            share = depth / parts
            reading = (high + wide) * share * DTYPES[dtype].itemsize / kernel.stream
            multiplying = 2 * high * wide * share / rate
            adding = 0.0
            if parts > 1:
                adding = kernel.wave + rows * columns * parts * _PART_BYTES / (kernel.bandwidth * device.bandwidth)
            yield math.ceil(tiles / device.gpu.cores) * max(reading, multiplying), adding
