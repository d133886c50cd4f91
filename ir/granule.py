"""The granule of a program: the number of positions that a step must not divide, because they see each other."""

import math

from ingot.ir.masks import Mask
from ingot.ir.ops import op_of
from ingot.ir.program import Program, named_arguments


def granule_of(program: Program) -> int:
    """Return how many positions see each other under a program's attention masks, such as 32 for blocks of 32.

    With causal masks this is 1; with several masks it is the least common multiple. The tokens of a sequence in a step
    must end at a multiple of it, or at the sequence's end.
    """
    calls = [(op, node) for node in program.calls() if (op := op_of(node.target)) is not None]
    masks = [named_arguments(node)["mask"] for op, node in calls if "mask" in op.parameters.names]
    return math.lcm(*(Mask.named(mask).granule for mask in masks))
