"""Time decode attention with different tile sizes, on steps with several mixes of context lengths.

Tile sizes are chosen before the lengths are known, so each is timed on several mixes of lengths. The pages exceed the
L2 cache. The best sizes have the least weighted mean, over the mixes, of time / least time, where the least time is
over all sizes tried. A mix counts by its weight and not by its time, or long contexts would decide alone.

Attention with `append` in steps of up to 64 tokens is timed between two matmuls, as in a decode step. Its time is what
it adds to them (attention_matmuls.py). Other attention is timed alone, in a graph of its own launches. That is
`paged_attention`, attention over caches of unequal widths, and steps of more tokens. In their steps, matmuls of cuBLAS
or other kernels run before and after attention.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch

from ingot.backends.triton.lower.attention.decode import schedule_decode
from ingot.backends.triton.lower.attention.problem import DECODE_ATTENTION, MOST_DECODED, DecodeProblem
from ingot.backends.triton.lower.attention.tiles import DecodeTiles
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.attention_matmuls import Matmuls, matmuls_of
from ingot.backends.triton.tune.device import Launcher, Machine, Pool, compile_launches
from ingot.backends.triton.tune.linear import LinearBench
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.tuning import Choice
from ingot.ir.ops import OPS
from ingot.ir.tables import make_table
from ingot.ir.types import DTYPES, TensorType

TRAFFIC = 1 << 29  # least bytes that a CUDA graph reads: ten times the last-level cache of an H200
LAUNCHES = (4, 128)  # least and most launches of a graph: recording a launch takes longer than running it
_EPS, _THETA = 1e-5, 5e5
_POSITIONS = 1 << 16  # rows of the rotary table: the longest context of all mixes
# The factor of q, so that scores are about one: q and the keys are random numbers of about 0.02.
_Q_SCALE = 2500.0
# The scale of caches in i8, which hold whole numbers of about 32 in place of 0.02 (`Pool` in device.py).
_I8_SCALE = 2**-11


@dataclass(frozen=True)
class Mix:
    """A mix of context lengths: a decode step to time, with the context length of each sequence.

    A length includes the step's own token. `weight` is the weight of this mix in a mean over several mixes.
    """

    contexts: tuple[int, ...]
    weight: int = 1


# The mixes by the most tokens of a step. Contexts of 512 to 2048 tokens are usual in chats and documents, and count
# twice. The other mixes test splits: numbers of sequences that do not divide well, and one long context among short
# ones.
MIXES: Mapping[int, tuple[Mix, ...]] = {
    1: (Mix((512,), 2), Mix((2048,), 2), Mix((128,)), Mix((8192,)), Mix((32768,))),
    16: (Mix((512,) * 8, 2), Mix((2048,) * 8, 2), Mix((2048,) * 3), Mix((16384,) * 8), Mix((32768, *(1024,) * 7))),
    32: (Mix((512,) * 32, 2), Mix((2048,) * 32, 2), Mix((1024,) * 20), Mix((65536, *(2048,) * 31))),
    64: (Mix((512,) * 64, 2), Mix((2048,) * 64, 2), Mix((1024,) * 40), Mix((65536, *(1024,) * 63))),
    MOST_DECODED: (Mix((512,) * 128, 2), Mix((1024,) * 256, 2), Mix((2048,) * 96), Mix((32768, *(512,) * 99))),
}


@dataclass(frozen=True)
class TimedAttention:
    """The measurement of decode attention with certain tile sizes.

    `times` are the microseconds of a call for each mix of context lengths, in the order of `mixes_of(problem)`. Between
    matmuls, they are the microseconds that a call adds.
    """

    problem: DecodeProblem
    tiles: DecodeTiles
    times: tuple[float, ...]

    @property
    def microseconds(self) -> float:
        """Return the microseconds of a call for the first mix of context lengths, which is the most usual one."""
        return self.times[0]


def mixes_of(problem: DecodeProblem) -> tuple[Mix, ...]:
    """Return the mixes of context lengths with which decode attention is timed.

    A mix has at most as many sequences as a step of `problem` has tokens.
    """
    size = next((size for size in MIXES if problem.tokens <= size), max(MIXES))
    cut = (Mix(mix.contexts[: problem.tokens], mix.weight) for mix in MIXES[size])
    return tuple(dict.fromkeys(cut))


def best(found: Sequence[TimedAttention]) -> TimedAttention:
    """Return the best of several measurements of one decode attention with different tile sizes.

    For each mix of context lengths, the measured time is divided by the least time of all measurements. The best
    measurement has the least weighted mean of these ratios.
    """
    weights = [mix.weight for mix in mixes_of(found[0].problem)]
    least = [min(times) for times in zip(*(one.times for one in found), strict=True)]

    def cost(one: TimedAttention) -> float:
        return sum((weight * time / low for weight, time, low in zip(weights, one.times, least, strict=True)), 0.0)

    return min(found, key=cost)


def make_schedule(machine: Machine, problem: DecodeProblem, tiles: DecodeTiles) -> tuple[Schedule, Value]:
    """Return the schedule (the kernel launches) of an attention call with these tile sizes, and the call's result.

    The inputs are those of the attention op, in the op's order.
    """
    bucket = BucketClass(name="tuning", tokens=(1, problem.tokens))
    schedule = Schedule(machine.sm, machine.cores, bucket, dependent=machine.dependent)
    choice = Choice(kernel=DECODE_ATTENTION, problem=problem.fields(), tiles=asdict(tiles), source="measured")
    schedule.given = {choice.key: choice}
    types = _types(problem)
    values = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
    result = TensorType(DTYPES[problem.dtype], (*types["q"].shape[:2], problem.cache_form.value_width))
    call = Call(_op(problem), values, _attributes(problem), (result,))
    return schedule, schedule_decode(call, schedule, append=problem.append)[0]


def compile_all(machine: Machine, problem: DecodeProblem, tiles: DecodeTiles) -> None:
    """Compile the attention kernel with these tile sizes into Triton's cache on disk, without using the GPU."""
    count = len(mixes_of(problem)[0].contexts)
    compile_launches(make_schedule(machine, problem, tiles)[0], {"T": count, "B": count, "P": 1})


