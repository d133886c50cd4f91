"""NVIDIA GPUs by compute capability: the features that kernels may use, and the facts of a typical device of each."""

from collections.abc import Mapping
from dataclasses import dataclass

# The variable that names the GPUs which a process may use (CUDA C++ Programming Guide, "CUDA Environment Variables").
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """The facts of an NVIDIA GPU.

    product    its product name
    sm         its compute capability as an int (90 for Hopper)
    memory     bytes of memory
    cores      the number of multiprocessors
    bandwidth  memory bandwidth in bytes a second; None if unknown
    links      whether it reaches another GPU of this machine over NVLink
    driver     the newest CUDA version that the driver supports; "" for a GPU that is not in this machine
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
        """Return the target name of this GPU's compute capability, such as "sm_90"."""
        return f"sm_{self.sm}"


@dataclass(frozen=True)
class GpuFeature:
    """A hardware feature of GPUs with compute capabilities from `first` to `last`. `last` None means all later ones.

    `without` says what happens on GPUs without the feature. `90 in feature` tests whether capability 9.0 has it.
    """

    first: int
    without: str
    last: int | None = None

    def __contains__(self, sm: int) -> bool:
        return self.first <= sm and (self.last is None or sm <= self.last)

    @property
    def needs(self) -> str:
        return f"sm_{self.first}" if self.last == self.first else f"sm_{self.first} or newer"


# CUDA C++ Programming Guide, appendix "Compute Capabilities"; PTX ISA, "Target ISA notes" of wgmma (only sm_90a; newer
# ones have other instructions instead), of mma with e4m3 (sm_89) and with e2m1 (sm_100 and sm_120).
FEATURES: Mapping[str, GpuFeature] = {
    "cooperative_launch": GpuFeature(60, "no kernel waits for all of its blocks"),
    "bf16": GpuFeature(80, "models run in float16 or float32: --dtype"),
    "fp8": GpuFeature(89, "values stay in wider types"),
    "tma": GpuFeature(90, "tiles are copied by the threads"),
    "wgmma": GpuFeature(90, "matmuls run on mma instructions", last=90),
    "dependent_launch": GpuFeature(90, "a kernel starts when the one before it has ended"),
    "fp4": GpuFeature(100, "values stay in wider types"),
}
# A feature of the machine that does not affect code, so no identity includes it.
NVLINK = "nvlink"
WITHOUT_NVLINK = "GPUs would exchange data over PCIe"


def features_of(sm: int) -> tuple[str, ...]:
    """Return the names of the hardware features of a compute capability. `sm` is an int such as 90."""
    return tuple(name for name, feature in FEATURES.items() if sm in feature)


# Published facts of one widespread device per capability, from NVIDIA's data sheets: memory in decimal gigabytes, its
# bandwidth, and CUDA cores, 64 per multiprocessor in an A100 and 128 in the others. For H200 and B200, whose sheets
# omit the cores, the multiprocessors that the devices report.
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

# Capabilities on whose hardware Ingot's tests and benchmarks have run: an H200's. Code for others is compiled, and
# checked as far as that is possible without such a GPU.
TRIED: frozenset[int] = frozenset({90})

# Peak flops a second of matmuls by dtype, of the typical devices: the same sheets, without sparsity. On tensor cores
# with float32 accumulation; for float32 operands without TF32 rounding, outside tensor cores.
_RATES: Mapping[int, Mapping[str, float]] = {
    80: {"bf16": 312e12, "f16": 312e12, "f32": 19.5e12},
    86: {"bf16": 125e12, "f16": 125e12, "f32": 31.2e12},
    89: {"bf16": 362e12, "f16": 362e12, "f32": 91.6e12},
    90: {"bf16": 989e12, "f16": 989e12, "f32": 67e12},
    100: {"bf16": 2250e12, "f16": 2250e12, "f32": 75e12},
    120: {"bf16": 504e12, "f16": 504e12, "f32": 125e12},
}


# Warps, blocks and bytes of shared memory per multiprocessor. Each block takes `_RESERVED` bytes in addition to its own
# (CUDA C++ Programming Guide, technical specifications by compute capability).
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
    """Return how many thread blocks one multiprocessor of `gpu` can run at once; at least 1.

    Each block has `warps` warps and `shared` bytes of shared memory. Registers are not considered.
    """
    most_warps, blocks, memory = _ROOM[_known(gpu.sm, _ROOM)]
    return max(1, min(blocks, most_warps // warps, memory // (shared + _RESERVED)))


def _known(sm: int, table: Mapping[int, object]) -> int:
    """Return the key of `table` to use for the compute capability `sm`.

    It is `sm` if the table has it, else the nearest key below it, else the smallest key.
    """
    return max((one for one in table if one <= sm), default=min(table))


def matmul_rate(gpu: Gpu, dtype: str) -> float:
    """Return the peak matmul flops a second of `gpu`, for a dtype name such as "bf16".

    It is the rate of a typical device, scaled by the number of multiprocessors. That device has this GPU's compute
    capability, or the nearest known one below. Dtypes without a known rate get the rate of float32.
    """
    known = _known(gpu.sm, _RATES)
    rates = _RATES[known]
    return rates.get(dtype, rates["f32"]) * gpu.cores / TYPICAL[f"sm_{known}"].cores


def visible_gpus(count: int, variable: str | None) -> list[str]:
    """Return the names of the GPUs that this process can use, as CUDA_VISIBLE_DEVICES takes them.

    count      the number of them, from the driver
    variable   the value of CUDA_VISIBLE_DEVICES; None: it is not set
    """
    if variable is None:
        return [str(index) for index in range(count)]
    return [name.strip() for name in variable.split(",")][:count]  # the driver ignores all after a name that is wrong
