"""What kernels take on a GPU beside what its memory and its arithmetic take: the constants of predicted times."""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.ir.gpus import TYPICAL, Gpu


@dataclass(frozen=True)
class KernelTime:
    """A launch takes `latency` seconds, `wave` for each wave of its programs, and then the longest of three: its bytes
    at the share `bandwidth` of what the memory moves, the bytes of the busiest multiprocessor at `stream` bytes a
    second (0: at any rate), and its flops at the share `rate` of what it computes. Shares are of published numbers. Of
    several launches of a call the slowest carries its work; with a bandwidth of 0 a launch carries none."""

    latency: float
    bandwidth: float = 0.0
    rate: float = 1.0
    wave: float = 0.0
    stream: float = 0.0


@dataclass(frozen=True)
class HostTime:
    """Seconds until the host has launched: a call of compiled kernels, each kernel of it, a call of torch, a view; and
    what a step takes on the host before the first and after the last one."""

    call: float
    kernel: float
    library: float
    view: float
    step: float


@dataclass(frozen=True)
class GpuTimes:
    """Measured on `gpu`: kernels by their names, or by provider and op where the code is somebody else's; `other` is
    for those that nobody measured. `between` is what passes from the last kernel of a captured step to the first one
    of the next. A latency is that of a launch in a row of dependent ones."""

    gpu: Gpu
    kernels: Mapping[str, KernelTime]
    other: KernelTime
    between: float
    host: HostTime

    def of(self, kernel: str) -> KernelTime:
        return self.kernels.get(kernel, self.other)


_US = 1e-6
# One H200 with CUDA 13.0 and Triton 3.6.0: medians of rows of equal calls in a CUDA graph, over weights that no cache
# holds, at 1 to 2048 tokens of Llama-3.2-1B and Llama-3.1-8B; the host is a Xeon with Python 3.12. To measure them
# again: `ingot explain --measure`, which times the same rows.
H200_TIMES = GpuTimes(
    gpu=TYPICAL["sm_90"],
    kernels={
        "linear_matvec": KernelTime(1.2 * _US, 0.95),
        "linear_tile": KernelTime(3.2 * _US, 0.90),
        "cublas linear": KernelTime(3.3 * _US, 0.84, 0.80, wave=2.6 * _US, stream=220e9),
        "decode_attention": KernelTime(8.0 * _US, 0.77),
        "prefill_attention": KernelTime(5.5 * _US, 0.80, 0.26),
        "qk_norm_rope_append": KernelTime(1.4 * _US, 0.85),
        # These two as the one that joins them.
        "rope": KernelTime(1.4 * _US, 0.85),
        "kv_append": KernelTime(1.4 * _US, 0.85),
        "norm": KernelTime(1.6 * _US, 1.00),
        "gate_mul": KernelTime(0.7 * _US, 0.87),
        "arithmetic": KernelTime(0.7 * _US, 1.00),
        "convert": KernelTime(0.7 * _US, 0.75),
        "gather": KernelTime(0.7 * _US, 0.75),
        "feed": KernelTime(1.2 * _US, 0.75),
        "count_tokens": KernelTime(0.7 * _US, 0.75),
        "penalize": KernelTime(0.8 * _US, 0.50),
        "choose_largest": KernelTime(1.5 * _US, 0.50),
        "find_threshold": KernelTime(0.6 * _US),
        "draw": KernelTime(0.6 * _US),
        "top_logprobs": KernelTime(0.6 * _US, 0.75),
        "advance": KernelTime(0.6 * _US, 0.75),
    },
    other=KernelTime(2.0 * _US, 0.75, 0.50),
    between=12.0 * _US,
    host=HostTime(call=7 * _US, kernel=6 * _US, library=16 * _US, view=3 * _US, step=100 * _US),
)
