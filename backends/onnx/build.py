"""Write the ONNX model of a region: its inputs and outputs, and how the region's results are made of the outputs."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import helper
from torch import fx

from ingot.backends.onnx.graph import Graph
from ingot.backends.onnx.model import ELEMENTS, IN_FLOAT32, RESULTS, Native
from ingot.backends.onnx.translate import translate
from ingot.ir.errors import BackendError
from ingot.ir.ops.aten import aten_of
from ingot.ir.program import Program, tensor_type
from ingot.ir.types import TensorType

OPSET = 23
# The first version of the file format that has this opset (the table in ONNX's docs/Versioning.md).
FORMAT = 11


@dataclass(frozen=True)
class Model:
    """The ONNX model of a region, serialized, and how the region's results are made of its outputs.

    results  for each result "output", the name of the output that has it, "type", the type of that output as text, and
             "offset", its first element there. The model's metadata has them too
    """

    content: bytes
    results: tuple[Mapping[str, Any], ...]


def build_model(body: Program, native: Native = IN_FLOAT32) -> Model:
    """Return the ONNX model of a region. `onnx.checker` has checked it.

    Symbols such as "T" are dynamic axes. Inputs are the region's inputs by name. Outputs are its results; of a result
    that is a view of another value, that value is the output. Work in the dtypes of `native` is left to the model's
    runtime. Raises BackendError if the checker refuses the model.
    """
    graph = Graph(native)
    for node in body.placeholders():
        graph.give(node, str(node.target))
    for node in body.calls():
        translate(graph, node)
    outputs: dict[str, TensorType] = {}
    results = [_result(graph, node, outputs) for node in body.output_nodes().values()]
    nodes = _needed(graph.nodes, outputs)
    read = {name for node in nodes for name in node.input}
    model = helper.make_model(
        helper.make_graph(
            nodes,
            body.name,
            [_value(name, value_type) for name, value_type in body.input_types().items()],
            [_value(name, value_type) for name, value_type in outputs.items()],
            initializer=[one for one in graph.constants.values() if one.name in read],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=FORMAT,
        producer_name="ingot",
    )
    helper.set_model_props(model, {RESULTS: json.dumps(results)})
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # the checker and shape inference raise types of their own
        raise BackendError(
            f"the ONNX model of region '{body.name}' is invalid: {error}"[:500],
            hint="compile with --backend reference, and report this",
        ) from error
    return Model(bytes(model.SerializeToString(deterministic=True)), tuple(results))


def _needed(nodes: Sequence[onnx.NodeProto], outputs: Collection[str]) -> list[onnx.NodeProto]:
    """Return the nodes that the outputs depend on, in order. A view that is only a result needs no node."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            needed.update(node.input)
            kept.append(node)
    return kept[::-1]


def _result(graph: Graph, node: fx.Node, outputs: dict[str, TensorType]) -> dict[str, Any]:
    """Add the output that has a result to `outputs`, and return how the result is made of it, as in a Model."""
    base, offset = _base(node)
    if base.op == "placeholder":  # a result does not share memory with an input
        name = graph.op("Identity", graph.stored(base))
    else:
        name = graph.stored(base)
    outputs[name] = dense = TensorType(tensor_type(base).dtype, tensor_type(base).shape)
    return {"output": name, "type": str(dense), "offset": offset}


def _base(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the value that a result is a view of, and the offset of the view in elements.

    Return the result itself with 0 if it is no view, if the offset depends on a symbol, or if the base has gaps.
    """
    chain = [node]
    while (op := aten_of(chain[-1].target)) is not None and op.view:
        source = chain[-1].args[0]
        assert isinstance(source, fx.Node)
        chain.append(source)
    base = chain[-1]
    if len(chain) == 1 or tensor_type(base).strides is not None:
        return node, 0
    found = {_offset(chain, base, size) for size in (3, 5)}
    return (base, found.pop()) if len(found) == 1 else (node, 0)


def _offset(chain: list[fx.Node], base: fx.Node, size: int) -> int:
    """Return the offset of a chain of views if each symbol has a size. The chain begins with the last view."""
    symbols = {one for one in tensor_type(base).shape if isinstance(one, str)}
    value = torch.empty(tensor_type(base).bind(dict.fromkeys(symbols, size)), device="meta")
    for node in reversed(chain[:-1]):
        op = aten_of(node.target)
        assert op is not None
        value = op.run(value, *node.args[1 : op.given])
    return int(value.storage_offset())


def _value(name: str, value_type: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENTS[value_type.dtype], list(value_type.shape))
