"""What a call does beside giving its results, whatever it calls: the contract that DCE and CSE go by."""

from torch import fx

from ingot.ir.ops import Effect, op_of
from ingot.ir.program import Program, RegionCall
from ingot.ir.types import StateType

# The last one found in a region is the region's.
_ORDER = (Effect.PURE, Effect.READS_STATE, Effect.RANDOM, Effect.WRITES_STATE)


def effect_of(node: fx.Node, program: Program) -> Effect:
    """The effect of the call `node` of `program`. What stands for a new version of a state is part of its write."""
    value_type = node.meta["type"]
    if any(isinstance(item, StateType) for item in getattr(value_type, "items", (value_type,))):
        return Effect.WRITES_STATE
    if isinstance(node.target, RegionCall):
        body = program.regions[node.target.name].body
        return max((effect_of(inner, body) for inner in body.calls()), key=_ORDER.index, default=Effect.PURE)
    op = op_of(node.target)
    return Effect.PURE if op is None else op.effect  # views and arithmetic of aten are pure
