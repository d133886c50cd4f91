"""Measure the kernels of latent attention on this GPU, for DeepSeek-V2-Lite, DeepSeek-V3 and DeepSeek-V3.2.

    python benchmarks/kernels/latents.py [--only sparse] [--seconds 60] [--cache-dtype f8e4m3] [--json FILE]

attention     decode attention over cached latents: 512 numbers that are keys and values, and 64 more of a rotated key
sparse        DeepSeek-V3.2's indexer over 32 contexts of 16k positions, and attention over the 2048 that it chooses
head_linear   the matmuls of each head before and after it, and cuBLAS's batched matmul

A CUDA graph of each holds a sequence of calls over different random numbers, so that no cache holds them. Tile sizes
are those of a compile. The graphs take turns. The last result is compared with the reference. Bytes of attention are
those of the cached rows, and bytes of a matmul those of weights, x and the result.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import benchmarks_path  # noqa: F401
import torch
from copy_bandwidth import copy_bandwidth
from device_times import Recorded, check, product_rate, take_turns, this_machine
from kernel_figures import Call, Peak, finish, measure_figures, slug
from results import add_json_option
from sparse_decode import ATTEND, CHOOSE, SparseStep
from sparse_decode import measure as measure_sparse

from ingot.backends.triton.lower.attention.choice import known_tiles, most_heads
from ingot.backends.triton.lower.attention.problem import AUTO, DecodeProblem
from ingot.backends.triton.lower.call import Call as Lowered
from ingot.backends.triton.lower.linear import head_linear
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.attention import Mix, Steps, checked
from ingot.backends.triton.tune.device import Launcher, Machine, Pool, captured
from ingot.backends.triton.tune.linear import MOST_LAUNCHES, TRAFFIC
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.types import DTYPES, TensorType

PARTS = ("attention", "sparse", "head_linear")
PAGE = 16
CLASSES = (1, 16, 32, 64, 8192)  # maximum tokens of the bucket classes
HEADS = {"16 heads": 16, "128 heads": 128}  # heads of q: DeepSeek-V2-Lite, DeepSeek-V3
LATENT, ROTATED, INNER = 512, 64, 128
CONTEXTS: dict[str, tuple[int, ...]] = {
    "32 x 16k": (16384,) * 32,
    "32 x 2k": (2048,) * 32,
    "8 x 16k": (16384,) * 8,
    "1 x 16k": (16384,),
    "1 x 2k": (2048,),
}
TOKENS = (1, 8, 32, 64, 512, 2048)


def class_of(tokens: int) -> tuple[int, int]:
    """Return the fewest and the most tokens of the bucket class (range of step sizes) of a step."""
    least = 1
    for most in CLASSES:
        if tokens <= most:
            break
        least = most + 1
    return least, most


def problem_of(heads: int, sequences: int, cache_dtype: str) -> DecodeProblem:
    """Return the sizes of decode attention over latents, of `heads` q heads. A tile may hold a part of them."""
    tokens = class_of(sequences)[1]
    group = min(heads, most_heads(tokens))
    groups = heads // group
    return DecodeProblem(
        groups, group, LATENT + ROTATED, PAGE, "bf16", tokens, False, cache_dtype, f"latent_{LATENT}", groups
    )


def attention_call(problem: DecodeProblem, what: str, contexts: Sequence[int]) -> Call:
    form = problem.cache_form
    heads, positions = problem.kv_heads * problem.group, sum(contexts)
    flop = 2 * positions * heads * (form.key_width + form.value_width)
    return Call(slug(what), what, positions * problem.position_bytes, flop)


def measure_attention(
    machine: Machine, problem: DecodeProblem, contexts: tuple[int, ...], pool: Pool
) -> dict[str, list[float]]:
    """Return the seconds of one call in each round of measurement. Raises RuntimeError for wrong results."""
    steps = Steps(problem, Mix(contexts), pool)
    call = checked(machine, known_tiles(problem, machine.sm)[0], steps)
    graph = captured(partial(call, given) for given in reversed(steps.inputs))
    recorded = check(Recorded(graph, len(steps.inputs), (steps, call)), call.output, steps.expected)
    return take_turns({"triton": recorded})


@dataclass(frozen=True)
class Case:
    """A matmul of `heads` matrices [`columns`, `depth`] with x [`tokens`, `heads`, `depth`].

    A weight that multiplies q is stored with its axes exchanged: `turned`.
    """

    heads: int
    columns: int
    depth: int
    tokens: int
    turned: bool
    dtype: str = "bf16"

    @property
    def call(self) -> Call:
        name = "before" if self.turned else "after"
        what = f"{self.heads} heads, {name} attention, {self.tokens} token{'s' * (self.tokens > 1)}"
        moved = self.weight_bytes
        moved += self.tokens * self.heads * (self.columns + self.depth) * DTYPES[self.dtype].itemsize
        return Call(slug(what), what, moved, 2 * self.tokens * self.heads * self.columns * self.depth)

    @property
    def weight_bytes(self) -> int:
        return self.heads * self.columns * self.depth * DTYPES[self.dtype].itemsize

    @property
    def calls(self) -> int:
        return min(MOST_LAUNCHES, max(4, TRAFFIC // self.call.bytes))


def cases() -> Iterator[Case]:
    for heads, tokens in itertools.product(HEADS.values(), TOKENS):
        yield Case(heads, LATENT, INNER, tokens, turned=True)
        yield Case(heads, INNER, LATENT, tokens, turned=False)


def sparse_steps() -> Iterator[tuple[str, str, SparseStep]]:
    """Yield (op, what it is for readers, the step): the indexer, and attention by the heads of a device and by all."""
    contexts = CONTEXTS["32 x 16k"]
    yield CHOOSE, "indexer, 32 x 16k, 2048 chosen", SparseStep(contexts, 128)
    for name, heads in HEADS.items():
        yield ATTEND, f"attention, {name}, 32 x 16k, 2048 chosen", SparseStep(contexts, heads)


def launcher(machine: Machine, case: Case) -> Launcher:
    """Return a function that launches the kernel of a matmul on given inputs: x and the weight."""
    bucket = BucketClass(name="measured", tokens=class_of(case.tokens))
    schedule = Schedule(machine.sm, machine.cores, bucket, dependent=machine.dependent)
    dtype, row = DTYPES[case.dtype], case.depth + ROTATED
    x = TensorType(dtype, ("T", case.heads, case.depth), (case.heads * row, row, 1))
    strides = (case.columns * case.depth, 1, case.columns) if case.turned else None
    weight = TensorType(dtype, (case.heads, case.columns, case.depth), strides)
    result = TensorType(dtype, ("T", case.heads, case.columns))
    call = Lowered("head_linear", {"x": Value(x, input=0), "weight": Value(weight, input=1)}, {}, (result,))
    (made,) = head_linear.LOWERINGS["head_linear"](call, schedule)
    return Launcher(schedule, made, {"T": case.tokens})


def inputs_of(case: Case) -> list[list[torch.Tensor]]:
    """Return random inputs of successive calls. x is a part of a wider tensor, as q is."""
    generator = torch.Generator(device.DEVICE).manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device.DEVICE).to(DTYPES[case.dtype])

    found = []
    for _ in range(case.calls):
        x = drawn(case.tokens, case.heads, case.depth + ROTATED)[..., : case.depth]
        weight = (
            drawn(case.heads, case.depth, case.columns) if case.turned else drawn(case.heads, case.columns, case.depth)
        )
        found.append([x, weight.transpose(1, 2) if case.turned else weight])
    return found


def measure_matmul(machine: Machine, case: Case) -> dict[str, list[float]]:
    """Return the seconds of a call in each round of measurement. Raises RuntimeError for wrong results."""
    inputs = inputs_of(case)
    x, weight = inputs[-1]
    expected = torch.bmm(x.float().transpose(0, 1), weight.float().transpose(1, 2)).transpose(0, 1)
    call = launcher(machine, case)
    call(inputs[-1])
    ours = Recorded(captured(partial(call, one) for one in inputs), len(inputs), call)
    out = x.new_empty(case.heads, case.tokens, case.columns)
    launches = [partial(torch.bmm, x.transpose(0, 1), weight.transpose(1, 2), out=out) for x, weight in inputs]
    launches[-1]()  # sets cuBLAS up outside the recording
    peer = Recorded(captured(launches), len(launches), (inputs, out))
    return take_turns(
        {"triton": check(ours, call.output, expected), "cublas": check(peer, out, expected.transpose(0, 1))}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="the part to measure; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of a part after which no call begins")
    parser.add_argument("--cache-dtype", choices=(AUTO, "f8e4m3", "i8"), default=AUTO)
    add_json_option(parser)
    options = parser.parse_args()
    machine, peak = this_machine(), Peak(copy_bandwidth("cuda"), product_rate())
    figures, missing = {}, {}
    if options.only in (None, "attention"):
        pool = Pool()
        work = (
            (
                attention_call(problem, f"{what}, {name}", contexts),
                partial(measure_attention, machine, problem, contexts, pool),
            )
            for what, heads in HEADS.items()
            for name, contexts in CONTEXTS.items()
            for problem in [problem_of(heads, len(contexts), options.cache_dtype)]
        )
        figures, missing = measure_figures("latents", work, peak, options.seconds)
        del pool
    if options.only in (None, "sparse"):
        work = ((step.call(op, name), partial(measure_sparse, machine, step, op)) for op, name, step in sparse_steps())
        found, failed = measure_figures("sparse", work, peak, options.seconds)
        figures, missing = {**figures, **found}, {**missing, **failed}
    if options.only in (None, "head_linear"):
        work = ((case.call, partial(measure_matmul, machine, case)) for case in cases())
        found, failed = measure_figures("head_linear", work, peak, options.seconds, ours="triton", peer="cublas")
        figures, missing = {**figures, **found}, {**missing, **failed}
    finish(__file__, options, figures, missing)


if __name__ == "__main__":
    main()
