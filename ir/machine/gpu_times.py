"""The constants that predict kernel times: launch latencies, and the shares of bandwidth and flops that are reached."""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.ir.machine.gpus import TYPICAL, Gpu


@dataclass(frozen=True)
class KernelTime:
    """The constants that predict the time of one launch of a kernel.

    The predicted time is `latency` seconds, plus `wave` seconds per wave of thread blocks, plus the longest of:

    - the time to move all bytes, at the fraction `bandwidth` of the memory's published bandwidth
    - the time to move the bytes of the busiest multiprocessor, at `stream` bytes a second (0: no limit)
    - the time to compute, at the fraction `rate` of the GPU's published flops

    If a call has several launches, the slowest of them counts as doing all work. A launch with bandwidth 0 takes only
    its latency and waves.

    For a library's matmul, `stream` limits how fast a multiprocessor reads operands. If the library splits the sums of
    the matmul, adding the partial sums takes another `wave` seconds.

    If the tuning log has a time for a matmul, this time plus `beyond` seconds is predicted. `beyond` is there because
    the input rows differ from the rows that were timed.
    """

    latency: float
    bandwidth: float = 0.0
    rate: float = 1.0
    wave: float = 0.0
    stream: float = 0.0
    beyond: float = 0.0


@dataclass(frozen=True)
class HostTime:
    """The seconds that the host needs for each part of a step.

    call     a call of compiled kernels, without its launches
    kernel   one kernel launch of such a call
    library  a call of a torch op
    view     a view of a tensor
    step     the time before the first launch and after the last launch of a step
    """

    call: float
    kernel: float
    library: float
    view: float
    step: float


@dataclass(frozen=True)
class GpuTimes:
    """The constants that predict step times on `gpu`, fitted to measurements.

    kernels  the constants of a kernel, by kernel name; for a library's kernel by backend and op, as "cublas linear"
    other    the constants of kernels that were not measured
    between  seconds from the last kernel of a step's CUDA graph to the first kernel of the next step
    host     the times of the host
    link     the bytes a second of a large copy from one such GPU to another over NVLink; None if it was not measured

    Latencies are measured with each launch waiting for the launch before.
    """

    gpu: Gpu
    kernels: Mapping[str, KernelTime]
    other: KernelTime
    between: float
    host: HostTime
    link: int | None = None

    def of(self, kernel: str) -> KernelTime:
        return self.kernels.get(kernel, self.other)


_US = 1e-6
# One H200 with CUDA 13.0, Triton 3.6.0 and FlashInfer 0.6.13. The times are medians of chains of equal calls in a CUDA
# graph, over weights that fit no cache, in 28 steps of Llama-3.2-1B and Llama-3.1-8B with 1 to 2048 tokens. `ingot
# explain --measure` takes them, and benchmarks/fit_times.py fits them; the time between steps is from a profiler's
# trace. Attention of few tokens is from benchmarks/kernels/tune_attention.py, when it timed all attention alone.
# Attention of prompts is from benchmarks/kernels/prefill.py for FlashInfer's kernels (16 steps with heads of 64 and
# 128, within a tenth), and from an earlier run of the same steps for Ingot's. The host is a Xeon with Python 3.12.
H200_TIMES = GpuTimes(
    gpu=TYPICAL["sm_90"],
    kernels={
        "linear_matvec": KernelTime(1.2 * _US, 0.95),
        "linear_tile": KernelTime(3.2 * _US, 0.9, beyond=0.77 * _US),
        "cublas linear": KernelTime(1.7 * _US, 0.81, 0.77, wave=2 * _US, stream=1.7e11),
        "decode_attention": KernelTime(4.3 * _US, 0.85, wave=3.6 * _US, stream=4.6e10),
        # From benchmarks/kernels/latents.py, with 16 heads for the bandwidth and with 128 for the rate.
        "find_splits": KernelTime(2.0 * _US),
        "decode_latents": KernelTime(6.0 * _US, 0.85, 0.6),
        # From one layer of 64 sequences that share 2048 and 8192 tokens, heads of 64.
        "shared_attention": KernelTime(6.0 * _US, 0.5, 0.22),
        "prefill_attention": KernelTime(9.1 * _US, 0.8, 0.3),
        "flashinfer paged_attention": KernelTime(8 * _US, 0.52, 0.8, wave=6 * _US),
        "flashinfer paged_attention, heads of 64": KernelTime(9 * _US, 0.52, 0.55, wave=5 * _US),
        "qk_norm_rope_append": KernelTime(1.4 * _US, 0.82, wave=0.14 * _US),
        # Deterministic mode: estimates from the two most similar kernels.
        "linear_blocks": KernelTime(4.2 * _US, 0.85, 0.45),
        "invariant_attention": KernelTime(8.0 * _US, 0.60, 0.20),
        # The same as the kernel that fuses these two.
        "rope": KernelTime(1.4 * _US, 0.85, wave=0.2 * _US),
        "kv_append": KernelTime(1.4 * _US, 0.85, wave=0.2 * _US),
        "norm": KernelTime(1.3 * _US, 1.1, wave=0.24 * _US),
        "gate_mul": KernelTime(1.3 * _US, 0.95, wave=0.23 * _US),
        "arithmetic": KernelTime(0.67 * _US, 1.2, wave=0.28 * _US),
        "convert": KernelTime(0.25 * _US, 0.94, wave=0.38 * _US),
        "gather": KernelTime(0.7 * _US, 0.85, wave=0.36 * _US),
        # Estimates from the most similar kernels.
        **dict.fromkeys(("step_attention", "step_latent_attention"), KernelTime(9.1 * _US, 0.8, 0.3)),
        "head_linear_few": KernelTime(3.2 * _US, 0.9),
        "head_linear_blocks": KernelTime(4.2 * _US, 0.85, 0.45),
        "cached_lens": KernelTime(0.25 * _US, 0.94),
        "merge_attention": KernelTime(1.3 * _US, 0.85),
        **dict.fromkeys(("mix_streams", "join"), KernelTime(0.67 * _US, 1.2, wave=0.28 * _US)),
        **dict.fromkeys(("match_size", "keep_above"), KernelTime(1.3 * _US, 1.1, wave=0.24 * _US)),
        "pool_rows": KernelTime(0.7 * _US, 0.85, wave=0.36 * _US),
        "unit_rows": KernelTime(1.3 * _US, 1.1, wave=0.24 * _US),
        "feed": KernelTime(1.6 * _US, 0.62),
        "page_slots": KernelTime(1.6 * _US, 0.62),  # an estimate from the most similar kernel
        "count_tokens": KernelTime(2.1 * _US, 0.55),
        "choose_largest": KernelTime(1.6 * _US, 0.52, wave=0.48 * _US),
        "find_threshold": KernelTime(0.54 * _US),
        "draw": KernelTime(0.54 * _US),
        "top_logprobs": KernelTime(0.8 * _US, 0.0099),
        "advance": KernelTime(0.88 * _US, 0.73),
    },
    other=KernelTime(2.0 * _US, 0.75, 0.50),
    between=11 * _US,
    host=HostTime(call=7 * _US, kernel=6 * _US, library=16 * _US, view=3 * _US, step=100 * _US),
    link=394 * 10**9,  # benchmarks/results/collectives.json, "peer_copy"
)
