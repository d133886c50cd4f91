"""Run one instruction without its plan and compare it with its reference, for a backend's reproducer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ingot.debug.bisect.execution.backend_reproducer import CALL, EXECUTABLE, INPUTS, INSTRUCTION
from ingot.debug.bisect.execution.one_call import wrong_results
from ingot.debug.bisect.execution.tensor_check import copied
from ingot.ir.artifact.plan import DType, Executable, Instruction, Ref
from ingot.ir.errors import ArtifactError
from ingot.ir.parse import parse_program
from ingot.ir.types import DTYPES
from ingot.runtime.loading.load_context import on_one_device
from ingot.runtime.loading.loaders import find_op, load_executable, load_library


def rerun(folder: Path) -> str | None:
    """Run the faulty instruction that `write_reproducer` stored in `folder`. Return what is wrong with its results;
    None if they are right.

    Raises ArtifactError if the folder is incomplete.
    """
    try:
        alone = parse_program((folder / CALL).read_text(encoding="utf-8"))
        instruction = Instruction.model_validate_json((folder / INSTRUCTION).read_text(encoding="utf-8"))
        stored = load_file(folder / INPUTS)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"the reproducer is incomplete: {error}", where=str(folder)) from error
    inputs = {name: _strided(tensor, alone.input_types().get(name)) for name, tensor in stored.items()}
    given = {name: copied(tensor) for name, tensor in inputs.items()}
    args = [given[arg.ref] if isinstance(arg, Ref) else _constant(arg) for arg in instruction.args]
    kwargs = {name: _constant(arg) for name, arg in instruction.kwargs.items()}
    result = _callable(instruction, folder)(*args, **kwargs)
    results = [result] if isinstance(result, torch.Tensor) else list(result or ())
    wrong = wrong_results(alone, inputs, results, {name: given[name] for name in instruction.updates})
    return f"'{wrong[0]}' is {wrong[1]}" if wrong else None


def _callable(instruction: Instruction, folder: Path) -> Callable[..., Any]:
    if not (folder / EXECUTABLE).exists():
        return find_op(instruction.target, instruction.backend)
    context = on_one_device("cpu")  # instructions on a GPU are not compared yet
    executable = Executable.model_validate_json((folder / EXECUTABLE).read_text(encoding="utf-8"))
    if instruction.target.startswith("exe."):
        return load_executable(executable, folder, context)
    return find_op(instruction.target, instruction.backend, load_library(executable, folder, context))


def _strided(tensor: torch.Tensor, value_type: Any) -> torch.Tensor:
    """Return a copy of a contiguous tensor with the strides that its type in the program requires.

    Return the tensor itself if its type requires no strides, or if `value_type` is None.
    """
    if value_type is None or value_type.strides is None:
        return tensor
    return torch.empty_strided(tensor.shape, value_type.strides, dtype=tensor.dtype).copy_(tensor)


def _constant(argument: Any) -> Any:
    if isinstance(argument, DType):
        return DTYPES[argument.dtype]
    return list(argument) if isinstance(argument, tuple) else argument
