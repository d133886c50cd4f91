"""The fastest tile sizes for a product, within a time: kernels are compiled in other processes, ahead of the timing."""

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from dataclasses import asdict
from functools import cache

import triton

from ingot.backends.triton.lower.linear_problem import LinearProblem
from ingot.backends.triton.tune.bench import Bench, Timed, compile_all
from ingot.backends.triton.tune.candidates import AnyTiles, Machine, candidates, more_candidates
from ingot.ir.errors import BackendError
from ingot.ir.target import Target
from ingot.ir.tuning import Choice

# Of the time for a problem, what the first candidates get; the rest is for variants of the best of them.
_FIRST = 0.75


def measure(choice: Choice, target: Target, seconds: float) -> Choice:
    """The fastest tiles for what `choice` is about, its own among them, found in about `seconds`. Raises BackendError
    where those do not run."""
    assert target.sm is not None
    machine = Machine(target.sm, target.cores, dependent="dependent_launch" in target.features)
    problem = LinearProblem.of(choice)
    try:
        bench, compilers = _bench(), _compilers()
        begin = time.monotonic()
        first = bench.measure(machine, problem, problem.tiles_kind(**choice.tiles))
    except Exception as error:  # whatever Triton and the driver raise
        raise BackendError(f"no time could be taken of {choice}: {type(error).__name__}: {error}"[:500]) from error
    found = [first]
    tried = [tiles for tiles in candidates(problem, machine) if tiles != first.tiles]
    found += measure_all(bench, compilers, machine, [(problem, tiles) for tiles in tried], begin + _FIRST * seconds)
    best = min(found, key=microseconds)
    more = [tiles for tiles in more_candidates(problem, best.tiles) if tiles != best.tiles]
    found += measure_all(bench, compilers, machine, [(problem, tiles) for tiles in more], begin + seconds)
    best = min(found, key=microseconds)
    return choice.model_copy(
        update={"tiles": asdict(best.tiles), "microseconds": round(best.microseconds, 3), "source": "measured"}
    )


def microseconds(timed: Timed) -> float:
    return timed.microseconds


@cache
def _bench() -> "Bench":
    """One for the process: it fills its pool first."""
    return Bench()


@cache
def _compilers() -> ProcessPoolExecutor:
    """Processes that are up, so that no problem waits for their imports. They end with this one."""
    pool = compilers()
    wait([pool.submit(_ready) for _ in range(_processes())])
    return pool


def _ready() -> None:
    """Called in a process of the pool, which imports this module for it. It lets the others have a call, too."""
    time.sleep(0.2)


def _processes() -> int:
    return max(1, len(os.sched_getaffinity(0)) - 2)


def compilers() -> ProcessPoolExecutor:
    """Spawned, because forked ones would share the device's context, which does not outlive a fork."""
    return ProcessPoolExecutor(_processes(), mp_context=multiprocessing.get_context("spawn"))


def measure_all(
    bench: Bench,
    compilers: ProcessPoolExecutor,
    machine: Machine,
    jobs: Sequence[tuple[LinearProblem, AnyTiles]],
    deadline: float,
) -> list[Timed]:
    """In the order in which the kernels come out of the compilers. What is left at the deadline (`time.monotonic`) is
    left out, and so are tiles that do not fit or give wrong results."""
    found: list[Timed] = []
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
