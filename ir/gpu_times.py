"""What kernels take on a GPU beside what its memory and its arithmetic take: the constants of predicted times."""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.ir.gpus import TYPICAL, Gpu


@dataclass(frozen=True)
class KernelTime:
    """A launch takes `latency` seconds, and then the longer of two: its bytes at the share `bandwidth` of what the
    memory moves, its flops at the share `rate` of what products come to. Shares are of published numbers. Small values
    come from caches, faster than the memory: a share may be above 1. With a share of 0 the launch only takes its
    latency, and another one of the same call carries the work."""

    latency: float
    bandwidth: float = 0.0
    rate: float = 1.0


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


_US = 1e-6
# PRELIMINARY
H200_TIMES = GpuTimes(
    gpu=TYPICAL["sm_90"],
    kernels={
        "linear_matvec": KernelTime(1.2 * _US, 0.95),
        "linear_tile": KernelTime(3.0 * _US, 0.92),
        "normalize_rows": KernelTime(1.5 * _US),
        "decode_attention": KernelTime(7.0 * _US, 0.85),
        "prefill_attention": KernelTime(5.0 * _US, 0.85, 0.4),
        "feed": KernelTime(1.4 * _US, 1.0),
        "gather": KernelTime(0.8 * _US, 1.0),
        "advance": KernelTime(0.6 * _US, 1.0),
        "norm": KernelTime(0.9 * _US, 1.0),
        "gate_mul": KernelTime(0.8 * _US, 1.0),
        "convert": KernelTime(0.8 * _US, 1.0),
        "arithmetic": KernelTime(0.8 * _US, 1.0),
        "count_tokens": KernelTime(0.7 * _US, 1.0),
        "penalize": KernelTime(0.8 * _US, 0.8),
        "choose_largest": KernelTime(1.7 * _US, 0.5),
        "find_threshold": KernelTime(0.6 * _US),
        "draw": KernelTime(0.6 * _US),
        "top_logprobs": KernelTime(0.7 * _US, 1.0),
        "qk_norm_rope_append": KernelTime(1.5 * _US, 1.0),
        "cublas linear": KernelTime(3.0 * _US, 0.9, 0.7),
    },
    other=KernelTime(2.0 * _US, 0.8, 0.5),
    between=8.0 * _US,
    host=HostTime(call=8 * _US, kernel=4 * _US, library=8 * _US, view=2 * _US, step=50 * _US),
)
