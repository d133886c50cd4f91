"""Attention of few tokens over pages that no cache holds, timed over mixes of contexts.

Sizes are chosen before any length is known, so they are tried on several mixes of lengths. The best have the least mean
of time / least time over the mixes, the least time being that of all sizes tried. A mix counts by its weight,
whether it takes long or not: what a step can lose is relative to what it has to read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch

from ingot.backends.triton.lower.attention_decode import schedule_decode
from ingot.backends.triton.lower.attention_problem import DECODE_ATTENTION, MOST_DECODED, DecodeProblem
from ingot.backends.triton.lower.attention_tiles import DecodeTiles
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.schedule import Schedule, Value
from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Launcher, Machine, Pool, compile_launches
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.tuning import Choice
from ingot.ir.ops import OPS
from ingot.ir.tables import make_table
from ingot.ir.types import DTYPES, TensorType

TRAFFIC = 1 << 29  # bytes that a graph reads at least: ten times the last-level cache of an H200
LAUNCHES = (4, 128)  # of a graph, at least and at most: to record one takes longer than to run it
_EPS, _THETA = 1e-5, 5e5
_POSITIONS = 1 << 16  # that are turned: the longest context of all mixes
# Of the pool's numbers of 0.02, so that scores, which are products with others of them, are about one.
_Q_SCALE = 2500.0


@dataclass(frozen=True)
class Mix:
    """What a step may look like: the cached positions of each sequence, the fed one included."""

    contexts: tuple[int, ...]
    weight: int = 1


# By the most tokens of a step. Chats and documents of 512 to 2048 tokens are what is usual, and count twice; splits are
# for a number of sequences that does not divide well, and for one long context among short ones.
MIXES: Mapping[int, tuple[Mix, ...]] = {
    1: (Mix((512,), 2), Mix((2048,), 2), Mix((128,)), Mix((8192,)), Mix((32768,))),
    16: (Mix((512,) * 8, 2), Mix((2048,) * 8, 2), Mix((2048,) * 3), Mix((16384,) * 8), Mix((32768, *(1024,) * 7))),
    32: (Mix((512,) * 32, 2), Mix((2048,) * 32, 2), Mix((1024,) * 20), Mix((65536, *(2048,) * 31))),
    64: (Mix((512,) * 64, 2), Mix((2048,) * 64, 2), Mix((1024,) * 40), Mix((65536, *(1024,) * 63))),
    MOST_DECODED: (Mix((512,) * 128, 2), Mix((1024,) * 256, 2), Mix((2048,) * 96), Mix((32768, *(512,) * 99))),
}


@dataclass(frozen=True)
class TimedAttention:
    """Microseconds of a call for each mix of its problem, in order."""

    problem: DecodeProblem
    tiles: DecodeTiles
    times: tuple[float, ...]

    @property
    def microseconds(self) -> float:
        """Of the first mix, the most usual one."""
        return self.times[0]


def mixes_of(problem: DecodeProblem) -> tuple[Mix, ...]:
    """Those of the class of steps, with no more sequences than its steps have tokens."""
    size = next((size for size in MIXES if problem.tokens <= size), max(MIXES))
    cut = (Mix(mix.contexts[: problem.tokens], mix.weight) for mix in MIXES[size])
    return tuple(dict.fromkeys(cut))


def best(found: Sequence[TimedAttention]) -> TimedAttention:
    """The least weighted mean, over the mixes of one problem, of time / least time."""
    weights = [mix.weight for mix in mixes_of(found[0].problem)]
    least = [min(times) for times in zip(*(one.times for one in found), strict=True)]

    def cost(one: TimedAttention) -> float:
        return sum((weight * time / low for weight, time, low in zip(weights, one.times, least, strict=True)), 0.0)

    return min(found, key=cost)


def make_schedule(machine: Machine, problem: DecodeProblem, tiles: DecodeTiles) -> tuple[Schedule, Value]:
    """The launch with these tiles. Inputs in the order of `_types`."""
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
    """Fill Triton's cache on disk with the kernel of a measurement, without touching the GPU."""
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
    return found


def _types(problem: DecodeProblem) -> dict[str, TensorType]:
    """Inputs by name, in the op's order; q, k and v are parts of one product."""
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
    """Cosines and sines of a rotary embedding."""
    rope = {"kind": "rope", "rope_type": "default", "positions": _POSITIONS, "theta": _THETA}
    return make_table({**rope, "rotary_dim": dim})


class Steps:
    """Steps of one mix, each over pages of its own in a random order; the pool's beginning again when it has ended."""

    def __init__(self, problem: DecodeProblem, mix: Mix, pool: Pool) -> None:
        self.problem, self.mix = problem, mix
        self.needed = [-(-length // problem.page) for length in mix.contexts]
        dtype, (_, *shape) = DTYPES[problem.cached_as], problem.cache_form.shape(problem.page, problem.cache_heads)
        page = math.prod(shape)
        memory = pool.of(dtype, 2 * sum(self.needed) * page * dtype.itemsize)
        self._kv = memory[: memory.numel() // page * page].view(-1, *shape)
        self._order = torch.randperm(len(self._kv), generator=pool.generator, device=device.DEVICE).int()
        self._lens = torch.tensor(mix.contexts, dtype=torch.int32, device=device.DEVICE)
        self._table = _table(problem.dim).to(device.DEVICE) if problem.append else torch.empty(0)

    @property
    def bytes(self) -> int:
        """Of the keys and values of one step."""
        return sum(self.mix.contexts) * self.problem.position_bytes

    @property
    def sizes(self) -> dict[str, int]:
        count = len(self.mix.contexts)
        return {"T": count, "B": count, "P": max(self.needed)}

    @cached_property
    def inputs(self) -> list[list[torch.Tensor]]:
        """Of each step of a graph, in the op's order."""
        count = min(LAUNCHES[1], max(LAUNCHES[0], TRAFFIC // self.bytes))
        return [list(self._named(step).values()) for step in range(count)]

    @cached_property
    def expected(self) -> torch.Tensor:
        """The attention of the first step, by the op's reference over a copy of its pages, renumbered."""
        # The inputs themselves: where they were copied from, steps may have written since.
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
        """What the pages of the first step hold before anything has run."""
        return self._kv[self._pages(0).long()]

    def restore(self) -> None:
        """Put back what steps of other mixes have written into the pages of the first step."""
        self._kv[self._pages(0).long()] = self._first

    def _pages(self, step: int) -> torch.Tensor:
        """Page ids of all sequences, one after the other."""
        total = sum(self.needed)
        begin = step % (len(self._order) // total) * total
        return self._order[begin : begin + total]

    def _named(self, step: int) -> dict[str, torch.Tensor]:
        problem, count = self.problem, len(self.mix.contexts)
        heads, page = problem.cache_heads, problem.page
        split = [problem.group * problem.kv_heads, heads, heads]
        numbers = self._kv.flatten()[: count * sum(split) * problem.dim]
        merged = numbers.view(count, -1, problem.dim).to(DTYPES[problem.dtype], copy=True)
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
    """A launcher for the steps, which has run the first one. Raises RuntimeError for wrong results, and what Triton
    raises for tiles that do not fit."""
    call = Launcher(*make_schedule(machine, steps.problem, tiles), steps.sizes)
    steps.restore()
    for _ in range(2):  # the second finds the counters as the first left them
        call.output.fill_(float("nan"))
        call(steps.inputs[0])
        device.require_close(call.output, steps.expected)
    return call


def seconds_of(machine: Machine, tiles: DecodeTiles, steps: Steps) -> float:
    """Of a step. Raises what `checked` raises."""
    call = checked(machine, tiles, steps)
    return device.graph_seconds(partial(call, given) for given in steps.inputs) / len(steps.inputs)


class AttentionBench:
    """Times attention over pages from a pool. It keeps the steps of the last problem."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._problem: DecodeProblem | None = None
        self._steps: list[Steps] = []

    def measure(self, machine: Machine, problem: DecodeProblem, tiles: DecodeTiles) -> TimedAttention:
        """Raises RuntimeError for wrong results, and what Triton raises for tiles that do not fit."""
        if problem != self._problem:
            self._problem = problem
            self._steps = [Steps(problem, mix, self.pool) for mix in mixes_of(problem)]
        return TimedAttention(problem, tiles, tuple(seconds_of(machine, tiles, steps) * 1e6 for steps in self._steps))
