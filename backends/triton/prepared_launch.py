"""A kernel launch with its arguments prepared in memory that the CUDA driver reads.

A step has hundreds of launches, so the host must spend little time on each.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.backends.triton.launches import WARP, Launch, Pointer, evaluate
from ingot.ir.errors import BackendError

_WORD = 8


class PreparedLaunch:
    """A kernel launch with prepared arguments. A call launches `function`, a function of the CUDA driver.

    `fixed` maps the names of permanent buffers to addresses. Other buffers are new in each call. `made` maps their
    names to indices into the call's argument `made`. `dependent` allows the launch to begin before the previous one has
    ended.

    Not thread-safe: `resize`, `run_on` and calls change the prepared arguments. The driver copies them in each call.
    """

    def __init__(
        self,
        launch: Launch,
        function: Any,
        fixed: Mapping[str, int],
        made: Mapping[str, int],
        *,
        dependent: bool,
    ) -> None:
        from cuda.bindings import driver

        self._launch_kernel, self._success = driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS
        self._launch, self._function = launch, function
        # Two more pointers at the end: Triton's global and profiling scratch, which our kernels do not use.
        count = len(launch.arguments) + 2
        # An 8-byte word per argument. The driver reads as many bytes as the kernel declares: of an i32 the lower half,
        # which comes first on little-endian hosts.
        self._words = (ctypes.c_int64 * count)()
        begin = ctypes.addressof(self._words)
        self._pointers = (ctypes.c_void_p * count)(*range(begin, begin + _WORD * count, _WORD))
        self._arguments = ctypes.addressof(self._pointers)
        self._numbers, self._inputs, self._made = [], [], []
        for place, argument in enumerate(launch.arguments):
            if not isinstance(argument, Pointer):
                self._numbers.append((place, argument.value))
            elif argument.input is not None:
                self._inputs.append((place, argument.input))
            elif str(argument.buffer) in fixed:
                self._words[place] = fixed[str(argument.buffer)]
            else:
                self._made.append((place, made[str(argument.buffer)]))
        self._config = driver.CUlaunchConfig()
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = launch.warps * WARP, 1, 1
        self._config.sharedMemBytes = launch.shared
        attributes = [_dependent_attribute(driver)] if dependent and launch.dependent else []
        self._config.attrs, self._config.numAttrs = attributes, len(attributes)
        self._empty = False

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Set the grid and the integer arguments for the next calls. `sizes` maps dims, such as "T", to sizes."""
        config, grid = self._config, [evaluate(size, sizes) for size in self._launch.grid]
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        self._empty = 0 in grid
        for place, value in self._numbers:
            self._words[place] = evaluate(value, sizes)

    def run_on(self, stream: int) -> None:
        """Set the CUDA stream of the next calls. `stream` is its CUstream as an integer."""
        self._config.hStream = stream

    def __call__(self, inputs: Sequence[int], made: Sequence[int]) -> None:
        """Launch the kernel, unless its grid is empty. `inputs` are addresses of inputs, and `made` of new buffers.

        Raises BackendError if the launch fails.
        """
        if self._empty:
            return
        words = self._words
        for place, index in self._inputs:
            words[place] = inputs[index]
        for place, index in self._made:
            words[place] = made[index]
        (status,) = self._launch_kernel(self._config, self._function, self._arguments, 0)
        if status != self._success:
            raise BackendError(f"the launch of {self._launch.entry} failed: {status.name}")


def _dependent_attribute(driver: Any) -> Any:
    """Return the launch attribute of programmatic dependent launch.

    With it, a kernel may begin before the previous one has ended.
    """
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute
