"""Time the kernels of a mixture's experts with different tile sizes, as whole calls of the op `experts`.

One layer's weights are far larger than a cache. Each call of a CUDA graph has its own routing, so the experts of a call
are not those of the call before it, unless the routing needs all of them.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.experts.experts import lower_experts
from ingot.backends.triton.lower.experts.fragments import blocks_of, fragment_tiles, most_warps, reads_fragments
from ingot.backends.triton.lower.experts.problem import EXPERTS, ExpertsProblem
from ingot.backends.triton.lower.experts.tiles import (
    LARGEST_BLOCK,
    GroupTiles,
    RowTiles,
    group_tiles,
    ranges_of,
    row_tiles,
)
from ingot.backends.triton.lower.quant.tiles import QuantMatvecTiles
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.lower.sizes import power_of_two
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Launcher, Machine, Pool, compile_launches
from ingot.ir import ops
from ingot.ir.artifact.plan import GPU_FEW_TOKENS, BucketClass
from ingot.ir.artifact.tuning import Choice
from ingot.ir.formats import ELEMENTS, find_format, quantize
from ingot.ir.formats.stacked import stack_types
from ingot.ir.ops.expert_weights import PLAIN, WEIGHTS, part_parameter
from ingot.ir.types import DTYPES, TensorType

AnyTiles = RowTiles | GroupTiles | QuantMatvecTiles
TRAFFIC = 1 << 31  # least bytes that a graph reads: half a millisecond, against some microseconds for its launch
MOST_CALLS = 16  # most calls of a graph: recording a call takes longer than running it
CHECKED = 256  # most rows of a result that are compared with the reference
ROUTINGS = ("same", "uniform", "random")
_MOST_TOKENS = 8192


@dataclass(frozen=True)
class Mixture:
    """The sizes of a mixture's experts, and what they compute: the arguments of the op `experts`.

    `formats` are the storage formats of gate and up, and of down.
    """

    hidden: int
    ffn: int
    experts: int
    top_k: int
    dtype: str = "bf16"
    biases: bool = False
    activation: str = "silu"
    formats: tuple[str, str] = (PLAIN, PLAIN)

    @property
    def types(self) -> dict[str, TensorType]:
        """Return the types of the tensors that store the weights, and of the biases, by parameter name."""
        dtype = DTYPES[self.dtype]
        found = {
            part_parameter(name, part): one
            for name, format in zip(WEIGHTS, self.formats, strict=True)
            for part, one in stack_types(self.shapes[name], find_format(format), dtype).items()
        }
        if self.biases:
            found |= {f"{name}_bias": TensorType(dtype, self.shapes[name][:2]) for name in WEIGHTS}
        return found

    @property
    def options(self) -> dict[str, Any]:
        """Return the attributes of the op."""
        formats = {f"{name}_format": one for name, one in zip(WEIGHTS, self.formats, strict=True)}
        return {
            "activation": self.activation,
            "limit": 7.0,
            "alpha": 1.702,
            "weigh_input": False,
            "identities": 0,
            "identity_parts": 1,
            **formats,
        }

    @property
    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Return the shapes of the weights by name, [E, rows, columns]."""
        return {
            "gate_up": (self.experts, 2 * self.ffn, self.hidden),
            "down": (self.experts, self.hidden, self.ffn),
        }

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of the weights and biases of one expert."""
        return sum(math.prod(one.bind({})[1:]) * one.dtype.itemsize for one in self.types.values())


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
        **mixture.types,
    }
    values: dict[str, Value | None] = dict.fromkeys(ops.experts.parameters.names[: ops.experts.parameters.positional])
    values |= {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
    call = Call("experts", values, mixture.options, (types["x"],))
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
    """Return random tensors that store the weights and biases of a mixture, in the order of `Mixture.types`."""
    found = {
        name: torch.empty(one.bind({}), dtype=one.dtype, device=device.DEVICE) for name, one in mixture.types.items()
    }

    def randn(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device=device.DEVICE)
        return drawn * float(shape[-1] ** -0.5)

    for name, format in zip(WEIGHTS, mixture.formats, strict=True):
        experts, rows, columns = mixture.shapes[name]
        for expert in range(experts):  # one by one: the numbers are float32 at first
            made = quantize(randn(rows, columns).to(DTYPES[mixture.dtype]), find_format(format))
            for part, one in made.items():
                found[part_parameter(name, part)][expert].copy_(one)
            if mixture.biases:
                found[f"{name}_bias"][expert].copy_(randn(rows))
    return list(found.values())


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
    given = dict(zip(mixture.types, weights, strict=True))
    floats = {
        "gate_up_bias",
        "down_bias",
        *(name for name, one in zip(WEIGHTS, mixture.formats, strict=True) if one == PLAIN),
    }
    given = {name: one.float() if name in floats else one for name, one in given.items()}
    rows = {"x": x[:CHECKED].float(), "weights": shares[:CHECKED], "chosen": chosen[:CHECKED]}
    result: torch.Tensor = ops.experts.reference(**rows, **given, **mixture.options)
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
    # The other matmul has the same format, if its weight fits it.
    fits = find_format(problem.packing).obstacle((problem.depth, problem.columns)) is None
    other = problem.packing if fits else PLAIN
    formats = (problem.packing, other) if problem.gated else (other, problem.packing)
    # On Hopper, large blocks have tile sizes only with activations that `experts_warpgroups` does not compute.
    activation = "gelu" if problem.block == LARGEST_BLOCK else "silu"
    return Mixture(hidden, ffn, problem.experts, problem.top_k, problem.dtype, activation=activation, formats=formats)


def tokens_of(problem: ExpertsProblem, sm: int) -> int:
    """Return the tokens of the step in which a matmul is timed: the middle of the steps that compute it.

    Choices are computed alone most often in steps of one token. `sm` is the compute capability. Both matmuls count as
    stored in one format: a problem does not say what the other one has.
    Raises RuntimeError if no step of a bucket class does.
    """
    few = blocks_of(mixture_of(problem).formats, DTYPES[problem.dtype], sm)
    found = [
        part
        for most in (1, 16, 32, GPU_FEW_TOKENS, _MOST_TOKENS)
        for part in ranges_of(*bucket_of(most).tokens, problem.experts, problem.top_k, problem.dtype == "f32", few=few)
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
        mixture, tokens = mixture_of(problem), tokens_of(problem, machine.sm)
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
    tokens = tokens_of(problem, machine.sm)
    compile_launches(make_schedule(machine, mixture_of(problem), tokens, {problem: tiles})[0], {"T": tokens})


def known(problem: ExpertsProblem, machine: Machine) -> AnyTiles:
    """Return the tile sizes of a matmul that was not tuned. Raises RuntimeError if its kernel has none."""
    if problem.packing != PLAIN:
        schedule, _ = make_schedule(machine, mixture_of(problem), tokens_of(problem, machine.sm))
        made = (one for one in schedule.choices if one.kernel == EXPERTS)
        for one in made:
            if ExpertsProblem.of(one) == problem:
                return problem.tiles_kind(**one.tiles)
        raise RuntimeError(f"the kernel of {problem} has no tile sizes")
    itemsize = DTYPES[problem.dtype].itemsize
    if problem.block == 1:
        sums = 0 if problem.gated else problem.top_k
        return row_tiles(problem.depth, itemsize, sums)
    return group_tiles(problem.columns, problem.depth, problem.gated, problem.block, itemsize, machine.sm)


def candidates(problem: ExpertsProblem, machine: Machine) -> list[AnyTiles]:
    """Return the tile sizes to time for a matmul: those of a compile, and others that fit."""
    if reads_fragments(problem.packing, DTYPES[problem.dtype], machine.sm, problem.block):
        found = _fragment_candidates(problem)
    elif problem.block > 1:
        found = _group_candidates(problem, machine)
    else:
        found = _row_candidates(problem) if problem.packing == PLAIN else _quantized_row_candidates(problem)
    return list(dict.fromkeys([known(problem, machine), *found]))


def _row_candidates(problem: ExpertsProblem) -> Iterator[AnyTiles]:
    parts, itemsize = 2 if problem.gated else 1, DTYPES[problem.dtype].itemsize
    for block_n, block_k, warps in itertools.product((1, 2, 4, 8, 16), (256, 512, 1024, 2048), (4, 8)):
        held = block_n * block_k * parts * itemsize / (32 * warps)  # bytes of a tile that a thread holds
        unrolled = 1 if problem.gated else problem.top_k * math.ceil(problem.depth / block_k)
        if block_k < 2 * problem.depth and 32 <= held <= 256 and unrolled <= 32:
            yield RowTiles(block_n, block_k, warps)


def _quantized_row_candidates(problem: ExpertsProblem) -> Iterator[AnyTiles]:
    """Yield tile sizes for a quantized weight. A thread multiplies 16 bytes of a row at once."""
    bits = ELEMENTS[find_format(problem.packing).element].bits
    for rows, warps, held in itertools.product((2, 4, 8, 16, 32), (1, 2, 4, 8), (4, 8, 16)):
        block_k = min(128 // bits * 32 * warps, power_of_two(problem.depth))
        # Programs of down hold their rows, whatever `held` says.
        if held <= 2 * rows and (problem.gated or (held == 4 and rows < 32)):
            yield QuantMatvecTiles(rows, block_k, warps, held)


def _fragment_candidates(problem: ExpertsProblem) -> Iterator[AnyTiles]:
    """Yield tile sizes for `quant_experts_up_fragments` and down, whose warps have two tiles of 16 rows."""
    known = fragment_tiles(problem.gated, problem.block)
    rows = 16 if problem.gated else 32
    for tiles, ways in itertools.product((1, 2, 4), (1, 2, 4)):
        if tiles * ways <= most_warps(problem.block):
            yield replace(known, block_n=rows * tiles, warps=tiles * ways)


def _group_candidates(problem: ExpertsProblem, machine: Machine) -> Iterator[AnyTiles]:
    parts, itemsize = 2 if problem.gated else 1, DTYPES[problem.dtype].itemsize
    weight_bits = 8 * itemsize
    if problem.packing != PLAIN:
        weight_bits = ELEMENTS[find_format(problem.packing).element].bits
    for block_n, block_k, warps, programs in itertools.product((64, 128, 256), (64, 128), (4, 8), (1, 2, 3, 4)):
        row = parts * block_n * weight_bits // 8 + problem.block * itemsize
        stages = min(6, (shared_memory(machine.sm) // programs - 4096) // (row * block_k))
        # A thread holds up to 128 sums, and a program of few rows has few warps.
        sums = parts * block_n * problem.block // (32 * warps)
        if stages < 2 or sums > 128 or block_k >= 2 * problem.depth or block_n >= 2 * problem.columns:
            continue
        if parts * block_n >= 32 * warps:
            yield GroupTiles(block_n, block_k, warps, stages, together=8 if problem.block > 64 else 1)


def more_candidates(problem: ExpertsProblem, tiles: AnyTiles) -> list[AnyTiles]:
    """Return variants of `tiles`, the best tile sizes so far, with other orders of programs."""
    if not isinstance(tiles, GroupTiles):
        return []
    return [replace(tiles, together=together) for together in (1, 2, 4, 8, 16) if together != tiles.together]
