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
    """Return the seconds of a matmul after its launch. `product` is [rows, columns, depth], `done` the flops and bytes.

    A multiprocessor computes its tiles one after another. Each tile reads its operands at `kernel.stream` bytes a
    second, and multiplies all of its rows and columns, full or empty. If the depth is split, one more launch adds the
    parts. It costs `kernel.wave` seconds and its memory traffic.
    """
    moving = done.bytes / (kernel.bandwidth * device.bandwidth)
    return min(max(moving, computing) + adding for computing, adding in _cuts(product, dtype, kernel, device))


def _cuts(
    product: tuple[int, int, int], dtype: str, kernel: KernelTime, device: Device
) -> Iterator[tuple[float, float]]:
    """Yield two times for each possible tiling of a matmul [rows, columns, depth]. They are the seconds of the busiest
    multiprocessor, and the seconds to add the parts if the depth is split."""
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