def _op(problem: DecodeProblem) -> str:
    return "append_attention" if problem.append else "paged_attention"


def _attributes(problem: DecodeProblem) -> dict[str, Any]:
    found: dict[str, Any] = {"scale": problem.dim**-0.5}
    if problem.append:
        found |= {"eps": _EPS, "interleaved": False}
    if problem.cache_form.shared:
        found["value_width"] = problem.cache_form.value_width
    if problem.cache_form.per_token:
        found["per_token"] = True
    elif problem.cached_as == "i8":
        found |= {"k_scale": _I8_SCALE, "v_scale": _I8_SCALE}
    return found


def _types(problem: DecodeProblem) -> dict[str, TensorType]:
    """Return the types of the attention op's inputs by name, in the op's order.

    q, k and v have the strides of slices of one matmul's result.
    """
    dtype, heads, dim = DTYPES[problem.dtype], problem.cache_heads, problem.dim
    q_heads = problem.group * problem.kv_heads
    row = (q_heads + 2 * heads) * dim
    q = TensorType(dtype, ("T", q_heads, dim), (row, dim, 1))
    kv = TensorType(DTYPES[problem.cached_as], problem.cache_form.shape(problem.page, heads))
    lens = {"page_table": TensorType(torch.int32, ("B", "P"))}
    lens |= {name: TensorType(torch.int32, ("B",)) for name in ("q_starts", "q_lens", "kv_lens")}
    if not problem.append:
        return {"q": q, "kv": kv, **lens}
    few = TensorType(dtype, ("T", heads, dim), (row, dim, 1))
    table = TensorType(torch.float32, (_POSITIONS, dim))
    slots = TensorType(torch.int64, ("T",))
    positions = TensorType(torch.int32, ("T",))
    return {"kv": kv, "q": q, "k": few, "v": few, "positions": positions, "table": table, "slots": slots, **lens}


