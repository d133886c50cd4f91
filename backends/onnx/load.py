"""The onnx backend at run time: runs the model of a region with ONNX Runtime. It imports no onnx and no compiler."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.backends.onnx.model import ELEMENTS, MODEL, RESULTS
from ingot.backends.onnx.results import Result, places_of_symbols, read_results
from ingot.ir.artifact.plan import Executable
from ingot.ir.errors import BackendError
from ingot.ir.machine.extras import require
from ingot.ir.machine.load_context import LoadContext
from ingot.ir.parse import parse_type
from ingot.ir.types import TensorType

Region = Callable[..., list[torch.Tensor]]


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
        outputs, results = read_results(described, [parse_type(text) for text in executable.outputs])
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


def _runner(
    session: Any,
    inputs: list[tuple[str, TensorType]],
    outputs: list[tuple[str, TensorType]],
    results: Sequence[Result],
) -> Region:
    binding = session.io_binding()
    symbols = places_of_symbols([value_type for _, value_type in inputs])
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
        return [one.taken(made[one.source], sizes) for one in results]

    return run
