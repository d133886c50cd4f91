"""Measure the experts of a mixture on this GPU, by model, tokens of a step, and routing.

    python benchmarks/kernels/experts.py [--shape qwen3-30b-a3b] [--tokens 1,32] [--routings random]
        [--format mxfp4] [--sweep]

A call is the op `experts` of one layer, with all its launches. In the routing "same" all tokens choose the same
experts, in "uniform" each expert is chosen equally often, and "random" draws them. A CUDA graph holds several calls.
Successive calls have different experts where there are enough, so a cache holds none of their weights. The first rows
of the last result are compared with the op's reference in float32. Bytes are those of the different experts that a call
needs, and of its rows. Operations are those of all choices.

With --sweep, each matmul is timed with several tile sizes first. The best ones are printed and used. With --block, the
choices of a step are computed in blocks of this many, with 1 one by one, and not in those of a compile. With --format,
weights are stored in a quantized format, such as mxfp4, fp8_block128, int4_g128 or int8.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import benchmarks_path  # noqa: F401
import torch
import triton
from copy_bandwidth import copy_bandwidth
from device_times import Recorded, check, product_rate, take_turns, this_machine
from kernel_figures import Call, Peak, finish, kernel_parser, measure_figures, slug

from ingot.backends.triton.lower.experts.fragments import blocks_of
from ingot.backends.triton.lower.experts.problem import EXPERTS, ExpertsProblem
from ingot.backends.triton.lower.experts.tiles import ranges_of
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Launcher, Machine, captured
from ingot.backends.triton.tune.experts import (
    CHECKED,
    ROUTINGS,
    AnyTiles,
    Mixture,
    bucket_of,
    candidates,
    chosen_by,
    draw_calls,
    draw_weights,
    expected,
    make_schedule,
)
from ingot.ir.errors import OptionError
from ingot.ir.formats import find_format
from ingot.ir.ops.expert_weights import PLAIN
from ingot.ir.types import DTYPES

TOKENS = "1,8,32,128,512,4096"
# Sizes from the models' config.json. GPT-OSS is stored in MXFP4: --format mxfp4.
MODELS: Mapping[str, Mixture] = {
    "qwen3-30b-a3b": Mixture(2048, 768, 128, 8),
    "gpt-oss-20b": Mixture(2880, 2880, 32, 4, biases=True, activation="clamped"),
    "deepseek-v2-lite": Mixture(2048, 1408, 64, 6),
}
ALL = "all"
GivenTiles = dict[ExpertsProblem, AnyTiles]


@dataclass(frozen=True)
class Case:
    """The experts of a model in a step of `tokens` tokens."""

    model: str
    mixture: Mixture
    tokens: int
    routing: str
    block: int | None = None

    @property
    def what(self) -> str:
        block = "" if self.block is None else f", blocks of {self.block}"
        format = "" if self.mixture.formats[0] == PLAIN else f", {self.mixture.formats[0]}"
        return f"{self.model}{format}, {self.tokens} token{'s' * (self.tokens > 1)}, {self.routing}{block}"

    def different(self) -> int:
        """Return how many different experts the step needs: those of a draw with the seed of the measurement."""
        return len(chosen_by(self.routing, self.tokens, self.mixture, generator()).unique())

    @property
    def call(self) -> Call:
        mixture, tokens = self.mixture, self.tokens
        rows = 2 * tokens * mixture.hidden * DTYPES[mixture.dtype].itemsize + 8 * tokens * mixture.top_k
        flop = 6 * tokens * mixture.top_k * mixture.hidden * mixture.ffn
        return Call(slug(self.what), self.what, self.different() * mixture.expert_bytes + rows, flop)


def generator() -> torch.Generator:
    return torch.Generator(device.DEVICE).manual_seed(2)


def cases(
    shape: str, tokens: list[int], routings: list[str], block: int | None = None, format: str = PLAIN
) -> Iterator[Case]:
    """Yield the calls to measure. With one token, a routing at random is as any other.

    Raises OptionError for an unknown format, and for one that the weights of a model do not fit.
    """
    stored = find_format(format)
    for model, mixture in MODELS.items():
        problems = [stored.obstacle(shape[1:]) for shape in mixture.shapes.values()] if shape in (model, ALL) else []
        if problem := next(filter(None, problems), None):
            raise OptionError(f"format '{format}' does not fit {model}: {problem}", expected="another format or shape")
        mixture = replace(mixture, formats=(format, format))
        if shape in (model, ALL):
            for step, routing in itertools.product(tokens, routings):
                if step > 1 or routing == routings[0]:
                    yield Case(model, mixture, step, routing, block)


class Bench:
    """Measures the experts of one model after the other, each with one set of weights."""

    def __init__(self, machine: Machine, sweep: bool) -> None:
        self.machine, self.sweep = machine, sweep
        self._weights: tuple[Mixture | None, list[torch.Tensor]] = (None, [])

    def weights(self, mixture: Mixture) -> list[torch.Tensor]:
        if self._weights[0] != mixture:
            self._weights = (None, [])  # free the memory of the last model first
            self._weights = (mixture, draw_weights(mixture, torch.Generator(device.DEVICE).manual_seed(1)))
        return self._weights[1]

    def recorded(self, case: Case, tiles: GivenTiles) -> Recorded:
        """Capture a CUDA graph of calls of Ingot's kernels. Raises RuntimeError for wrong results."""
        inputs, _ = draw_calls(case.mixture, self.weights(case.mixture), case.tokens, case.routing, generator())
        made = make_schedule(self.machine, case.mixture, case.tokens, tiles, case.block)
        call = Launcher(*made, {"T": case.tokens})
        call(inputs[-1])
        graph = captured(partial(call, one) for one in inputs)
        places = list(range(min(CHECKED, case.tokens)))
        return check(Recorded(graph, len(inputs), call), call.output, expected(case.mixture, inputs[-1]), places)

    def measure(self, case: Case) -> dict[str, list[float]]:
        """Return the seconds of a call in each round of measurement."""
        tiles = self.best_tiles(case) if self.sweep else {}
        return take_turns({"triton": self.recorded(case, tiles)})

    def best_tiles(self, case: Case) -> GivenTiles:
        """Time a call with several tile sizes of its first matmul, then of its second. Print and return the fastest."""
        found: GivenTiles = {}
        for problem in problems(self.machine, case):
            tried: dict[AnyTiles, float] = {}
            for tiles in candidates(problem, self.machine):
                try:
                    times = take_turns({"triton": self.recorded(case, {**found, problem: tiles})}, rounds=3)
                    tried[tiles] = min(times["triton"])
                except (triton.runtime.errors.TritonError, triton.CompilationError, RuntimeError) as error:
                    print(f"  {case.what}: {tiles}: {error}"[:200], flush=True)
            found[problem] = min(tried, key=lambda tiles: tried[tiles])
            first = next(iter(tried))
            print(f"  {problem}: {found[problem]} {min(tried.values()) * 1e6:.2f} us", flush=True)
            print(f"    a compile's: {first} {tried[first] * 1e6:.2f} us", flush=True)
        return found


