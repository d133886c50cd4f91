"""The granule of a program: the number of positions that a step must not divide, because they see each other."""

import math

from ingot.ir.masks import Mask
from ingot.ir.ops import op_of
from ingot.ir.program import Program, named_arguments


def granule_of(program: Program) -> int:
    """Return the granule of a program: the number of consecutive positions that all see each other in attention.

    It is 1 for causal masks and 32 for blocks of 32 positions. For several masks it is the least common multiple. A
    step must process a sequence up to a multiple of it, or up to the sequence's end.
    """
    calls = [(op, node) for node in program.calls() if (op := op_of(node.target)) is not None]
    masks = [named_arguments(node)["mask"] for op, node in calls if "mask" in op.parameters.names]
    return math.lcm(*(Mask.named(mask).granule for mask in masks))
