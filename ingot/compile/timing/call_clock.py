"""Time one call with several backends on this machine, in turns, on inputs too large for the caches."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ingot.backends.table import find_entry
from ingot.compile.timing.call_inputs import TimedStep, call_of, inputs_for, timed_steps
from ingot.ir.artifact.backend_times import BackendTime, Candidate
from ingot.ir.machine.device_clock import row_seconds
from ingot.ir.machine.load_context import LoadContext
from ingot.ir.machine.target import Target
from ingot.ir.program import Program, target_name
from ingot.runtime.loading.load_context import on_one_device
from ingot.runtime.loading.loaders import find_op, load_executable, load_library

ROUNDS = 7  # the result is their median
# A backend whose shortest of so many first calls takes so many times as long as that of the fastest one is not timed
# further: a busy machine makes calls some times slower, but not each of several.
_FIRST = 3
_CLEARLY = 4.0
_ROW = (8, 64)  # minimum and maximum calls of a round
# The length of a round of short calls on a CPU: reading the clock and waking threads take some microseconds.
_ROUND_SECONDS = 2e-3
# Bytes of inputs per round, unless that needs more than _MOST_SETS sets: twice the last-level cache of an H200, and
# that of a server's CPU.
_TRAFFIC = {"cuda": 128 << 20, "cpu": 64 << 20}
_MOST_SETS = 16

Call = Callable[[Sequence[torch.Tensor]], object]


def time_call(body: Program, candidates: Sequence[Candidate], target: Target) -> dict[str, tuple[BackendTime, ...]]:
    """Time the one call in `body` with each candidate backend on this machine. Return the times by backend.

    A backend has one time for each step size of `timed_steps`. On a CPU, the call uses as many threads as the target
    has cores. On a GPU, its memory is freed at the end. Raises BackendError if inputs cannot be made or code does not
    load. Errors of the call propagate.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(target.cores if target.device == "cpu" else threads)
    try:
        context = on_one_device(target.device)
        calls = {one.backend: _loaded(one, body, context) for one in candidates}
        found: dict[str, list[BackendTime]] = {name: [] for name in calls}
        for step in timed_steps(body):
            for name, seconds in _time_step(body, calls, step, target.device).items():
                micro = round(seconds * 1e6, 3)
                found[name].append(BackendTime(tokens=step.tokens, sequences=step.sequences, microseconds=micro))
    finally:
        torch.set_num_threads(threads)
        if target.device == "cuda":
            torch.cuda.empty_cache()  # this process keeps running, and others need the memory
    return {name: tuple(times) for name, times in found.items()}


def _time_step(body: Program, calls: Mapping[str, Call], step: TimedStep, device: str) -> dict[str, float]:
    """Return the seconds of one call in a step of this size, by backend.

    `calls` maps each backend to a function that runs its code on a list of inputs. The backends take turns, so a
    slowdown of the machine affects all of them. The time of a clearly slow one is the median of few calls.
    """
    sets = _input_sets(body, step, device)
    for call in calls.values():
        _round(call, sets, 1, device)  # the first call does one-time setup
    first = [{name: _round(call, sets, 1, device) for name, call in calls.items()} for _ in range(_FIRST)]
    least = {name: min(one[name] for one in first) for name in calls}
    near = {name: call for name, call in calls.items() if least[name] < _CLEARLY * min(least.values())}
    count = {name: _calls_of_round(least[name], len(sets), device) for name in near}
    rounds = [{name: _round(call, sets, count[name], device) for name, call in near.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(one[name] for one in (rounds if name in near else first)) for name in calls}


def _calls_of_round(seconds: float, sets: int, device: str) -> int:
    least, most = _ROW
    if device == "cuda":
        return max(least, sets)
    return min(most, max(1, round(_ROUND_SECONDS / seconds)))


def _round(call: Call, sets: Sequence[Sequence[torch.Tensor]], count: int, device: str) -> float:
    """Run a call `count` times, and return the mean seconds of one run.

    `sets` are lists of inputs. Each run takes the next one.
    """
    work = [partial(call, inputs) for inputs in itertools.islice(itertools.cycle(sets), count)]
    if device == "cuda":
        return row_seconds(work) / count
    begin = time.perf_counter()
    for one in work:
        one()
    return (time.perf_counter() - begin) / count


def _input_sets(body: Program, step: TimedStep, device: str) -> list[list[torch.Tensor]]:
    """Return several equal lists of inputs for the call in `body`.

    Together they are larger than the processor's caches. Each run therefore reads its inputs from memory.
    """
    generator = torch.Generator(device).manual_seed(1)
    first = inputs_for(body, step, device, generator)
    size = sum(tensor.untyped_storage().nbytes() for tensor in first)
    count = min(_MOST_SETS, max(1, -(-_TRAFFIC[device] // max(1, size))))
    return [first, *([_copy(tensor) for tensor in first] for _ in range(count - 1))]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor and keep its strides, because code is compiled for them."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _loaded(candidate: Candidate, body: Program, context: LoadContext) -> Call:
    """Load a backend's code for the call in `body`, and return a function that runs it.

    The function takes a list of inputs, one for each placeholder of `body`.
    """
    node, backend = call_of(body), candidate.backend
    built = None if candidate.executable is None else (candidate.executable, Path(str(candidate.folder)))
    entry = find_entry(backend)
    if built is not None and entry is not None and entry.executable is not None:
        run = load_executable(*built, context)
        return lambda inputs: run(*inputs)
    name = target_name(node.target)
    library = None if built is None else load_library(*built, context)
    return _bound(find_op(name, backend, library), body, node)


def _bound(function: Callable[..., Any], body: Program, node: fx.Node) -> Call:
    """Return a function that takes a list of inputs of `body`, and makes the call `node` with `function`.

    Tensor arguments come from the list, and all other arguments from the node.
    """
    place = {source: index for index, source in enumerate(body.placeholders())}

    def call(inputs: Sequence[torch.Tensor]) -> object:
        args = [inputs[place[value]] if isinstance(value, fx.Node) else value for value in node.args]
        return function(*args, **node.kwargs)

    return call
