"""Measure times on a GPU: of calls that take turns, and of a large matmul as a reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ingot.backends.triton.tune.device import Machine, captured, require_close
from ingot.ir.machine.gpus import FEATURES

ROUNDS = 11  # rounds of turns
_SIDE = 8192  # side of the matrices of a large matmul; on an H200 their traffic takes a sixteenth of its time
_PRODUCTS = 4  # matmuls in a graph


def this_machine() -> Machine:
    """Return the properties of this GPU that determine which kernels are chosen."""
    found = torch.cuda.get_device_properties(0)
    sm = 10 * found.major + found.minor
    return Machine(sm, found.multi_processor_count, dependent=sm in FEATURES["dependent_launch"])


@dataclass(frozen=True)
class Recorded:
    """A CUDA graph of `calls` calls of equal size, one after another.

    `kept` holds the objects that must stay alive while the graph is used.
    """

    graph: torch.cuda.CUDAGraph
    calls: int
    kept: object


def check(
    recorded: Recorded, result: torch.Tensor, expected: torch.Tensor, places: Sequence[int] | None = None
) -> Recorded:
    """Run a CUDA graph once and compare the result of its last call with `expected`. Return the graph.

    `result` is the tensor that the graph writes. It is filled with NaN before. With `places`, `expected` has only these
    rows of the result, because all rows would cost too much. Raises RuntimeError if the result is wrong or incomplete.
    """
    result.fill_(float("nan"))
    recorded.graph.replay()
    require_close(result if places is None else result[places], expected)
    if not bool(result.isfinite().all()):
        raise RuntimeError("a part of the result was not computed")
    return recorded


def take_turns(recorded: Mapping[str, Recorded], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Return the seconds of one call in each round of measurement. Keys are the names of the CUDA graphs in `recorded`.

    A round replays each graph once. So if the GPU slows down, all graphs are affected.
    """
    found: dict[str, list[float]] = {name: [] for name in recorded}
    for one in recorded.values():
        one.graph.replay()
    for _ in range(rounds):
        for name, one in recorded.items():
            found[name].append(_seconds(one.graph) / one.calls)
    return found


def product_rate() -> float:
    """Return the operations per second of a large bfloat16 matmul by cuBLAS. The best of several runs counts.

    The numbers are random. A matmul of zeros takes less power and would run at a higher clock.
    """
    generator = torch.Generator("cuda").manual_seed(1)
    a, b = (torch.randn(_SIDE, _SIDE, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)  # sets cuBLAS up outside the recording
    graph = captured([lambda: torch.mm(a, b, out=out)] * _PRODUCTS)
    graph.replay()
    least = min(_seconds(graph) for _ in range(ROUNDS))
    return _PRODUCTS * 2 * _SIDE**3 / least


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3
