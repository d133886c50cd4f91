"""Measure a decoder's matmuls on this GPU, by the tokens of a step.

    python benchmarks/kernels/linear.py [--shape 8b] [--seconds 40] [--json FILE]

For steps of up to 64 tokens, Ingot's kernels compute a matmul with the norm, gate or residual of its region, with the
tile sizes that a compile would choose; cuBLAS computes the matmul alone. For larger steps Ingot uses cuBLAS too. A CUDA
graph of each holds a sequence of calls over random weights, different ones for each call: two GB of them, or 128 calls.
The graphs take turns. Result buffers begin as NaN, and the last result is compared with the reference. Bytes are those
of the weight: x and the result stay in the cache between the kernels of a step.
"""

from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial

import benchmarks_path  # noqa: F401
import torch
from copy_bandwidth import copy_bandwidth
from device_times import Recorded, check, product_rate, take_turns, this_machine
from kernel_figures import Call, Peak, finish, kernel_parser, measure_figures, slug
from linear_products import Decoder

from ingot.backends.triton.lower.linear.choice import known_tiles
from ingot.backends.triton.lower.linear.problem import LinearProblem
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Machine, Pool, captured
from ingot.backends.triton.tune.linear import (
    MOST_LAUNCHES,
    STEPS,
    TRAFFIC,
    LinearBench,
    compile_all,
    expected,
    launcher,
)
from ingot.backends.triton.tune.linear_candidates import AnyTiles
from ingot.backends.triton.tune.search import compilers
from ingot.ir.types import DTYPES

MANY = (512, 2048)  # tokens of steps with prompts


@dataclass(frozen=True)
class Case:
    """A matmul of a model to measure, in steps of `tokens` tokens. `part` is its name, such as "qkv".

    `bare` is the matmul alone, as cuBLAS computes it. `problem` is the matmul with a norm, gate or residual, as Ingot's
    kernel computes it in one launch. It is None where Ingot uses cuBLAS.
    """

    part: str
    tokens: int
    bare: LinearProblem
    problem: LinearProblem | None

    @property
    def call(self) -> Call:
        """Return the name, bytes and operations of this matmul. Figures are computed from them.

        Each element of the result takes `depth` multiplications and `depth` additions.
        """
        what = f"{self.part}, {self.tokens} token{'s' * (self.tokens > 1)}"
        return Call(slug(what), what, self.bare.bytes, 2 * self.tokens * self.bare.columns * self.bare.depth)


def cases(decoder: Decoder) -> Iterator[Case]:
    for tokens in (*STEPS.values(), *MANY):
        for part, problem in decoder.parts(min(tokens, max(STEPS))).items():
            bare = LinearProblem(problem.rows, problem.depth, problem.tokens, problem.dtype, problem.dtype)
            if tokens not in MANY:
                yield Case(part, tokens, bare, problem)
            elif part != "head":  # the head computes only the last token of each prompt
                yield Case(part, tokens, bare, None)


def tiles_of(machine: Machine, problem: LinearProblem) -> AnyTiles:
    """Return the tile sizes that Ingot's compiler would choose for a matmul on this GPU."""
    return known_tiles(problem.product(), problem.tokens, machine.sm)[0]


def ours(machine: Machine, bench: LinearBench, problem: LinearProblem) -> Recorded:
    """Capture a CUDA graph of calls of Ingot's kernel for a matmul. Raises RuntimeError for wrong results."""
    call = launcher(machine, problem, tiles_of(machine, problem))
    inputs = [bench.inputs(problem) for _ in range(calls_of(problem))]
    call(inputs[-1])  # compile what was not compiled ahead
    found = Recorded(captured(partial(call, given) for given in inputs), len(inputs), (call, inputs))
    return check(found, call.output, expected(problem, inputs[-1], problem.columns))


def cublas(bench: LinearBench, case: Case) -> Recorded:
    """Capture a CUDA graph of calls of cuBLAS for a matmul.

    The norm, gate or residual that Ingot's kernel adds is left out. Raises RuntimeError for wrong results.
    """
    x = torch.randn(case.tokens, case.bare.depth, generator=bench.pool.generator, device=device.DEVICE)
    x = x.to(DTYPES[case.bare.dtype])
    out = x.new_empty(case.tokens, case.bare.columns)
    weights = [bench.weight(case.bare) for _ in range(calls_of(case.bare))]
    launches = [partial(torch.mm, x, weight.T, out=out) for weight in weights]
    launches[-1]()  # sets cuBLAS up outside the recording
    return check(Recorded(captured(launches), len(launches), (x, out)), out, x.float() @ weights[-1].float().T)


def calls_of(problem: LinearProblem) -> int:
    """Return how many calls of a matmul to capture in one CUDA graph.

    Together they read about TRAFFIC bytes of weights, within bounds for the number of calls.
    """
    return min(MOST_LAUNCHES, max(4, TRAFFIC // problem.bytes))


def measure(machine: Machine, bench: LinearBench, case: Case) -> dict[str, list[float]]:
    """Return the seconds of a call in each round of measurement, by implementation.

    Keys are "cublas" and, where Ingot uses its own kernel, "triton". Raises RuntimeError for wrong results.
    """
    own = {"triton": ours(machine, bench, case.problem)} if case.problem is not None else {}
    return take_turns({**own, "cublas": cublas(bench, case)})


def compile_ahead(machine: Machine, problems: list[LinearProblem]) -> None:
    """Compile Ingot's kernels for these matmuls in parallel processes, before they are measured.

    Triton then finds them in its cache.
    """
    with compilers() as processes:
        wait([processes.submit(compile_all, machine, problem, tiles_of(machine, problem)) for problem in problems])


def main() -> None:
    options = kernel_parser(__doc__ or "", 40.0).parse_args()
    machine, found = this_machine(), list(cases(Decoder.of(options.shape)))
    compile_ahead(machine, [case.problem for case in found if case.problem is not None])
    peak, bench = Peak(copy_bandwidth("cuda"), product_rate()), LinearBench(Pool())
    work = ((case.call, partial(measure, machine, bench, case)) for case in found)
    figures, missing = measure_figures("linear", work, peak, options.seconds, ours="triton", peer="cublas")
    finish(__file__, options, figures, missing)


if __name__ == "__main__":
    main()
