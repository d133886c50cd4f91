"""The memory that a call of an ONNX model allocates, from the shapes of its values."""

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper, shape_inference

from ingot.ir.errors import BackendError


def peak_bytes(model: bytes, sizes: Mapping[str, int]) -> int:
    """Return the most bytes that values of the graph take at once, outputs included, if nodes run in their order.

    `sizes` maps symbols such as "T" to sizes. The load side has ONNX Runtime run the nodes in this order. Outputs exist
    from the start. Raises BackendError if a shape cannot be inferred.
    """
    graph = _sized(onnx.load_from_string(model), sizes).graph
    values = {one.name: _bytes(one) for one in (*graph.value_info, *graph.output)}
    kept = {one.name for one in graph.output}
    last = {name: number for number, node in enumerate(graph.node) for name in node.input}
    live = peak = sum(values[name] for name in kept)
    for number, node in enumerate(graph.node):
        made = [name for name in node.output if name not in kept]
        live += sum(values[name] for name in made)
        peak = max(peak, live)
        ended = {name for name in (*node.input, *made) if last.get(name, number) == number and name not in kept}
        live -= sum(values.get(name, 0) for name in ended if name not in _given(graph))
    return peak


def _given(graph: onnx.GraphProto) -> set[str]:
    return {one.name for one in (*graph.input, *graph.initializer)}


def _sized(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """Return the model with a size for each symbol, and the shapes of all values."""
    for one in (*model.graph.input, *model.graph.output):
        for dim in one.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = sizes[dim.dim_param]
    return shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def _bytes(value: onnx.ValueInfoProto) -> int:
    tensor = value.type.tensor_type
    total = (
        2 if tensor.elem_type == TensorProto.BFLOAT16 else helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
    )
    for dim in tensor.shape.dim:
        if not dim.HasField("dim_value"):
            raise BackendError(f"the shape of the value {value.name} in an ONNX model is unknown")
        total *= dim.dim_value
    return total
