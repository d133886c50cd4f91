"""A kernel launch whose arguments are written where the driver reads them: a step has hundreds of launches, none of
which should wait for the host."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from ingot.backends.triton.launches import WARP, Launch, Pointer, evaluate
from ingot.ir.errors import BackendError

_WORD = 8


class PreparedLaunch:
    """`launch` of the function `function`.

    `fixed` are the addresses of buffers that stay, `made` the places of those that each call gets anew. Without
    `dependent` the launch does not begin before the one in front of it has ended. Not thread-safe: `resize`, `run_on`
    and calls share the arguments, which the driver has copied when a call returns.
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
        # Two more pointers at the end: the global and the profiling scratch of Triton, which our kernels have none of.
        count = len(launch.arguments) + 2
        # A word for each argument. The driver reads as much of it as the kernel declares: of an i32 the lower half,
        # which comes first on the little-endian machines that GPUs are in.
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
        """Launch for these sizes of the dims from now on."""
        config, grid = self._config, [evaluate(size, sizes) for size in self._launch.grid]
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        self._empty = 0 in grid
        for place, value in self._numbers:
            self._words[place] = evaluate(value, sizes)

    def run_on(self, stream: int) -> None:
        """Launch on this stream, a CUstream, from now on."""
        self._config.hStream = stream

    def __call__(self, inputs: Sequence[int], made: Sequence[int]) -> None:
        """Launch on inputs and new buffers at these addresses, unless the grid is empty. Raises BackendError when the
        driver refuses."""
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
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute
