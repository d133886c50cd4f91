"""Compute from an artifact's program the bytes that a decode step must move, to derive a bandwidth."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mixtures import expected_different
from torch import fx

from ingot.ir.masks import CAUSAL, Mask
from ingot.ir.ops import OPS
from ingot.ir.parse import parse_programs
from ingot.ir.program import Program, RegionCall, StateSpec
from ingot.ir.types import StateType
from ingot.runtime.loading.artifact import open_artifact

# Ops that read a few rows of a table: the embedding, and a rank's part of it.
_LOOKED_UP = (OPS["embedding"].overload, OPS["vocab_embedding"].overload)


@dataclass(frozen=True)
class ExpertTraffic:
    """How many experts a layer of a step reads.

    count       the experts of the layer
    even        how many different ones its tokens choose on average, if each choice is equally likely
    different   how many different ones are counted: those that were recorded, or else `even`
    """

    count: int
    even: float
    different: float


@dataclass(frozen=True)
class StepTraffic:
    """The bytes that one step reads and writes.

    `weights` are read once, at any batch size; of experts, only those that are chosen. `cache` has the keys and values
    that are read and written. `experts` is None if the model has none.
    """

    weights: int
    cache: int
    experts: ExpertTraffic | None = None

    @property
    def bytes(self) -> int:
        return self.weights + self.cache


def step_traffic(artifact: Path, batch: int, context: float, different: float | None = None) -> StepTraffic:
    """Return the minimum bytes that a decode step of an artifact reads and writes.

    The step has `batch` sequences. Each attends to `context` positions. `different` is the number of experts that a
    layer's tokens choose, on average. Not given, it is the expected number if each choice is equally likely.
    """
    programs = parse_programs(open_artifact(artifact, verify=False).read_text("program.ir"))
    program = next(one for one in programs if one.name == "main" and one.bucket and one.bucket.holds(batch, 1))
    return program_traffic(program, batch, context, different)


def program_traffic(program: Program, batch: int, context: float, different: float | None = None) -> StepTraffic:
    """Return the minimum bytes that a decode step reads and writes. Each of `batch` sequences attends to `context`
    positions, and a layer's tokens choose `different` experts.

    weights = sum over the different weights that come from the checkpoint: their bytes × read share
              read share: of experts, `different` of all; of other weights 1
    cache   = batch × sum over paged caches: (min(context, window) + 1) × bytes of a position

    The step writes one position, therefore + 1. Small data is left out: rows of an embedding table, rotary tables,
    activations and logits. An embedding table that is also the output layer counts, since it is read in full.
    """
    weights: dict[object, float] = {}
    experts: ExpertTraffic | None = None
    for node, params in _calls(program, {name: name for name in program.params}):
        if node.target in _LOOKED_UP:
            continue
        share = 1.0
        if node.target is OPS["experts"].overload:
            # All tensors of experts have the experts on their first axis.
            count, top_k = int(program.params[params[0]].type.shape[0]), _width(node.args[2])
            even = expected_different(count, top_k, batch)
            experts = ExpertTraffic(count, even, even if different is None else different)
            share = experts.different / count
        for name in params:
            spec = program.params[name]
            if spec.recipe.sources():
                size = math.prod(map(int, spec.type.shape)) * spec.type.dtype.itemsize
                weights[spec.recipe, spec.type] = size * share  # equal ones are one tensor
    caches = {name: state for name, state in program.states.items() if state.kind == "paged_kv"}
    cache = sum((min(context, _window(program, name)) + 1) * _position_bytes(caches[name]) for name in caches)
    return StepTraffic(round(sum(weights.values())), round(batch * cache), experts)


def _width(chosen: object) -> int:
    """Return how many experts a token chooses. `chosen` [T, top_k] is the argument of a call of `experts`."""
    assert isinstance(chosen, fx.Node)
    return int(chosen.meta["type"].shape[1])


def _calls(program: Program, names: Mapping[str, str]) -> Iterator[tuple[fx.Node, tuple[str, ...]]]:
    """Yield every call of an op in a program, with the names of the weights that it reads.

    Calls inside regions (groups of calls compiled together) are included. `names` maps the program's placeholders to
    the names of weights.
    """
    for node in program.calls():
        if isinstance(node.target, RegionCall):
            body = program.regions[node.target.name].body
            given = zip(body.placeholders(), node.args, strict=True)
            inner = {
                str(own.target): names[str(arg.target)]
                for own, arg in given
                if isinstance(arg, fx.Node) and arg.op == "placeholder" and arg.target in names
            }
            yield from _calls(body, inner)
        else:
            reads = (one for one in node.all_input_nodes if one.op == "placeholder" and one.target in names)
            yield node, tuple(names[str(one.target)] for one in reads)


def _window(program: Program, cache: str) -> float:
    """Return the attention window with which a program reads the KV cache `cache`; infinity if there is none."""
    users = (node for node in program.calls() if any(_state(one) == cache for one in node.all_input_nodes))
    masks = (Mask.named(str(node.kwargs.get("mask", CAUSAL.name))) for node in users)
    return min((mask.size for mask in masks if mask.forgets), default=math.inf)


def _state(node: fx.Node) -> str | None:
    """Return the name of the state, such as a KV cache, that a graph node stands for. Return None for any other node.

    The node is the state itself, or the state after a write.
    """
    kind = node.meta["type"]
    return kind.name if isinstance(kind, StateType) else None


def _position_bytes(cache: StateSpec) -> int:
    """Return the bytes of keys and values that a cache [pages, 2, page_size, heads, head_dim] has for one position."""
    _, pair, _, heads, head_dim = cache.type.shape
    return int(pair) * int(heads) * int(head_dim) * cache.type.dtype.itemsize