def problems(machine: Machine, case: Case) -> list[ExpertsProblem]:
    """Return the two matmuls that compute a step. Its class may have others, for steps of other sizes."""
    mixture, block = case.mixture, case.block
    schedule, _ = make_schedule(machine, mixture, case.tokens, block=case.block)
    found = [ExpertsProblem.of(choice) for choice in schedule.choices if choice.kernel == EXPERTS]
    if block is None:
        bounds, alone = bucket_of(case.tokens).tokens, any(problem.block == 1 for problem in found)
        few = blocks_of(mixture.formats, DTYPES[mixture.dtype], machine.sm)
        ranges = ranges_of(*bounds, mixture.experts, mixture.top_k, mixture.dtype == "f32", alone=alone, few=few)
        block = next(part.block for part in ranges if case.tokens <= part.most)
    return [problem for problem in found if problem.block == block]


def main() -> None:
    parser = kernel_parser(__doc__ or "", 300.0, shapes=(ALL, *MODELS))
    parser.add_argument("--tokens", default=TOKENS, help="tokens of steps, separated by commas")
    parser.add_argument("--routings", default=",".join(ROUTINGS), help="routings, separated by commas")
    parser.add_argument("--block", type=int, choices=(1, 8, 16, 32, 64, 128), help="choices of a block")
    parser.add_argument("--format", default=PLAIN, help="the storage format of the weights")
    parser.add_argument("--sweep", action="store_true", help="search tile sizes first")
    options = parser.parse_args()
    bench = Bench(this_machine(), options.sweep)
    steps = list(map(int, options.tokens.split(",")))
    found = cases(options.shape, steps, options.routings.split(","), options.block, options.format)
    peak = Peak(copy_bandwidth("cuda"), product_rate())
    work = ((case.call, partial(bench.measure, case)) for case in found)
    figures, missing = measure_figures("experts", work, peak, options.seconds)
    finish(__file__, options, figures, missing)


if __name__ == "__main__":
    main()
