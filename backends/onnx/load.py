"""The onnx backend at run time: runs the model of a region with ONNX Runtime. It imports no onnx and no compiler."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.backends.onnx.model import ELEMENTS, MODEL, RESULTS
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError
from ingot.ir.machine.extras import require
from ingot.ir.machine.load_context import LoadContext
from ingot.ir.parse import parse_type
from ingot.ir.types import TensorType

Region = Callable[..., list[torch.Tensor]]


@dataclass(frozen=True)
class _Result:
    """A result of the region: the whole output `source`, or a view of it.

    source   the place of the model's output among all outputs
    view     the type and offset of the view; None: the whole output
    """

    source: int
    view: tuple[TensorType, int] | None


def load(executable: Executable, directory: Path, context: LoadContext) -> Region:
    """Load the model of a region from `directory`, and return a function that runs it.

    The function takes the input tensors as positional arguments, and returns a list of new tensors. ONNX Runtime reads
    the inputs and writes the results in the memory of these tensors. Only an input with gaps, such as a slice, is
    copied. It uses torch's number of threads at the time of loading. Raises TargetError without the package
    onnxruntime, and BackendError if the model does not load.
    """
    require("onnxruntime", "onnxruntime", "running a region of the backend 'onnx'", extra="onnx")
    import onnxruntime

    path = directory / MODEL
    try:
        session = onnxruntime.InferenceSession(str(path), _options(onnxruntime), providers=["CPUExecutionProvider"])
        described = json.loads(session.get_modelmeta().custom_metadata_map[RESULTS])
        outputs = {str(one["output"]): parse_type(one["type"]) for one in described}
        types = [parse_type(text) for text in executable.outputs]
        results = [
            _Result(list(outputs).index(one["output"]), _view(wanted, outputs[one["output"]], int(one["offset"])))
            for one, wanted in zip(described, types, strict=True)
        ]
    except Exception as error:  # ONNX Runtime raises types of its own
        raise BackendError(f"the ONNX model does not load: {error}"[:500], where=str(path)) from error
    inputs = [parse_type(text) for text in executable.inputs]
    names = [one.name for one in session.get_inputs()]
    return _runner(session, list(zip(names, inputs, strict=True)), list(outputs.items()), results)


def _options(onnxruntime: Any) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1  # nodes run one after another
    # Nodes run in the order of the file, on which the memory plan relies. Fused nodes would run later than their parts,
    # and might round elsewhere. For an MLP of 1024 by 4096 they saved less time than repeated runs differed by.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # An arena would keep memory that the plan reuses for other calls.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.log_severity_level = 3  # errors are raised
    # Each region has threads of its own. Spinning ones would take the cores from other regions and from torch.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _view(wanted: TensorType, whole: TensorType, offset: int) -> tuple[TensorType, int] | None:
    same = (wanted.shape, wanted.strides, offset) == (whole.shape, None, 0)
    return None if same else (wanted, offset)


def _runner(
    session: Any,
    inputs: list[tuple[str, TensorType]],
    outputs: list[tuple[str, TensorType]],
    results: list[_Result],
) -> Region:
    binding = session.io_binding()
    # Symbol -> the input and axis that have its size.
    symbols = {
        size: (place, axis)
        for place, (_, value_type) in reversed(list(enumerate(inputs)))
        for axis, size in enumerate(value_type.shape)
        if isinstance(size, str)
    }
    given = [(name, ELEMENTS[value_type.dtype]) for name, value_type in inputs]

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        sizes = {name: args[place].shape[axis] for name, (place, axis) in symbols.items()}
        dense = [tensor.contiguous() for tensor in args]  # a copy only if it has gaps
        for (name, element), tensor in zip(given, dense, strict=True):
            binding.bind_input(name, "cpu", 0, element, tuple(tensor.shape), tensor.data_ptr())
        made = [torch.empty(value_type.bind(sizes), dtype=value_type.dtype) for _, value_type in outputs]
        for (name, value_type), tensor in zip(outputs, made, strict=True):
            binding.bind_output(name, "cpu", 0, ELEMENTS[value_type.dtype], tuple(tensor.shape), tensor.data_ptr())
        session.run_with_iobinding(binding)
        return [_taken(made[one.source], one.view, sizes) for one in results]

    return run


def _taken(whole: torch.Tensor, view: tuple[TensorType, int] | None, sizes: dict[str, int]) -> torch.Tensor:
    if view is None:
        return whole
    wanted, offset = view
    shape = wanted.bind(sizes)
    strides = wanted.strides
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    return whole.as_strided(shape, strides, offset)
