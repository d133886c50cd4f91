"""How many positions of a sequence see each other, by the masks of a program's attention."""

import math

from ingot.ir.masks import Mask
from ingot.ir.ops import op_of
from ingot.ir.program import Program, named_arguments


def granule_of(program: Program) -> int:
    """The positions that see each other: what a step feeds of a sequence ends with a multiple, or with the sequence."""
    calls = [(op, node) for node in program.calls() if (op := op_of(node.target)) is not None]
    masks = [named_arguments(node)["mask"] for op, node in calls if "mask" in op.parameters.names]
    return math.lcm(*(Mask.named(mask).granule for mask in masks))
