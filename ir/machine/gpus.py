"""NVIDIA GPUs by compute capability: what code for them may use, and a typical device of each."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A device: product name, compute capability as an int (90 for Hopper), bytes of memory, multiprocessors, and bytes
    that its memory moves in a second (None where it is not known).

    `links`: it reaches another GPU of this machine over NVLink. `driver` is the newest CUDA that the driver knows, ""
    for a device that is only named.
    """

    product: str
    sm: int
    memory: int
    cores: int
    bandwidth: int | None
    links: bool = False
    driver: str = ""

    @property
    def target(self) -> str:
        """The name of the target that it is."""
        return f"sm_{self.sm}"


@dataclass(frozen=True)
class GpuFeature:
    """Something that kernels may use from the compute capability `first` up to `last`; and what is done `without`."""

    first: int
    without: str
    last: int | None = None

    def __contains__(self, sm: int) -> bool:
        return self.first <= sm and (self.last is None or sm <= self.last)

    @property
    def needs(self) -> str:
        return f"sm_{self.first}" if self.last == self.first else f"sm_{self.first} or newer"


# CUDA C++ Programming Guide, appendix "Compute Capabilities"; PTX ISA, "Target ISA notes" of wgmma (sm_90a alone: newer
# ones have other instructions in its place), of mma with e4m3 (sm_89) and with e2m1 (sm_100 and sm_120).
FEATURES: Mapping[str, GpuFeature] = {
    "cooperative_launch": GpuFeature(60, "no kernel waits for all of its blocks"),
    "bf16": GpuFeature(80, "models run in float16 or float32: --dtype"),
    "fp8": GpuFeature(89, "values stay in wider types"),
    "tma": GpuFeature(90, "tiles are copied by the threads"),
    "wgmma": GpuFeature(90, "products run on mma instructions", last=90),
    "dependent_launch": GpuFeature(90, "a kernel starts when the one in front of it has ended"),
    "fp4": GpuFeature(100, "values stay in wider types"),
}
# What is found on a machine and decides no code, so that it is in no identity.
NVLINK = "nvlink"
WITHOUT_NVLINK = "GPUs would exchange data over PCIe"


def features_of(sm: int) -> tuple[str, ...]:
    """The features that a compute capability brings."""
    return tuple(name for name, feature in FEATURES.items() if sm in feature)


# Published facts of one widespread device each: NVIDIA's data sheets of the products (memory in decimal gigabytes, its
# bandwidth, and CUDA cores, of which a multiprocessor has 64 in an A100 and 128 in the others); for H200 and B200,
# whose sheets leave the cores out, the multiprocessors that the devices report.
TYPICAL: Mapping[str, Gpu] = {
    gpu.target: gpu
    for gpu in (
        Gpu("NVIDIA A100 80GB SXM", 80, 80 * 10**9, 108, 2_039 * 10**9),
        Gpu("NVIDIA A10", 86, 24 * 10**9, 72, 600 * 10**9),
        Gpu("NVIDIA L40S", 89, 48 * 10**9, 142, 864 * 10**9),
        Gpu("NVIDIA H200", 90, 141 * 10**9, 132, 4_800 * 10**9),
        Gpu("NVIDIA B200", 100, 180 * 10**9, 148, 8_000 * 10**9),
        Gpu("NVIDIA RTX PRO 6000 Blackwell", 120, 96 * 10**9, 188, 1_792 * 10**9),
    )
}

# Flops a second that products come to at most, by dtype, of the typical devices: the same sheets, without sparsity; on
# tensor cores where they sum up in float32, and beside them where products of float32 are not rounded to TF32.
_RATES: Mapping[int, Mapping[str, float]] = {
    80: {"bf16": 312e12, "f16": 312e12, "f32": 19.5e12},
    86: {"bf16": 125e12, "f16": 125e12, "f32": 31.2e12},
    89: {"bf16": 362e12, "f16": 362e12, "f32": 91.6e12},
    90: {"bf16": 989e12, "f16": 989e12, "f32": 67e12},
    100: {"bf16": 2250e12, "f16": 2250e12, "f32": 75e12},
    120: {"bf16": 504e12, "f16": 504e12, "f32": 125e12},
}


# Warps and blocks that find room on a multiprocessor, and bytes of their shared memory, of which each block takes
# `_RESERVED` beside its own (CUDA C++ Programming Guide, technical specifications by compute capability).
_ROOM: Mapping[int, tuple[int, int, int]] = {
    80: (64, 32, 164 << 10),
    86: (48, 16, 100 << 10),
    89: (48, 24, 100 << 10),
    90: (64, 32, 228 << 10),
    100: (64, 32, 228 << 10),
    120: (48, 24, 100 << 10),
}
_RESERVED = 1 << 10


def resident_blocks(gpu: Gpu, warps: int, shared: int) -> int:
    """How many blocks of so many warps, each with `shared` bytes of shared memory, find room on a multiprocessor at
    once, as far as registers allow it."""
    most_warps, blocks, memory = _ROOM[_known(gpu.sm, _ROOM)]
    return max(1, min(blocks, most_warps // warps, memory // (shared + _RESERVED)))


def _known(sm: int, table: Mapping[int, object]) -> int:
    """The capability itself, or the last one before it that a table has."""
    return max((one for one in table if one <= sm), default=min(table))


def product_rate(gpu: Gpu, dtype: str) -> float:
    """Flops a second of products of a dtype, by its IR name: those of the typical device of the capability, or of the
    last one before it that is known, by the number of multiprocessors. Other dtypes are computed in float32."""
    known = _known(gpu.sm, _RATES)
    rates = _RATES[known]
    return rates.get(dtype, rates["f32"]) * gpu.cores / TYPICAL[f"sm_{known}"].cores
