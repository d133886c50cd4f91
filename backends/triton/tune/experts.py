"""Time the kernels of a mixture's experts with different tile sizes, as whole calls of the op `experts`.

One layer's weights are far larger than a cache. Each call of a CUDA graph has its own routing, so the experts of a call
are not those of the call before it, unless the routing needs all of them.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial

import torch

from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.experts.experts import lower_experts
from ingot.backends.triton.lower.experts.problem import EXPERTS, ExpertsProblem
from ingot.backends.triton.lower.experts.tiles import GroupTiles, RowTiles, group_tiles, ranges_of, row_tiles
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Launcher, Machine, Pool, compile_launches
from ingot.ir import ops
from ingot.ir.artifact.plan import GPU_FEW_TOKENS, BucketClass
from ingot.ir.artifact.tuning import Choice
from ingot.ir.types import DTYPES, TensorType

AnyTiles = RowTiles | GroupTiles
TRAFFIC = 1 << 31  # least bytes that a graph reads: half a millisecond, against some microseconds for its launch
MOST_CALLS = 16  # most calls of a graph: recording a call takes longer than running it
CHECKED = 256  # most rows of a result that are compared with the reference
ROUTINGS = ("same", "uniform", "random")
_MOST_TOKENS = 8192


@dataclass(frozen=True)
class Mixture:
    """The sizes of a mixture's experts, and what they compute: the arguments of the op `experts`."""

    hidden: int
    ffn: int
    experts: int
    top_k: int
    dtype: str = "bf16"
    biases: bool = False
    activation: str = "silu"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the weights and biases by parameter name."""
        found: dict[str, tuple[int, ...]] = {
            "gate_up": (self.experts, 2 * self.ffn, self.hidden),
            "down": (self.experts, self.hidden, self.ffn),
        }
        if self.biases:
            found |= {"gate_up_bias": found["gate_up"][:2], "down_bias": found["down"][:2]}
        return found

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of the weights and biases of one expert."""
        return sum(math.prod(shape[1:]) for shape in self.shapes.values()) * DTYPES[self.dtype].itemsize


def bucket_of(tokens: int) -> BucketClass:
    """Return the bucket class (range of step sizes) of a step, as a compile has it."""
    bounds = ((1, 1), (2, 16), (17, 32), (33, GPU_FEW_TOKENS), (GPU_FEW_TOKENS + 1, max(tokens, _MOST_TOKENS)))
    return BucketClass(name="tuning", tokens=next(one for one in bounds if tokens <= one[1]))


