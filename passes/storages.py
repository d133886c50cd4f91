"""Find the storage of each value of a program: its own, or part of another value's, as for views."""

import operator
from dataclasses import dataclass

from torch import fx

from ingot.ir.program import VIEWS, Program, RegionCall, tensor_type
from ingot.ir.types import TensorType


@dataclass(frozen=True)
class Storage:
    """The memory that holds a value.

    holder   the node for which the memory was allocated. For a view, it is the viewed value.
    type     type of the tensor that fills the memory. A region's result may be a view of a larger tensor.
    """

    holder: fx.Node
    type: TensorType


def storages(program: Program) -> dict[fx.Node, Storage]:
    """Return for each computed tensor, by its node, the memory that holds it.

    A view has the memory of the viewed value, which may be a param, input or state.
    """
    found: dict[fx.Node, Storage] = {}
    shared: dict[tuple[fx.Node, fx.Node], Storage] = {}  # by the region call and the body's base node
    for node in program.calls():
        if not isinstance(node.meta["type"], TensorType):
            continue
        call, index = _made_by(node)
        if isinstance(call.target, RegionCall):
            found[node] = _of_region(program, call, index, node, found, shared)
        elif node.target in VIEWS and call is node:
            found[node] = _of(node.args[0], found)
        else:
            found[node] = Storage(node, tensor_type(node))
    return found


def _made_by(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the call that computes a node's value, and the index of the value in the call's tuple.

    The index is 0 if the call returns no tuple.
    """
    if node.target is operator.getitem:
        call, index = node.args
        assert isinstance(call, fx.Node) and isinstance(index, int)
        return call, index
    return node, 0


def _of(source: object, found: dict[fx.Node, Storage]) -> Storage:
    assert isinstance(source, fx.Node)
    return found[source] if source in found else Storage(source, tensor_type(source))


def _of_region(
    program: Program,
    call: fx.Node,
    index: int,
    node: fx.Node,
    found: dict[fx.Node, Storage],
    shared: dict[tuple[fx.Node, fx.Node], Storage],
) -> Storage:
    """Return the memory that holds one result of the call of a region (calls compiled together).

    The result may be a view of an input or of another result. It then has the memory of that value.

    index    index of the result
    node     node of the result
    found    earlier node -> its memory
    shared   (call of the region, viewed node in the region) -> memory
    """
    assert isinstance(call.target, RegionCall)
    body = program.regions[call.target.name].body
    base = _base(list(body.output_nodes().values())[index])
    if base.op == "placeholder":
        return _of(call.args[list(body.placeholders()).index(base)], found)
    return shared.setdefault((call, base), Storage(node, tensor_type(base)))


def _base(node: fx.Node) -> fx.Node:
    while node.target in VIEWS and node.target is not operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node
