"""Check whether a node's declared type and placement follow from its arguments, so that a diff need not list them."""

from torch import fx

from ingot.ir.errors import IngotError
from ingot.ir.infer import infer
from ingot.ir.infer_placement import infer_placement
from ingot.ir.program import Program


def misfit(node: fx.Node, program: Program) -> str:
    """Return how the declared type of a region's call differs from what the region returns; "" if it does not.

    `node` is the call. A region is a set of calls that are compiled together.
    """
    try:
        wanted = infer(node.target, node.args, node.kwargs, program)
    except IngotError as error:
        return error.what
    declared = node.meta["type"]
    return "" if wanted == declared else f"{declared}, its body returns {wanted}"


def type_follows(node: fx.Node, program: Program) -> bool:
    """Return whether a call's declared type equals the type that its op infers from the arguments."""
    try:
        return bool(infer(node.target, node.args, node.kwargs, program) == node.meta["type"])
    except IngotError:
        return False


def placement_follows(node: fx.Node, program: Program) -> bool:
    """Return whether a call's declared placement on the mesh equals the one that its op infers from the arguments."""
    try:
        return bool(infer_placement(node, program) == node.meta.get("placement", ()))
    except (IngotError, LookupError):
        return False