def make_schedule(
    machine: Machine,
    mixture: Mixture,
    tokens: int,
    tiles: Mapping[ExpertsProblem, AnyTiles] | None = None,
    block: int | None = None,
) -> tuple[Schedule, Value]:
    """Return the schedule (the kernel launches) of the experts of a step of `tokens` tokens, and the result.

    `tiles` are tile sizes of some matmuls; others have those of a compile. `block` is the number of choices in a block,
    None for that of a compile. The inputs are those of the op, in order.
    """
    schedule = Schedule(machine.sm, machine.cores, bucket_of(tokens), dependent=machine.dependent)
    choices = [
        Choice(kernel=EXPERTS, problem=problem.fields(), tiles=asdict(one), source="measured")
        for problem, one in (tiles or {}).items()
    ]
    schedule.given = {choice.key: choice for choice in choices}
    dtype = DTYPES[mixture.dtype]
    types = {
        "x": TensorType(dtype, ("T", mixture.hidden)),
        "weights": TensorType(torch.float32, ("T", mixture.top_k)),
        "chosen": TensorType(torch.int32, ("T", mixture.top_k)),
        **{name: TensorType(dtype, shape) for name, shape in mixture.shapes.items()},
    }
    values: dict[str, Value | None] = dict.fromkeys(("gate_up_bias", "down_bias"))
    values |= {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
    formats = {"gate_up_format": "plain", "down_format": "plain"}
    attributes = {"activation": mixture.activation, "limit": 7.0, "alpha": 1.702, "weigh_input": False, **formats}
    call = Call("experts", values, attributes, (types["x"],))
    return schedule, lower_experts(call, schedule, block)[0]


def chosen_by(routing: str, tokens: int, mixture: Mixture, generator: torch.Generator) -> torch.Tensor:
    """Return the experts i32[tokens, top_k] that tokens choose: the same for all, each equally often, or at random."""
    experts, top_k = mixture.experts, mixture.top_k
    if routing == "same":
        return torch.arange(top_k, dtype=torch.int32, device=device.DEVICE).expand(tokens, top_k).contiguous()
    if routing == "uniform":
        places = torch.arange(tokens * top_k, device=device.DEVICE).view(tokens, top_k)
        return (places % experts).int()
    scores = torch.rand(tokens, experts, generator=generator, device=device.DEVICE)
    return scores.topk(top_k, -1).indices.int()


def draw_weights(mixture: Mixture, generator: torch.Generator) -> list[torch.Tensor]:
    """Return random weights and biases of a mixture, in the order of the op's parameters."""
    found = []
    for shape in mixture.shapes.values():
        tensor = torch.empty(shape, dtype=DTYPES[mixture.dtype], device=device.DEVICE)
        for part in tensor:  # expert by expert: the numbers are float32 at first
            part.copy_(torch.randn(part.shape, generator=generator, device=device.DEVICE) * part.shape[-1] ** -0.5)
        found.append(tensor)
    return found


def draw_calls(
    mixture: Mixture, weights: Sequence[torch.Tensor], tokens: int, routing: str, generator: torch.Generator
) -> tuple[list[list[torch.Tensor]], int]:
    """Return the inputs of a graph's calls, and the number of different experts that each of them needs."""
    first = chosen_by(routing, tokens, mixture, generator)
    different = len(first.unique())
    count = min(MOST_CALLS, max(4, TRAFFIC // (different * mixture.expert_bytes)))
    calls = []
    for number in range(count):
        x = torch.randn(tokens, mixture.hidden, generator=generator, device=device.DEVICE)
        shares = torch.rand(tokens, mixture.top_k, generator=generator, device=device.DEVICE)
        chosen = (first + number * different) % mixture.experts
        calls.append([x.to(DTYPES[mixture.dtype]), shares / shares.sum(-1, keepdim=True), chosen.int(), *weights])
    return calls, different


def expected(mixture: Mixture, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the first rows of a call's result, at most CHECKED, computed in float32 by the op's reference."""
    x, shares, chosen, *weights = inputs
    rows = (x[:CHECKED].float(), shares[:CHECKED], chosen[:CHECKED])
    options = {"activation": mixture.activation, "limit": 7.0, "alpha": 1.702}
    result: torch.Tensor = ops.experts.reference(*rows, *(one.float() for one in weights), **options)
    return result


@dataclass(frozen=True)
class TimedExperts:
    """The measurement of the op `experts`, one of whose matmuls has certain tile sizes, in microseconds of a call."""

    problem: ExpertsProblem
    tiles: AnyTiles
    microseconds: float


def mixture_of(problem: ExpertsProblem) -> Mixture:
    """Return a mixture that has the matmul `problem`."""
    hidden, ffn = (problem.depth, problem.columns) if problem.gated else (problem.columns, problem.depth)
    return Mixture(hidden, ffn, problem.experts, problem.top_k, problem.dtype)


def tokens_of(problem: ExpertsProblem) -> int:
    """Return the tokens of the step in which a matmul is timed: the middle of the steps that compute it.

    Choices are computed alone most often in steps of one token.
    Raises RuntimeError if no step of a bucket class does.
    """
    found = [
        part
        for most in (1, 16, 32, GPU_FEW_TOKENS, _MOST_TOKENS)
        for part in ranges_of(*bucket_of(most).tokens, problem.experts, problem.top_k, problem.dtype == "f32")
        if part.block == problem.block
    ]
    if not found:
        raise RuntimeError(f"no step computes experts in blocks of {problem.block}")
    least = found[0].least
    return least if problem.block == 1 else round(math.sqrt(least * found[-1].most))


class ExpertsBench:
    """A benchmark of experts. Their weights are drawn anew only for other sizes or another dtype."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def measure(self, machine: Machine, problem: ExpertsProblem, tiles: AnyTiles) -> TimedExperts:
        """Check and time a call of `experts` in which the matmul `problem` has these tile sizes.

        Raises RuntimeError for wrong results, and Triton's errors for tiles that do not fit.
        """
        mixture, tokens = mixture_of(problem), tokens_of(problem)
        call = Launcher(*make_schedule(machine, mixture, tokens, {problem: tiles}), {"T": tokens})
        inputs = _calls(mixture, tokens)
        call(inputs[-1])
        device.require_close(call.output[:CHECKED], expected(mixture, inputs[-1]))
        seconds = device.graph_seconds(partial(call, one) for one in inputs) / len(inputs)
        return TimedExperts(problem, tiles, seconds * 1e6)


@lru_cache(maxsize=1)  # of one layer at a time
def _weights(mixture: Mixture) -> list[torch.Tensor]:
    return draw_weights(mixture, torch.Generator(device.DEVICE).manual_seed(1))


@lru_cache(maxsize=1)
def _calls(mixture: Mixture, tokens: int) -> list[list[torch.Tensor]]:
    return draw_calls(mixture, _weights(mixture), tokens, "random", torch.Generator(device.DEVICE).manual_seed(2))[0]


def compile_all(machine: Machine, problem: ExpertsProblem, tiles: AnyTiles) -> None:
    """Compile the kernels with these tile sizes into Triton's cache on disk, without using the GPU."""
    tokens = tokens_of(problem)
    compile_launches(make_schedule(machine, mixture_of(problem), tokens, {problem: tiles})[0], {"T": tokens})


def known(problem: ExpertsProblem, machine: Machine) -> AnyTiles:
    """Return the tile sizes of a matmul that was not tuned."""
    itemsize = DTYPES[problem.dtype].itemsize
    if problem.block == 1:
        sums = 0 if problem.gated else problem.top_k
        return row_tiles(problem.depth, itemsize, sums)
    return group_tiles(problem.columns, problem.depth, problem.gated, problem.block, itemsize, machine.sm)


def candidates(problem: ExpertsProblem, machine: Machine) -> list[AnyTiles]:
    """Return the tile sizes to time for a matmul: those of a compile, and others that fit."""
    found = _row_candidates(problem) if problem.block == 1 else _group_candidates(problem, machine)
    return list(dict.fromkeys([known(problem, machine), *found]))


def _row_candidates(problem: ExpertsProblem) -> Iterator[AnyTiles]:
    parts, itemsize = 2 if problem.gated else 1, DTYPES[problem.dtype].itemsize
    for block_n, block_k, warps in itertools.product((1, 2, 4, 8, 16), (256, 512, 1024, 2048), (4, 8)):
        held = block_n * block_k * parts * itemsize / (32 * warps)  # bytes of a tile that a thread holds
        unrolled = 1 if problem.gated else problem.top_k * math.ceil(problem.depth / block_k)
        if block_k < 2 * problem.depth and 32 <= held <= 256 and unrolled <= 32:
            yield RowTiles(block_n, block_k, warps)


def _group_candidates(problem: ExpertsProblem, machine: Machine) -> Iterator[AnyTiles]:
    parts, itemsize = 2 if problem.gated else 1, DTYPES[problem.dtype].itemsize
    for block_n, block_k, warps, programs in itertools.product((64, 128, 256), (64, 128), (4, 8), (1, 2, 3)):
        rows = parts * block_n + problem.block
        stages = min(6, (shared_memory(machine.sm) // programs - 4096) // (rows * block_k * itemsize))
        # A thread holds up to 128 sums, and a program of few rows has few warps.
        sums = parts * block_n * problem.block // (32 * warps)
        if stages < 2 or sums > 128 or block_k >= 2 * problem.depth or block_n >= 2 * problem.columns:
            continue
        if parts * block_n >= 32 * warps:
            yield GroupTiles(block_n, block_k, warps, stages, together=8 if problem.block > 64 else 1)


def more_candidates(problem: ExpertsProblem, tiles: AnyTiles) -> list[AnyTiles]:
    """Return variants of `tiles`, the best tile sizes so far, with other orders of programs."""
    if isinstance(tiles, RowTiles):
        return []
    return [replace(tiles, together=together) for together in (1, 2, 4, 8, 16) if together != tiles.together]