@cache
def _table(dim: int) -> torch.Tensor:
    """Return a rotary table for heads of `dim` elements: cosines and sines by position."""
    rope = {"kind": "rope", "rope_type": "default", "positions": _POSITIONS, "theta": _THETA}
    return make_table({**rope, "rotary_dim": dim})


class Steps:
    """The inputs of successive decode steps with one mix of context lengths. `pool` is memory for keys and values.

    Each step reads other pages than the step before, in random order. After the last page of the pool, the first one
    follows.
    """

    def __init__(self, problem: DecodeProblem, mix: Mix, pool: Pool) -> None:
        self.problem, self.mix = problem, mix
        self.needed = [-(-length // problem.page) for length in mix.contexts]
        dtype, (_, *shape) = DTYPES[problem.cached_as], problem.cache_form.shape(problem.page, problem.cache_heads)
        page = math.prod(shape)
        memory = pool.of(dtype, 2 * sum(self.needed) * page * dtype.itemsize)
        self._kv = memory[: memory.numel() // page * page].view(-1, *shape)
        form = problem.cache_form
        if form.per_token:
            # No byte of these scales is NaN in f8e4m3: the same memory may serve as a cache without scales.
            scale = _I8_SCALE if problem.cached_as == "i8" else 1.0
            form.key_scales(self._kv).fill_(scale)
            form.value_scales(self._kv).fill_(scale)
        self._order = torch.randperm(len(self._kv), generator=pool.generator, device=device.DEVICE).int()
        self._lens = torch.tensor(mix.contexts, dtype=torch.int32, device=device.DEVICE)
        self._table = _table(problem.dim).to(device.DEVICE) if problem.append else torch.empty(0)

    @property
    def bytes(self) -> int:
        """Return the bytes of keys and values that one step reads."""
        return sum(self.mix.contexts) * self.problem.position_bytes

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the dims by name: T (tokens), B (sequences), and P (pages of the longest sequence)."""
        count = len(self.mix.contexts)
        return {"T": count, "B": count, "P": max(self.needed)}

    @cached_property
    def inputs(self) -> list[list[torch.Tensor]]:
        """Return the input tensors of each step in the timed CUDA graph, in the op's order."""
        count = min(LAUNCHES[1], max(LAUNCHES[0], TRAFFIC // self.bytes))
        return [list(self._named(step).values()) for step in range(count)]

    @cached_property
    def expected(self) -> torch.Tensor:
        """Return the expected result of the first step, computed by the op's reference.

        The reference reads a copy of the pages of that step, with new page numbers.
        """
        # Use the stored inputs: steps may since have written to the memory that these were copied from.
        given = dict(zip(_types(self.problem), self.inputs[0], strict=True))
        own, page = self._pages(0).long(), self.problem.page
        place = torch.zeros(len(self._kv), dtype=torch.int64, device=device.DEVICE)
        place[own] = torch.arange(len(own), device=device.DEVICE)
        given["kv"], given["page_table"] = self._first.clone(), place[given["page_table"].long()].int()
        if self.problem.append:
            given["slots"] = place[given["slots"] // page] * page + given["slots"] % page
        result = OPS[_op(self.problem)].reference(*given.values(), **_attributes(self.problem))
        mixed: torch.Tensor = result[0] if self.problem.append else result
        return mixed.float()

    @cached_property
    def _first(self) -> torch.Tensor:
        """Return a copy of the first step's pages of keys and values, made before a kernel writes to them."""
        return self._kv[self._pages(0).long()]

    def restore(self) -> None:
        """Restore the contents of the first step's pages, because steps of other mixes may have written to them."""
        self._kv[self._pages(0).long()] = self._first

    def _pages(self, step: int) -> torch.Tensor:
        """Return the ids of the pages that step number `step` reads, one sequence after the other."""
        total = sum(self.needed)
        begin = step % (len(self._order) // total) * total
        return self._order[begin : begin + total]

    def _named(self, step: int) -> dict[str, torch.Tensor]:
        """Return the input tensors of a step by name, in the op's order."""
        problem, count = self.problem, len(self.mix.contexts)
        heads, page = problem.cache_heads, problem.page
        split = [problem.group * problem.kv_heads, heads, heads]
        numbers = self._kv.flatten()[: count * sum(split) * problem.dim]
        merged = numbers.view(count, -1, problem.dim).to(DTYPES[problem.dtype], copy=True)
        if problem.cached_as == "i8":
            merged *= _I8_SCALE
        merged[:, : split[0]] *= _Q_SCALE
        q, k, v = merged.split(split, 1)
        table = torch.nn.utils.rnn.pad_sequence(list(self._pages(step).split(self.needed)), batch_first=True)
        places = (self._lens - 1).long()
        given = {
            "kv": self._kv, "q": q, "k": k, "v": v, "positions": places.int(), "table": self._table,
            "slots": table.gather(1, (places // page)[:, None])[:, 0].long() * page + places % page,
            "page_table": table, "kv_lens": self._lens, "q_lens": torch.ones_like(self._lens),
            "q_starts": torch.arange(count, dtype=torch.int32, device=device.DEVICE),
        }  # fmt: skip
        return {name: given[name] for name in _types(problem)}


def checked(machine: Machine, tiles: DecodeTiles, steps: Steps) -> Launcher:
    """Make a launcher of attention with these tile sizes, check its result for the first of `steps`, and return it.

    Raises RuntimeError for wrong results, and Triton's errors for tiles that do not fit.
    """
    call = Launcher(*make_schedule(machine, steps.problem, tiles), steps.sizes)
    steps.restore()
    for _ in range(2):  # the second call checks that the first left its counters at zero
        call.output.fill_(float("nan"))
        call(steps.inputs[0])
        device.require_close(call.output, steps.expected)
    return call


def seconds_of(machine: Machine, tiles: DecodeTiles, steps: Steps, matmuls: Matmuls | None) -> float:
    """Return the mean seconds of attention in a step with these tile sizes. A CUDA graph of several `steps` is timed.

    It is the time that attention adds between `matmuls`. If they are None, attention is timed alone. Raises
    RuntimeError for wrong results, and Triton's errors for tiles that do not fit.
    """
    call = checked(machine, tiles, steps)
    launches = [partial(call, given) for given in steps.inputs]
    return device.graph_seconds(launches) / len(launches) if matmuls is None else matmuls.added(launches)


class AttentionBench:
    """A benchmark of decode attention. The cached keys and values are in a memory pool, as are the matmuls' weights.

    It makes new inputs only when the problem (sizes and dtypes of the call) or the machine changes.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._given: tuple[Machine, DecodeProblem] | None = None
        self._steps: list[Steps] = []
        self._matmuls: Matmuls | None = None
        # The times of matmuls alone are kept when the problem changes, so that all tiles of a problem have the same.
        self._alone: dict[tuple[Machine, DecodeProblem], dict[int, float]] = {}

    def measure(self, machine: Machine, problem: DecodeProblem, tiles: DecodeTiles) -> TimedAttention:
        """Check decode attention with these tile sizes, and time it on several mixes of context lengths.

        Raises RuntimeError for wrong results, and Triton's errors for tiles that do not fit.
        """
        if (machine, problem) != self._given:
            self._given, self._steps, self._matmuls = None, [], None  # free the old inputs first: both may not fit
            self._steps = [Steps(problem, mix, self.pool) for mix in mixes_of(problem)]
            if (around := matmuls_of(problem)) is not None:
                # A pool has one dtype at a time, so the weights for a cache of another dtype are in another pool.
                bench = self._weights if problem.cached_as == problem.dtype else self._weights_apart
                self._matmuls = Matmuls(machine, around, bench, self._alone.setdefault((machine, problem), {}))
            self._given = machine, problem
        seconds = [seconds_of(machine, tiles, steps, self._matmuls) for steps in self._steps]
        return TimedAttention(problem, tiles, tuple(one * 1e6 for one in seconds))

    @cached_property
    def _weights(self) -> LinearBench:
        """Return weights of matmuls in the pool of keys and values."""
        return LinearBench(self.pool)

    @cached_property
    def _weights_apart(self) -> LinearBench:
        """Return weights of matmuls in a pool of their own."""
        return LinearBench(Pool())
