"""Whether what a node declares follows from its arguments: then it says nothing of its own."""

from torch import fx

from ingot.ir.errors import IngotError
from ingot.ir.infer import infer
from ingot.ir.infer_placement import infer_placement
from ingot.ir.program import Program


def misfit(node: fx.Node, program: Program) -> str:
    """What of the types of a region's call does not follow from its body, in words."""
    try:
        wanted = infer(node.target, node.args, node.kwargs, program)
    except IngotError as error:
        return error.what
    declared = node.meta["type"]
    return "" if wanted == declared else f"{declared}, its body gives {wanted}"


def type_follows(node: fx.Node, program: Program) -> bool:
    """The declared type is what the call makes of its arguments, and says nothing of its own."""
    try:
        return bool(infer(node.target, node.args, node.kwargs, program) == node.meta["type"])
    except IngotError:
        return False


def placement_follows(node: fx.Node, program: Program) -> bool:
    """The declared placement is what the call makes of those of its arguments."""
    try:
        return bool(infer_placement(node, program) == node.meta.get("placement", ()))
    except (IngotError, LookupError):
        return False
