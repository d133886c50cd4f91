"""The tensorrt backend at run time: runs the engine of a region. It imports no onnx and no compiler."""

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ingot.backends.onnx.results import Result, places_of_symbols, read_results
from ingot.backends.tensorrt.contexts import Contexts, Sizes
from ingot.backends.tensorrt.library import find_library, last_error, logger, open_engine, product_here
from ingot.backends.tensorrt.record import ALIGNMENT, ENGINE, RECORD, Record
from ingot.backends.torch_cuda import current_stream, new_tensor
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError, TargetError
from ingot.ir.machine.load_context import LoadContext
from ingot.ir.parse import parse_type
from ingot.ir.types import TensorType

Region = Callable[..., list[torch.Tensor]]


def load(executable: Executable, directory: Path, context: LoadContext) -> Region:
    """Load the engine of a region from `directory`, and return a function that runs it.

    The function takes the input tensors as positional arguments, and returns a list of new tensors. It runs on torch's
    current CUDA stream, also while a CUDA graph is captured. All memory of a call is torch's: TensorRT allocates none.
    An input is copied if it has gaps or does not start at a multiple of 256 bytes.

    Raises TargetError if TensorRT or the GPU is another than the engine was built with, and BackendError if the engine
    does not load.
    """
    library = find_library("running a region of the backend 'tensorrt'")
    try:
        record = Record.model_validate_json((directory / RECORD).read_text(encoding="utf-8"))
        content = (directory / ENGINE).read_bytes()
        outputs, results = read_results(record.results, [parse_type(text) for text in executable.outputs])
    except (OSError, ValidationError, KeyError, ValueError) as error:
        raise BackendError(f"{RECORD} or {ENGINE} cannot be read: {error}"[:500], where=str(directory)) from error
    _check(record, library.__version__)
    return _Region(library, content, record, executable, outputs, results, directory, context.device)


def _check(record: Record, version: str) -> None:
    for what, built, here in (("TensorRT", record.tensorrt, version), ("the GPU", record.gpu, product_here())):
        if built != here:
            raise TargetError(
                f"the TensorRT engine was built with {what} {built}, and here is {here}",
                expected="the same version of TensorRT on the same GPU: an engine runs with no other",
                hint="compile the model again on this machine",
            )


class _Region:
    """A loaded engine: a function of the input tensors that launches it, and returns new tensors."""

    def __init__(
        self,
        library: Any,
        content: bytes,
        record: Record,
        executable: Executable,
        outputs: dict[str, TensorType],
        results: list[Result],
        directory: Path,
        device: torch.device,
    ) -> None:
        self._where, self._device = str(directory), device
        self._log = logger(library)  # TensorRT's objects use it as long as they live
        self._engine = open_engine(library, self._log, content, self._where)
        self._memory = int(self._engine.get_device_memory_size_for_profile_v2(0))
        if self._memory > record.memory:
            raise BackendError(
                f"the TensorRT engine needs {self._memory} bytes of memory for a call",
                where=self._where,
                expected=f"at most {record.memory}, which the plan counts",
                hint="compile the model again on this machine",
            )
        self._inputs = [parse_type(text) for text in executable.inputs]
        self._names = record.inputs
        _check_tensors(library, self._engine, {*self._names, *outputs}, self._where)
        self._outputs, self._results = outputs, results
        symbols = places_of_symbols(self._inputs)
        self._symbols, self._places = tuple(symbols), tuple(symbols.values())
        self._contexts = Contexts(library, self._engine, self._shapes, self._where)

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        sizes = tuple(tensors[place].shape[axis] for place, axis in self._places)
        named = dict(zip(self._symbols, sizes, strict=True))
        context = self._contexts.take(sizes, capturing=torch.cuda.is_current_stream_capturing())
        dense = [_readable(tensor) for tensor in tensors]
        made = {name: _new(one.bind(named), one.dtype) for name, one in self._outputs.items()}
        scratch = _new((self._memory,), torch.uint8) if self._memory else None
        context.set_device_memory(0 if scratch is None else scratch.data_ptr(), self._memory)
        for name, tensor in (*zip(self._names, dense, strict=True), *made.items()):
            if not context.set_tensor_address(name, tensor.data_ptr()):
                raise BackendError(f"the TensorRT engine takes no tensor {name}", where=self._where)
        if not context.execute_async_v3(current_stream(self._device)):
            raise BackendError(f"the TensorRT engine fails: {last_error(self._log)}", where=self._where)
        wholes = list(made.values())
        return [one.taken(wholes[one.source], named) for one in self._results]

    def _shapes(self, sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
        named = dict(zip(self._symbols, sizes, strict=True))
        for name, value_type in zip(self._names, self._inputs, strict=True):
            if any(isinstance(size, str) for size in value_type.shape):
                yield name, tuple(value_type.bind(named))


def _check_tensors(library: Any, engine: Any, expected: set[str], where: str) -> None:
    found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    if found != expected:
        raise BackendError(
            f"the TensorRT engine has the tensors {', '.join(sorted(found))}"[:300],
            where=where,
            expected=", ".join(sorted(expected)),
        )


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it has gaps or is not aligned as TensorRT demands."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return _new(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return new_tensor(shape, strides, dtype)
