"""Times on a GPU: of calls that take turns, and of the simple programs that they are held against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ingot.backends.triton.tune.device import Machine, captured, require_close
from ingot.ir.machine.gpus import FEATURES

ROUNDS = 11  # of turns
_SIDE = 8192  # of the matrices of a large product: on an H200 to read and write them takes a sixteenth of its time
_PRODUCTS = 4  # in a row


def this_machine() -> Machine:
    """This GPU, as schedules have it."""
    found = torch.cuda.get_device_properties(0)
    sm = 10 * found.major + found.minor
    return Machine(sm, found.multi_processor_count, dependent=sm in FEATURES["dependent_launch"])


@dataclass(frozen=True)
class Recorded:
    """A CUDA graph of some equal calls in a row, and what has to stay in memory for it."""

    graph: torch.cuda.CUDAGraph
    calls: int
    kept: object


def check(
    recorded: Recorded, result: torch.Tensor, expected: torch.Tensor, places: Sequence[int] | None = None
) -> Recorded:
    """The same. Raises RuntimeError where the result of its last call is wrong, or was not computed; where computing
    what is expected takes too much, that is of some `places` alone."""
    result.fill_(float("nan"))
    recorded.graph.replay()
    require_close(result if places is None else result[places], expected)
    if not bool(result.isfinite().all()):
        raise RuntimeError("a part of the result was not computed")
    return recorded


def take_turns(recorded: Mapping[str, Recorded], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of one call in each round. In a round each graph is replayed once, so that whatever else slows the GPU
    down meets all of them."""
    found: dict[str, list[float]] = {name: [] for name in recorded}
    for one in recorded.values():
        one.graph.replay()
    for _ in range(rounds):
        for name, one in recorded.items():
            found[name].append(_seconds(one.graph) / one.calls)
    return found


def product_rate() -> float:
    """Operations a second of a large product in bfloat16, by cuBLAS: the best of some. Random numbers, since a product
    of zeros takes less power, and so runs at a higher clock."""
    generator = torch.Generator("cuda").manual_seed(1)
    a, b = (torch.randn(_SIDE, _SIDE, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)  # sets cuBLAS up, outside of the recording
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
