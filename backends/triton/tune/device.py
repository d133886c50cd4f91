"""Run schedules (kernel launches) on the GPU for tuning: compile, launch with Triton's launcher, and time CUDA graphs.

Each launch of a graph may begin before the previous one has ended.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime.jit import MockTensor, create_function_from_signature

from ingot.backends.ptxas import use_ptxas
from ingot.backends.triton.compile import source_type
from ingot.backends.triton.launches import WARP, evaluate
from ingot.backends.triton.schedule import Argument, Schedule, Value
from ingot.ir.cache.dtype import is_narrow
from ingot.ir.machine.device_clock import median_seconds
from ingot.ir.types import DTYPES

DEVICE = "cuda"
ROUNDS = 7  # a time is the median of this many runs
POOL = 3 << 30  # bytes of memory that launches read at random: sixty times the last-level cache of an H200


@dataclass(frozen=True)
class Machine:
    """The GPU to compile for: its compute capability `sm`, and its number of multiprocessors `cores`.

    `dependent` says whether it supports programmatic dependent launch.
    """

    sm: int
    cores: int
    dependent: bool = True


def compile_launches(schedule: Schedule, sizes: Mapping[str, int]) -> list[CompiledKernel]:
    """Compile the kernels of a schedule (kernel launches) into Triton's cache on disk, without using the GPU.

    `sizes` maps dims, such as "T", to sizes. Triton's cache key depends on a kernel's arguments, so this function
    passes mocks of them.
    """
    use_ptxas()
    target = GPUTarget("cuda", schedule.sm, WARP)
    backend = make_backend(target)
    compiled = []
    for launch in schedule.launches:
        arguments = {name: _stand_in(value, sizes) for name, value in launch.arguments.items()}
        given = {**arguments, **launch.constants, **launch.options}
        given |= {"debug": launch.kernel.debug or knobs.runtime.debug}
        given |= {"instrumentation_mode": knobs.compilation.instrumentation_mode}
        binder = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
        bound, specialization, options = binder(**given)
        options, signature, constants, attributes = launch.kernel._pack_args(
            backend, given, bound, specialization, options
        )
        source = source_type(launch.kernel)(launch.kernel, signature, constants, attributes)
        compiled.append(triton.compile(source, target=target, options=options.__dict__))
    return compiled


def _stand_in(value: Argument, sizes: Mapping[str, int]) -> Any:
    """Return a mock of a kernel argument, with the properties that Triton compiles for. Tensors are 16-byte aligned.

    `sizes` maps dims, such as "T", to sizes.
    """
    if isinstance(value, Value):
        dtype = value.type.dtype
        return MockTensor(torch.uint8 if dtype is torch.float8_e8m0fnu else dtype)
    if isinstance(value, tuple):
        return tuple(_stand_in(one, sizes) for one in value)
    return None if value is None else evaluate(value, sizes)


@dataclass
class Launcher:
    """A schedule (kernel launches) with allocated buffers, for steps of one size. A call launches its kernels.

    `result` is the tensor that the schedule computes. It is None if the schedule only updates states, such as the KV
    cache. `sizes` maps dims, such as "T", to sizes.
    """

    schedule: Schedule
    result: Value | None
    sizes: Mapping[str, int]
    buffers: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        use_ptxas()
        self.buffers = {
            name: torch.zeros(
                [evaluate(size, self.sizes) for size in buffer.shape], dtype=DTYPES[buffer.dtype], device=DEVICE
            )
            for name, buffer in self.schedule.buffers.items()
        }

    @property
    def output(self) -> torch.Tensor:
        """Return the buffer of the result, which each call overwrites."""
        assert self.result is not None
        return self.buffers[str(self.result.buffer)]

    def __call__(self, inputs: Sequence[torch.Tensor]) -> None:
        for launch in self.schedule.launches:
            arguments = {name: self._argument(value, inputs) for name, value in launch.arguments.items()}
            grid = tuple(evaluate(size, self.sizes) for size in launch.grid)
            if 0 in grid:
                continue
            launch.kernel[grid](**arguments, **launch.constants, **launch.options)

    def _argument(self, value: Any, inputs: Sequence[torch.Tensor]) -> Any:
        if isinstance(value, Value):
            found = inputs[value.input] if value.input is not None else self.buffers[str(value.buffer)]
            return found.view(torch.uint8) if found.dtype is torch.float8_e8m0fnu else found  # as `compile_kernel`
        if isinstance(value, tuple):
            return tuple(self._argument(one, inputs) for one in value)
        return None if value is None else evaluate(value, self.sizes)


class Pool:
    """GPU memory that benchmarks use as weights, or as keys and values.

    It holds normal random numbers with a standard deviation of 0.02. `copy` is the bandwidth of a copy on this GPU:
    bytes read plus bytes written, per second.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(1)
        self._memory = torch.empty(POOL // 2, dtype=torch.bfloat16, device=DEVICE)
        self._filled = False
        half = self._memory.numel() // 2
        self.copy = POOL / median_seconds(lambda: self._memory[:half].copy_(self._memory[half:]), ROUNDS)

    def of(self, dtype: torch.dtype, least: int) -> torch.Tensor:
        """Return the pool's memory as one vector of `dtype`, with `least` bytes or more.

        It is reallocated only for another dtype or a larger size.
        """
        count = max(POOL, least) // dtype.itemsize
        if not self._filled or self._memory.dtype is not dtype or self._memory.numel() < count:
            self._memory = torch.empty(0, device=DEVICE)  # free the old memory first: both may not fit
            self._memory = torch.empty(count, dtype=dtype, device=DEVICE)
            for begin in range(0, count, 1 << 28):
                self._fill(self._memory[begin : begin + (1 << 28)])
            self._filled = True
        return self._memory

    def _fill(self, part: torch.Tensor) -> None:
        if is_narrow(part.dtype):  # torch cannot draw random numbers of such a dtype
            size = 0.02 if part.dtype.is_floating_point else 32  # i8 holds whole numbers up to 127
            part.copy_(torch.randn(part.shape, device=DEVICE, generator=self.generator).mul_(size))
        else:
            part.normal_(generator=self.generator).mul_(0.02)


def require_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise RuntimeError if the norm of `found - expected` exceeds 1e-2 of the norm of `expected`.

    `expected` is a float32 reference. Rounding to bf16 alone causes an error of 2e-3.
    """
    error = float((found.float() - expected).norm() / expected.norm())
    if not error < 1e-2:
        raise RuntimeError(f"the result is wrong by {error}")


def captured(launches: Iterable[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Call the functions one after the other, and return a CUDA graph of the kernels that they launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def graph_seconds(launches: Iterable[Callable[[], object]]) -> float:
    """Capture the kernels that these functions launch in a CUDA graph, and return the median seconds of its runs."""
    return median_seconds(captured(launches).replay, ROUNDS)
