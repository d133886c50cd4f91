"""Measure times on this machine's GPU: of each instruction of a step alone, and of the step as it is served."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ingot.debug.explained import StepShape
from ingot.debug.requested_step import limits_of
from ingot.debug.step_time.inputs import step_inputs
from ingot.debug.step_time.measurement import InstructionTime, StepMeasurement
from ingot.debug.step_time.record import record_trace
from ingot.debug.step_time.served import padded
from ingot.debug.step_time.trace import read_trace
from ingot.ir.machine.device_clock import median_seconds
from ingot.ir.program import VIEWS, target_name
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.loader import Loaded, load_artifact
from ingot.runtime.steps.bucket import Call
from ingot.runtime.steps.executor import Executor
from ingot.runtime.steps.step import StepLayout, StepSizes

# Bytes of weights and caches that a sequence of calls reads in turn, as a multiple of the last-level cache. A call's
# data is then evicted before it is read again. In a step, all other layers run in between.
_CACHES = 4
_COPIES = 64  # maximum copies of the weights of one instruction
_COPIED = 1 << 16  # bytes: smaller data is not copied, since reading it takes no longer than a launch
_CALLS = 48  # minimum calls in a sequence: a graph's launch takes as long as some of them
_ROUNDS = 5
_STEPS = 20  # whole steps in a sequence
_VIEWS = frozenset(map(target_name, VIEWS))


def measure_artifact(
    folder: Path, step: StepShape, served: StepSizes | None, trace: Path | None = None
) -> StepMeasurement:
    """Load an artifact with just enough cache pages for `step`, and time the step.

    `served` has the sizes of the CUDA graph that replays the step. It is None if the host launches the step's calls.
    `trace` is a file to write a profiler trace to. Raises IngotError if the artifact does not run on this machine.
    """
    limits = limits_of(open_artifact(folder))
    return measure_step(load_artifact(folder, num_pages=step.pages(limits.page_size)), step, served, trace)


def measure_step(
    loaded: Loaded, step: StepShape, served: StepSizes | None = None, trace: Path | None = None
) -> StepMeasurement:
    """Time a step of the entry `main`, as a whole and each instruction alone.

    `served` has the sizes of the CUDA graph that replays the step. It is None if there is no graph. Calls are padded to
    these sizes. `trace` is a file to write a profiler trace to.

    Afterwards the KV caches and other states hold arbitrary values, so the loaded artifact must not serve requests.
    """
    executor = loaded.executor
    inputs = step_inputs(
        step, loaded.limits.page_size, loaded.limits.vocab_size, StepLayout.of(frozenset(loaded.plan.inputs))
    )
    calls: list[Call] = []

    def keep(call: Call) -> Any:
        calls.append(call)
        return call()

    launched = inputs if served is None else padded(inputs, served)
    executor.launch(launched, watch=keep)
    executor.synchronize()
    resident = {
        tensor.untyped_storage().data_ptr() for tensor in (*executor.params.values(), *executor.states.values())
    }
    groups: dict[object, list[int]] = {}
    for number, call in enumerate(calls):
        groups.setdefault(_alike(call), []).append(number)
    times: dict[int, InstructionTime] = {}
    with torch.cuda.stream(loaded.context.stream):
        for numbers in groups.values():
            taken = _time_row(_rotated([calls[number] for number in numbers], resident))
            times |= dict.fromkeys(numbers, taken)
    seconds = _step_seconds(executor, loaded.context.stream, inputs)
    if trace is not None:
        record_trace(executor, loaded.context.stream, launched, inputs, trace)
    instructions = tuple(times[number] for number in range(len(calls)))
    return StepMeasurement(seconds, instructions, None if trace is None else read_trace(trace, len(calls)))


def _alike(call: Call) -> object:
    """Return a key that is equal for calls that take the same time.

    Such calls run the same code on tensors of equal dtype, shape and strides.
    """
    instruction = call.instruction
    values = (*call.args, *(value for _, value in sorted(call.kwargs.items())))
    return instruction.calls or instruction.target, instruction.backend, tuple(map(_kind, values))


def _kind(value: object) -> object:
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else repr(value)


def _rotated(calls: Sequence[Call], resident: set[int]) -> list[Call]:
    """Return the calls, and then these calls again on copies of their weights and caches.

    All data together is larger than the GPU's last-level cache. So each call reads from memory, as in a real step.
    `resident` has the data pointers of weights and states.
    """
    size = sum(_resident_bytes(call, resident) for call in calls)
    wanted = _CACHES * torch.cuda.get_device_properties().L2_cache_size
    copies = 0 if size < _COPIED else min(_COPIES, math.ceil(wanted / size)) - 1
    return [*calls, *(_on_copies(call, resident) for _ in range(copies) for call in calls)]


def _resident_bytes(call: Call, resident: set[int]) -> int:
    return sum(value.numel() * value.itemsize for value in call.args if _is_resident(value, resident))


def _is_resident(value: object, resident: set[int]) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in resident


def _on_copies(call: Call, resident: set[int]) -> Call:
    args = tuple(_copy(value) if _is_resident(value, resident) else value for value in call.args)
    return Call(call.bucket, call.number, args, call.kwargs, call._run)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with the same strides, since compiled kernels depend on strides."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return like.copy_(tensor)


def _time_row(calls: Sequence[Call]) -> InstructionTime:
    """Return the mean device time and host time of one of these equal calls.

    They run many times in a CUDA graph. If a graph cannot capture them, they are launched one by one.
    """
    row = list(itertools.islice(itertools.cycle(calls), len(calls) * math.ceil(_CALLS / len(calls))))

    def run() -> None:
        for call in row:
            call()

    run()
    torch.cuda.current_stream().synchronize()
    begin = time.perf_counter()
    run()
    host = (time.perf_counter() - begin) / len(row)
    torch.cuda.current_stream().synchronize()
    if calls[0].instruction.target in _VIEWS:  # a view runs nothing on the device
        return InstructionTime(0.0, host)
    graph = _captured(run)
    return InstructionTime(median_seconds(graph.replay if graph else run, _ROUNDS) / len(row), host)


def _captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """Capture the kernels that `run` launches in a CUDA graph.

    Return None if this fails, because `run` synchronizes with the host.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            run()
    except RuntimeError:
        torch.cuda.current_stream().synchronize()
        return None
    return graph


def _step_seconds(executor: Executor, stream: torch.cuda.Stream | None, inputs: Mapping[str, torch.Tensor]) -> float:
    def run() -> None:
        for _ in range(_STEPS):
            executor.launch(inputs)

    with torch.cuda.stream(stream):
        return median_seconds(run, _ROUNDS) / _STEPS
