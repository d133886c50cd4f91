"""Search for the fastest tile sizes of a kernel for given sizes of a call, within a time limit.

These sizes and dtypes are called a problem. Other processes compile the kernels to time.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Protocol

import triton

from ingot.backends.triton.lower.attention.problem import DECODE_ATTENTION, DecodeProblem
from ingot.backends.triton.lower.experts.problem import EXPERTS, ExpertsProblem
from ingot.backends.triton.lower.linear.problem import LINEAR, LinearProblem
from ingot.backends.triton.tune import (
    attention,
    attention_candidates,
    attention_matmuls,
    experts,
    linear,
    linear_candidates,
)
from ingot.backends.triton.tune.device import Machine, Pool
from ingot.ir.artifact.tuning import Choice
from ingot.ir.errors import BackendError
from ingot.ir.machine.target import Target

# The share of a problem's time limit for the first candidates. The rest is for variants of the best of them.
_FIRST = 0.75


class Timed(Protocol):
    """A measurement of a kernel with certain tile sizes. `microseconds` is the time of one call.

    `problem` holds the sizes and dtypes of the call.
    """

    @property
    def problem(self) -> Any: ...
    @property
    def tiles(self) -> Any: ...
    @property
    def microseconds(self) -> float: ...


@dataclass(frozen=True)
class Subject:
    """The functions that tune one kernel, such as the matmul kernel. A problem is the sizes and dtypes of a call.

    - `read`: returns the problem that an entry of the tuning log describes
    - `bench`: makes a benchmark that times kernels on the memory of a pool
    - `compile_all`: compiles the kernels of (machine, problem, tile sizes) into Triton's cache
    - `candidates`: returns the tile sizes to time first
    - `more_candidates`: returns variants of the best of them
    - `best`: returns the best of several measurements
    - `prepare`: compiles the other kernels that (machine, problem) is timed with. The time limit does not include it
    """

    read: Callable[[Choice], Any]
    bench: Callable[[Pool], Any]
    compile_all: Callable[[Machine, Any, Any], None]
    candidates: Callable[[Any, Machine], Sequence[Any]]
    more_candidates: Callable[[Any, Any], Sequence[Any]]
    best: Callable[[Sequence[Any]], Timed]
    prepare: Callable[[Machine, Any], None] = lambda *_: None


def microseconds(timed: Timed) -> float:
    return timed.microseconds


def fastest(found: Sequence[Timed]) -> Timed:
    return min(found, key=microseconds)


# The functions by the name of the kernel.
SUBJECTS = {
    LINEAR: Subject(
        LinearProblem.of, linear.LinearBench, linear.compile_all,
        linear_candidates.candidates, linear_candidates.more_candidates, fastest,
    ),
    EXPERTS: Subject(
        ExpertsProblem.of, experts.ExpertsBench, experts.compile_all,
        experts.candidates, experts.more_candidates, fastest,
    ),
    DECODE_ATTENTION: Subject(
        DecodeProblem.of, attention.AttentionBench, attention.compile_all,
        attention_candidates.candidates, attention_candidates.more_candidates, attention.best,
        attention_matmuls.compile_matmuls,
    ),
}  # fmt: skip


def measure(choice: Choice, target: Target, seconds: float) -> Choice:
    """Time kernels for about `seconds`, to find the best tile sizes of a call. Return `choice` with these tile sizes.

    `choice` is an entry of the tuning log. It names the kernel, the sizes and dtypes of its call, and the tile sizes so
    far. Those are timed first. Raises BackendError if they do not run.
    """
    assert target.sm is not None
    machine = Machine(target.sm, target.cores, dependent="dependent_launch" in target.features)
    subject = SUBJECTS[choice.kernel]
    problem = subject.read(choice)
    try:
        bench, compilers = _bench(choice.kernel), _compilers()
        subject.prepare(machine, problem)
        begin = time.monotonic()
        first = bench.measure(machine, problem, problem.tiles_kind(**choice.tiles))
    except Exception as error:  # Triton and the driver raise many types
        raise BackendError(f"{choice} could not be timed: {type(error).__name__}: {error}"[:500]) from error

    def tried(tiles: Sequence[Any], deadline: float) -> list[Timed]:
        others = [(problem, one) for one in tiles if one not in [timed.tiles for timed in found]]
        return measure_all(bench, compilers, subject.compile_all, machine, others, deadline)

    found: list[Timed] = [first]
    found += tried(subject.candidates(problem, machine), begin + _FIRST * seconds)
    found += tried(subject.more_candidates(problem, subject.best(found).tiles), begin + seconds)
    best = subject.best(found)
    return choice.model_copy(
        update={"tiles": asdict(best.tiles), "microseconds": round(best.microseconds, 3), "source": "measured"}
    )


@cache
def _pool() -> Pool:
    """Return the memory pool of this process, which all benchmarks share."""
    return Pool()


@cache
def _bench(kernel: str) -> Any:
    return SUBJECTS[kernel].bench(_pool())


@cache
def _compilers() -> ProcessPoolExecutor:
    """Start the compiler processes, wait until they have imported their modules, and return their executor."""
    pool = compilers()
    wait([pool.submit(_ready) for _ in range(_processes())])
    return pool


def _ready() -> None:
    """Make a process of the executor import this module. The sleep makes each process take one call."""
    time.sleep(0.2)


def _processes() -> int:
    return max(1, len(os.sched_getaffinity(0)) - 2)


def compilers() -> ProcessPoolExecutor:
    """Return a new executor of processes that compile kernels.

    The processes are spawned, because a fork breaks the CUDA context.
    """
    return ProcessPoolExecutor(_processes(), mp_context=multiprocessing.get_context("spawn"))


def measure_all(
    bench: Any,
    compilers: ProcessPoolExecutor,
    compile_all: Callable[[Machine, Any, Any], None],
    machine: Machine,
    jobs: Sequence[tuple[Any, Any]],
    deadline: float,
) -> list[Any]:
    """Compile and time kernels, and return the measurements in the order of timing.

    Each job is (problem, tile sizes). A problem is the sizes and dtypes of a call. `compile_all` runs in the processes
    `compilers`. `bench` times each job as soon as it is compiled. `deadline` is a time of `time.monotonic`. Later jobs
    are left out. Tile sizes that do not fit or return wrong results are left out, too.
    """
    found: list[Any] = []
    compiled = {compilers.submit(compile_all, machine, problem, tiles): (problem, tiles) for problem, tiles in jobs}
    try:
        for future in as_completed(compiled, timeout=max(0.1, deadline - time.monotonic())):
            problem, tiles = compiled[future]
            try:
                future.result()
                found.append(bench.measure(machine, problem, tiles))
            except (triton.runtime.errors.TritonError, triton.CompilationError, RuntimeError) as error:
                print(f"{problem}, {tiles}: {error}"[:300])
            if time.monotonic() > deadline:
                raise TimeoutError
    except TimeoutError:
        print(f"out of time: {len(found)} of {len(jobs)} were timed")
    finally:
        for future in compiled:
            future.cancel()
    return found
