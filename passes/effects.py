"""The effect of a call on states, which decides whether dce may remove it and cse may merge it."""

from torch import fx

from ingot.ir.ops import Effect, op_of
from ingot.ir.program import Program, RegionCall
from ingot.ir.types import StateType

# Effects in increasing order. A region has the last one among those of its calls.
_ORDER = (Effect.PURE, Effect.READS_STATE, Effect.RANDOM, Effect.WRITES_STATE)


def effect_of(node: fx.Node, program: Program) -> Effect:
    """Return what the call `node` does to states, such as KV caches: pure, reads state, writes state, or random.

    A region (calls compiled together) has the strongest effect of its calls. A getitem node that takes a state from a
    result counts as part of the write.
    """
    value_type = node.meta["type"]
    if any(isinstance(item, StateType) for item in getattr(value_type, "items", (value_type,))):
        return Effect.WRITES_STATE
    if isinstance(node.target, RegionCall):
        body = program.regions[node.target.name].body
        return max((effect_of(inner, body) for inner in body.calls()), key=_ORDER.index, default=Effect.PURE)
    op = op_of(node.target)
    return Effect.PURE if op is None else op.effect  # views and arithmetic of aten are pure
