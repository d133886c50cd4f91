"""The granule of a program: the number of positions that a step must not divide, because they see each other."""

import math

from ingot.ir.masks import Mask
from ingot.ir.ops import op_of
from ingot.ir.program import Program, named_arguments


def granule_of(program: Program) -> int:
    """Return the number of positions that see each other under the attention masks of a program; 1 for causal ones.

    A step's tokens of a sequence must end at a multiple of it, or at the sequence's end. With several masks it is the
    least common multiple.
    """
    calls = [(op, node) for node in program.calls() if (op := op_of(node.target)) is not None]
    masks = [named_arguments(node)["mask"] for op, node in calls if "mask" in op.parameters.names]
    return math.lcm(*(Mask.named(mask).granule for mask in masks))
