"""Runs a schedule of Triton launches on tensors: by Triton's interpreter on a CPU, which tests/conftest.py turns on, by
its compiler on a GPU."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from drawn import drawn

from ingot.backends.triton.launches import evaluate
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import BucketClass, owed_features
from ingot.ir.ops import Op
from ingot.ir.types import DTYPES, TensorType

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes in float32: bf16 products come out wrong there.
TESTED = (torch.float32, torch.bfloat16, torch.float16) if torch.cuda.is_available() else (torch.float32,)


# Bytes after a copy of a tensor that hold NaN.
_AFTER = 4096


def some(count: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters for pytest: the interpreter, which is slow, gets `count` of `cases` in a run; a GPU gets all."""
    return drawn(count, cases) if DEVICE == "cpu" else list(cases)


def new_schedule(
    tokens: tuple[int, int] = (1, 16),
    sm: int = 90,
    cores: int = 132,
    sequences: int | None = None,
    *,
    invariant: bool = False,
) -> Schedule:
    """A schedule for a bucket class of steps of so many tokens, and of `sequences` at most; a batch-invariant one if
    that is asked for. Dependent launch needs the driver: not here."""
    bucket = BucketClass(name="test", tokens=tokens, features=owed_features(deterministic=invariant))
    return Schedule(sm=sm, cores=cores, bucket=bucket, sequences=sequences)


def without_assembly(constants: Mapping[str, Any]) -> dict[str, Any]:
    """The constants of a kernel for the device: the interpreter has no assembly."""
    if DEVICE != "cpu":
        return dict(constants)
    dropped = {"ASSEMBLY": False} if "ASSEMBLY" in constants else {}
    groups = {name: replace(value, assembly=False) for name, value in constants.items() if hasattr(value, "assembly")}
    return {**constants, **groups, **dropped}


def run_schedule(
    schedule: Schedule, outputs: Sequence[Value], inputs: Sequence[torch.Tensor], sizes: Mapping[str, int]
) -> list[torch.Tensor]:
    """The outputs; states among the inputs are updated in place. Outputs and scratch hold NaN, or 7, at first."""
    buffers: dict[str, torch.Tensor] = {}
    for name, buffer in schedule.buffers.items():
        dtype = DTYPES[buffer.dtype]
        shape = [evaluate(size, sizes) for size in buffer.shape]
        fill: Any = 0 if buffer.kind == "counter" else float("nan") if dtype.is_floating_point else 7
        buffers[name] = torch.full(shape, fill, dtype=dtype, device=DEVICE)

    def argument(value: Any) -> Any:
        if isinstance(value, Value):
            found = inputs[value.input] if value.input is not None else buffers[str(value.buffer)]
            return found.view(torch.uint8) if found.dtype is torch.float8_e8m0fnu else found  # as `compile_kernel`
        if isinstance(value, tuple):
            return tuple(map(argument, value))
        return None if value is None else evaluate(value, sizes)

    for launch in schedule.launches:
        grid = tuple(evaluate(size, sizes) for size in launch.grid)
        if 0 in grid:
            continue
        arguments = {name: argument(value) for name, value in launch.arguments.items()}
        options = {name: value for name, value in launch.options.items() if name != "launch_pdl"}
        launch.kernel[grid](**arguments, **without_assembly(launch.constants), **options)
    for name, buffer in schedule.buffers.items():
        assert buffer.kind != "counter" or not bool(buffers[name].any()), f"{name} is not zero after the call"
    return [buffers[str(value.buffer)] for value in outputs]


def run_lowering(
    op: Op,
    lowering: Lowering,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    tokens: tuple[int, int] = (1, 16),
    dims: Mapping[str, int] | None = None,
    cores: int = 132,
    invariant: bool = False,
) -> list[torch.Tensor]:
    """A call of `op` by its lowering, on tensors (copied to the device; a state is updated there, and is the last
    result). `dims` are sizes that the types keep as symbols; the leading axis of a tensor argument whose size is one of
    them gets its name. No step has more sequences than this one."""
    bound = op.bind(list(args), dict(kwargs))
    tensors = {name: _copied(value) for name, value in bound.items() if isinstance(value, torch.Tensor)}
    names = {size: dim for dim, size in (dims or {}).items()}
    values: dict[str, Value | None] = {name: None for name, value in bound.items() if value is None}
    for place, (name, tensor) in enumerate(tensors.items()):
        values[name] = Value(_typed(tensor, names), input=place)
    attributes = {name: value for name, value in bound.items() if name not in values}
    with torch.device("meta"):
        moved = [value.to("meta") if isinstance(value, torch.Tensor) else value for value in args]
        made = op.fake(*moved, **kwargs)
    results = [made] if isinstance(made, torch.Tensor) else list(made)
    types = tuple(_typed(result, names) for result in results[: len(results) - len(op.states)])
    schedule = new_schedule(tokens, cores=cores, sequences=(dims or {}).get("B"), invariant=invariant)
    outputs = lowering(Call(op.name, values, attributes, types), schedule)
    found = run_schedule(schedule, outputs, list(tensors.values()), dict(dims or {}))
    return [*found, *(tensors[name] for name in op.states)]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device that lies as the tensor does: `to` and `clone` would make a slice dense.

    The memory after it is NaN in every floating-point type, so that a result shows when a kernel reads it.
    """
    places = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    held = places * tensor.dtype.itemsize if tensor.numel() else 0
    memory = torch.full((held + _AFTER,), 0xFF, dtype=torch.uint8, device=DEVICE)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _typed(tensor: torch.Tensor, names: Mapping[int, str]) -> TensorType:
    shape = tuple(names.get(size, size) if axis == 0 else size for axis, size in enumerate(tensor.shape))
    return TensorType(tensor.dtype, shape, None if tensor.is_contiguous() else tuple(tensor.stride()))
