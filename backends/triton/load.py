"""The triton backend at run time: launches compiled kernels through the CUDA driver, without Triton."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ingot.backends.torch_cuda import current_stream, new_tensor
from ingot.backends.triton.launches import ALIGNMENT, LAUNCHES, WARP, Launch, Launches, evaluate
from ingot.backends.triton.prepared_launch import PreparedLaunch
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError, InternalError
from ingot.ir.machine.load_context import LoadContext
from ingot.ir.parse import parse_type
from ingot.ir.types import DTYPES

# Dynamic shared memory that a kernel gets without setting an attribute (CUDA C++ programming guide, "Shared Memory").
_SHARED_FREE = 48 << 10

LoadedCall = Callable[..., list[torch.Tensor]]


def load(executable: Executable, directory: Path, context: LoadContext, *, dependent: bool = True) -> LoadedCall:
    """Load an executable (compiled kernels and their launches) from `directory`, and return a function that runs it.

    The function takes the input tensors, states such as the KV cache included, and returns a list of new tensors. It
    launches on torch's current CUDA stream of the GPU of `context`. It checks the alignment of addresses, but not the
    types. `dependent` allows a launch to begin before the previous one has ended. Raises BackendError if launches.json
    is malformed or the driver rejects the machine code.
    """
    try:
        launches = Launches.model_validate_json((directory / LAUNCHES).read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise BackendError(f"{LAUNCHES} cannot be read: {error}"[:500], where=str(directory)) from error
    make_context_current(context.device)
    functions = {
        (launch.kernel, launch.entry): load_function(directory / launch.kernel, launch.entry, launch.shared)
        for launch in launches.launches
    }
    return _Executable(launches, functions, context, dependent=dependent)


class _Executable:
    """A loaded executable (compiled kernels and their launches).

    A call takes the input tensors, launches the kernels, and returns the output tensors. `functions` maps (file, kernel
    name) to the loaded kernel, a function of the CUDA driver. `dependent` allows a launch to begin before the previous
    one has ended.
    """

    def __init__(
        self, launches: Launches, functions: Mapping[tuple[str, str], Any], context: LoadContext, *, dependent: bool
    ) -> None:
        self._aligned = launches.aligned
        dims = _dims_by_input(launches.inputs)
        self._dims, self._places = tuple(dims), tuple(dims.values())
        self._sizes: list[int] | None = None  # the sizes of the dims in the last call
        self._stream: int | None = None  # the CUstream of the last call
        self._device = context.device
        self._counters = {
            name: context.allocator.zeros([evaluate(size, {}) for size in buffer.shape], torch.int32)
            for name, buffer in launches.buffers.items()
            if buffer.kind == "counter"
        }
        made = {name: buffer for name, buffer in launches.buffers.items() if buffer.kind != "counter"}
        self._buffers = tuple(made.values())
        # Shape, strides and dtype of each buffer in the last call.
        self._layouts: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        places = {name: place for place, name in enumerate(made)}
        self._outputs = [places[name] for name in launches.outputs]
        fixed = {name: tensor.data_ptr() for name, tensor in self._counters.items()}
        self._launches = [
            PreparedLaunch(launch, functions[launch.kernel, launch.entry], fixed, places, dependent=dependent)
            for launch in launches.launches
        ]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        sizes = [tensors[place].shape[axis] for place, axis in self._places]
        if sizes != self._sizes:
            self._resize(sizes)
        if (stream := current_stream(self._device)) != self._stream:
            for launch in self._launches:
                launch.run_on(stream)
            self._stream = stream
        addresses = [tensor.data_ptr() for tensor in tensors]
        for place in self._aligned:
            if addresses[place] % ALIGNMENT:
                raise InternalError(
                    f"tensor {place} of a call is at the address {addresses[place]:#x}", expected="a multiple of 16"
                )
        made = [new_tensor(*layout) for layout in self._layouts]
        buffers = [buffer.data_ptr() for buffer in made]
        for launch in self._launches:
            launch(addresses, buffers)
        return [made[place] for place in self._outputs]

    def _resize(self, sizes: list[int]) -> None:
        """Compute buffer shapes, grids and integer arguments for new sizes of the symbolic dims, such as "T".

        This is rarely needed, because the layers of a step call the executable with equal sizes.
        """
        self._sizes = None  # until all is done
        named = dict(zip(self._dims, sizes, strict=True))
        shapes = [tuple(evaluate(size, named) for size in buffer.shape) for buffer in self._buffers]
        self._layouts = [
            (shape, torch.empty(shape, device="meta").stride(), DTYPES[buffer.dtype])
            for shape, buffer in zip(shapes, self._buffers, strict=True)
        ]
        for launch in self._launches:
            launch.resize(named)
        self._sizes = sizes


def _dims_by_input(inputs: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return where to read the size of each dim, such as "T", from the inputs of a call.

    The result maps a dim's name to (index of an input, axis of that input). `inputs` are the types of the inputs as
    text, such as "bf16[T, 4096]".
    """
    found: dict[str, tuple[int, int]] = {}
    for place, text in enumerate(inputs):
        for axis, size in enumerate(parse_type(text).shape):
            if isinstance(size, str):
                found.setdefault(size, (place, axis))
    return found


def make_context_current(device: torch.device) -> None:
    """Make torch's CUDA context current in this thread. The driver loads modules into the current context.

    Raises BackendError if the GPU cannot be used.
    """
    from cuda.bindings import driver

    torch.cuda.init()
    _, ordinal = driver.cuDeviceGet(device.index)
    status, context = driver.cuDevicePrimaryCtxRetain(ordinal)
    if status == driver.CUresult.CUDA_SUCCESS:
        (status,) = driver.cuCtxSetCurrent(context)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"the GPU cannot be used: {status.name}")


def load_function(path: Path, entry: str, shared: int) -> Any:
    """Load the cubin at `path`, and return its function `entry`. A launch uses `shared` bytes of shared memory."""
    from cuda.bindings import driver

    try:
        code = path.read_bytes()
    except OSError as error:
        raise BackendError(f"a kernel cannot be read: {error}", where=str(path)) from error
    status, module = driver.cuModuleLoadData(code)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"the driver cannot load a kernel: {status.name}", where=str(path))
    status, function = driver.cuModuleGetFunction(module, entry.encode())
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"the file has no kernel '{entry}': {status.name}", where=str(path))
    if shared > _SHARED_FREE:
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuFuncSetAttribute(function, attribute, shared)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise BackendError(f"the kernel '{entry}' needs {shared} bytes of shared memory: {status.name}")
    return function


def resident_blocks(function: Any, launch: Launch) -> int:
    """Return how many thread blocks of a launch a multiprocessor can run at once. Raises BackendError if it fails."""
    from cuda.bindings import driver

    status, count = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, launch.warps * WARP, launch.shared)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BackendError(f"the driver cannot say how many blocks of {launch.entry} fit: {status.name}")
    return int(count)
