"""The triton provider, run side: launches compiled kernels through the CUDA driver. Triton is not needed."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ingot.backends.triton.launches import ALIGNMENT, LAUNCHES, Buffer, Launch, Launches, Pointer, evaluate
from ingot.ir.errors import BackendError, InternalError
from ingot.ir.parse import parse_type
from ingot.ir.plan import Executable
from ingot.ir.types import DTYPES

# Dynamic shared memory that a kernel gets without asking (CUDA C++ programming guide, "Shared Memory").
_SHARED_FREE = 48 << 10

Call = Callable[..., list[torch.Tensor]]


def load(executable: Executable, directory: Path, *, dependent: bool = True) -> Call:
    """The callable of an executable: its tensors in, states among them, a list of new tensors out.

    It launches on torch's current stream and checks nothing but addresses: whoever binds it compares types. Without
    `dependent` no launch begins before the one in front of it has ended. Raises BackendError for machine code that the
    driver refuses.
    """
    try:
        launches = Launches.model_validate_json((directory / LAUNCHES).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise BackendError(f"{LAUNCHES} does not read: {error}"[:500], where=str(directory)) from error
    _make_context_current()
    functions = {
        (launch.kernel, launch.entry): _function(directory / launch.kernel, launch.entry, launch.shared)
        for launch in launches.launches
    }
    return _Executable(launches, functions, dependent=dependent)


@dataclass(frozen=True)
class _Bound:
    """A launch with what does not change from call to call."""

    launch: Launch
    function: Any
    kinds: tuple[Any, ...]  # ctypes of the arguments, in order


class _Executable:
    def __init__(self, launches: Launches, functions: Mapping[tuple[str, str], Any], *, dependent: bool) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._launches = launches
        self._dims = _dims_by_input(launches.inputs)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._counters = {
            name: torch.zeros([evaluate(size, {}) for size in buffer.shape], dtype=torch.int32, device=self._device)
            for name, buffer in launches.buffers.items()
            if buffer.kind == "counter"
        }
        self._made = [(name, buffer) for name, buffer in launches.buffers.items() if buffer.kind != "counter"]
        self._bound = [
            _Bound(launch, functions[launch.kernel, launch.entry], _kinds(launch)) for launch in launches.launches
        ]
        self._attributes = [_dependent_attribute(driver)] if dependent else []

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        sizes = {name: tensors[place].shape[axis] for name, (place, axis) in self._dims.items()}
        for place in self._launches.aligned:
            if tensors[place].data_ptr() % ALIGNMENT:
                raise InternalError(f"tensor {place} of a call lies at {tensors[place].data_ptr():#x}", expected="/16")
        buffers = dict(self._counters)
        for name, buffer in self._made:
            buffers[name] = self._new(buffer, sizes)
        stream = torch.cuda.current_stream().cuda_stream
        for bound in self._bound:
            self._run(bound, tensors, buffers, sizes, stream)
        return [buffers[name] for name in self._launches.outputs]

    def _new(self, buffer: Buffer, sizes: Mapping[str, int]) -> torch.Tensor:
        shape = [evaluate(size, sizes) for size in buffer.shape]
        return torch.empty(shape, dtype=DTYPES[buffer.dtype], device=self._device)

    def _run(
        self,
        bound: _Bound,
        tensors: Sequence[torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        sizes: Mapping[str, int],
        stream: int,
    ) -> None:
        launch, driver = bound.launch, self._driver
        values: list[int] = []
        for argument in launch.arguments:
            if not isinstance(argument, Pointer):
                values.append(evaluate(argument.value, sizes))
            elif argument.input is not None:
                values.append(tensors[argument.input].data_ptr())
            else:
                values.append(buffers[str(argument.buffer)].data_ptr())
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (evaluate(size, sizes) for size in launch.grid)
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.warps * 32, 1, 1
        config.sharedMemBytes = launch.shared
        config.hStream = stream
        attributes = self._attributes if launch.dependent else []
        config.attrs, config.numAttrs = attributes, len(attributes)
        # Two more pointers at the end: the global and the profiling scratch of Triton, which our kernels have none of.
        arguments = (tuple([*values, 0, 0]), (*bound.kinds, ctypes.c_void_p, ctypes.c_void_p))
        (status,) = driver.cuLaunchKernelEx(config, bound.function, arguments, 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"the launch of {launch.entry} failed: {status.name}")


def _kinds(launch: Launch) -> tuple[Any, ...]:
    return tuple(
        ctypes.c_void_p if isinstance(argument, Pointer) else _INTEGERS[argument.dtype] for argument in launch.arguments
    )


_INTEGERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


def _dims_by_input(inputs: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Where the size of each dim is found: an input's place and axis."""
    found: dict[str, tuple[int, int]] = {}
    for place, text in enumerate(inputs):
        for axis, size in enumerate(parse_type(text).shape):
            if isinstance(size, str):
                found.setdefault(size, (place, axis))
    return found


def _dependent_attribute(driver: Any) -> Any:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _make_context_current() -> None:
    """The context that torch uses, in this thread too: what the driver loads belongs to the current one."""
    from cuda.bindings import driver

    torch.cuda.init()
    _, device = driver.cuDeviceGet(torch.cuda.current_device())
    status, context = driver.cuDevicePrimaryCtxRetain(device)
    if status == driver.CUresult.CUDA_SUCCESS:
        (status,) = driver.cuCtxSetCurrent(context)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"the GPU cannot be used: {status.name}")


def _function(path: Path, entry: str, shared: int) -> Any:
    from cuda.bindings import driver

    try:
        code = path.read_bytes()
    except OSError as error:
        raise BackendError(f"a kernel cannot be read: {error}", where=str(path)) from error
    status, module = driver.cuModuleLoadData(code)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"the driver refuses a kernel: {status.name}", where=str(path))
    status, function = driver.cuModuleGetFunction(module, entry.encode())
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"there is no kernel '{entry}': {status.name}", where=str(path))
    if shared > _SHARED_FREE:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuFuncSetAttribute(function, attribute, shared)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"the kernel '{entry}' needs {shared} bytes of shared memory: {status.name}")
    return function
