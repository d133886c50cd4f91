"""The table of translations: how each op of Ingot is computed by nodes of ONNX, opset 23.

Each function follows the op's reference: it computes in float32 and rounds where the reference rounds. Matmuls and ops
that move numbers keep 16-bit dtypes that the model's runtime handles itself. An op that the table lacks is refused by
name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ingot.backends.onnx.model import ELEMENTS, NARROW
from ingot.ir.program import named_arguments, target_name, tensor_type
from ingot.ir.types import TensorType

if TYPE_CHECKING:
    from ingot.backends.onnx.graph import Graph  # it imports onnx, which claims do not need

Translation = Callable[["Graph", fx.Node, Mapping[str, Any]], None]

_FLOAT_MIN = torch.finfo(torch.float32).min
_FLOAT_TINY = torch.finfo(torch.float32).tiny


def untranslated(node: fx.Node) -> str:
    """Return why a call cannot be translated, or "" if it can."""
    if node.target is operator.getitem:
        return ""
    name = target_name(node.target)
    if name not in TRANSLATIONS:
        return f"no translation of {name} to ONNX"
    values = [node, *node.all_input_nodes]
    types = [item for one in values for item in _types(one.meta.get("type"))]
    if odd := [one for one in types if one.dtype not in ELEMENTS]:
        return f"no translation of {name} with {odd[0]} to ONNX"
    refused = _REFUSED.get(name)
    return refused(node, named_arguments(node)) if refused else ""


def translate(graph: Graph, node: fx.Node) -> None:
    """Add the nodes of a call to the graph. `untranslated` has accepted the call."""
    if node.target is operator.getitem:
        graph.take(node)
    else:
        TRANSLATIONS[target_name(node.target)](graph, node, named_arguments(node))


def _types(found: object) -> list[TensorType]:
    if isinstance(found, TensorType):
        return [found]
    return [item for item in getattr(found, "items", ()) if isinstance(item, TensorType)]


# Elementwise ops.


def _silu_mul(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    gate, up = graph.wide(given["gate"]), graph.wide(given["up"])
    silu = graph.op("Mul", gate, graph.op("Sigmoid", gate))
    graph.result(node, graph.op("Mul", silu, up))


def _gelu_mul(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    gelu = graph.op("Gelu", graph.wide(given["gate"]), approximate=given["approximate"])
    graph.result(node, graph.op("Mul", gelu, graph.wide(given["up"])))


def _activate(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    x = graph.wide(given["x"])
    match given["kind"]:
        case "gelu":
            graph.result(node, graph.op("Gelu", x, approximate="none"))
        case "gelu_tanh":
            graph.result(node, graph.op("Gelu", x, approximate="tanh"))
        case "relu":
            graph.result(node, graph.op("Relu", x))
        case "relu_squared":
            positive = graph.op("Relu", x)
            graph.result(node, graph.op("Mul", positive, positive))
        case "sigmoid":
            graph.result(node, graph.op("Sigmoid", x))


def _unknown_activation(node: fx.Node, given: Mapping[str, Any]) -> str:
    known = ("gelu", "gelu_tanh", "relu", "relu_squared", "sigmoid")
    return "" if given["kind"] in known else f"no translation of the activation {given['kind']!r:.40} to ONNX"


def _soft_cap(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    cap = graph.number(given["cap"])
    graph.result(node, graph.op("Mul", graph.op("Tanh", graph.op("Div", graph.wide(given["x"]), cap)), cap))


def _clamp(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    low, high = graph.number(-given["limit"]), graph.number(given["limit"])
    graph.result(node, graph.op("Clip", graph.wide(given["x"]), low, high))


def _scale_by_position(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    # The division of ONNX rounds towards 0, which is down: neither a position nor the shift is negative.
    positions = graph.op("Cast", graph.wide(given["positions"]), to=ELEMENTS[torch.int64])
    shifted = graph.op("Add", positions, graph.ints(given["shift"]))
    periods = graph.op("Cast", graph.op("Div", shifted, graph.ints(given["period"])), to=ELEMENTS[torch.float32])
    logs = graph.op("Log", graph.op("Add", periods, graph.number(1.0)))
    factors = graph.op("Add", graph.op("Mul", logs, graph.number(given["strength"])), graph.number(1.0))
    axes = range(1, len(tensor_type(node).shape))
    column = graph.op("Unsqueeze", factors, graph.ints(*axes)) if axes else factors
    graph.result(node, graph.op("Mul", graph.wide(given["x"]), column))


def _cast(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    source, target = tensor_type(given["x"]).dtype, tensor_type(node).dtype
    if source in NARROW and target is torch.float32:
        graph.give(node, graph.wide(given["x"]))  # every such number is a float32
    else:
        graph.give(node, graph.op("Cast", graph.wide(given["x"]), to=ELEMENTS[target]))


def _binary(kind: str) -> Translation:
    def translated(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
        x, y = (
            graph.wide(one) if isinstance(one, fx.Node) else graph.number(one) for one in (given["x"], given["other"])
        )
        graph.result(node, graph.op(kind, x, y))

    return translated


def _not_float(node: fx.Node, given: Mapping[str, Any]) -> str:
    if given.get("alpha", 1) != 1:
        return f"no translation of {target_name(node.target)} with alpha={given['alpha']} to ONNX"
    types = [tensor_type(one) for one in (node, *node.all_input_nodes)]
    odd = [one for one in types if not one.dtype.is_floating_point]
    return f"no translation of {target_name(node.target)} with {odd[0]} to ONNX" if odd else ""


# Matmuls.


def _linear(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    factors = given["x"], given["weight"]
    if given["bias"] is None:
        graph.product(node, graph.op("Gemm", *graph.factors(*factors), transB=1), *factors)
    else:  # the sum is rounded once, after the bias
        graph.result(node, graph.op("Gemm", *(graph.wide(one) for one in (*factors, given["bias"])), transB=1))


def _not_a_matrix(node: fx.Node, given: Mapping[str, Any]) -> str:
    x = tensor_type(given["x"])
    return "" if len(x.shape) == 2 else f"no translation of ingot.linear with x {x} to ONNX"


def _head_linear(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    factors = given["x"], given["weight"]
    x, weight = graph.factors(*factors)
    x, weight = graph.op("Transpose", x, perm=[1, 0, 2]), graph.op("Transpose", weight, perm=[0, 2, 1])
    graph.product(node, graph.op("Transpose", graph.op("MatMul", x, weight), perm=[1, 0, 2]), *factors)


def _mix(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    factors = given["weights"], given["x"]
    graph.product(node, graph.op("MatMul", *graph.factors(*factors)), *factors)


# Norms.


def _mean_square(graph: Graph, x: str) -> str:
    return graph.op("ReduceMean", graph.op("Mul", x, x), graph.ints(-1), keepdims=1)


def _centred(graph: Graph, x: str) -> str:
    return graph.op("Sub", x, graph.op("ReduceMean", x, graph.ints(-1), keepdims=1))


def _normed(graph: Graph, x: str, eps: float) -> str:
    return graph.op("Div", x, graph.op("Sqrt", graph.op("Add", _mean_square(graph, x), graph.number(eps))))


def _scaled(graph: Graph, normed: str, weight: fx.Node, dtype: torch.dtype) -> str:
    """The quotient is rounded before the multiplication if the weight has the dtype of the result."""
    if tensor_type(weight).dtype == dtype:
        normed = graph.rounded(normed, dtype)
    return graph.op("Mul", normed, graph.wide(weight))


def _rms_norm(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    normed = _normed(graph, graph.wide(given["x"]), given["eps"])
    graph.result(node, _scaled(graph, normed, given["weight"], tensor_type(given["x"]).dtype))


def _add_rms_norm(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    dtype = tensor_type(given["x"]).dtype
    total = graph.rounded(graph.op("Add", graph.wide(given["x"]), graph.wide(given["residual"])), dtype)
    graph.result(node, _scaled(graph, _normed(graph, total, given["eps"]), given["weight"], dtype), total)


def _layer_norm(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    normed = _normed(graph, _centred(graph, graph.wide(given["x"])), given["eps"])
    if given["bias"] is None:
        graph.result(node, _scaled(graph, normed, given["weight"], tensor_type(given["x"]).dtype))
    else:
        product = graph.op("Mul", normed, graph.wide(given["weight"]))
        graph.result(node, graph.op("Add", product, graph.wide(given["bias"])))


def _match_rms(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    x = graph.wide(given["x"])
    of_x = graph.op("Max", _mean_square(graph, x), graph.number(given["least"]))
    of_like = _mean_square(graph, graph.wide(given["like"]))
    graph.result(node, graph.op("Mul", x, graph.op("Sqrt", graph.op("Div", of_like, of_x))))


def _gaussian_top_k(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    centred = _centred(graph, graph.wide(given["x"]))
    deviation = graph.op("Sqrt", _mean_square(graph, centred))
    cutoff = graph.op("Mul", deviation, graph.number(given["deviations"]))
    graph.result(node, graph.op("Relu", graph.op("Sub", centred, cutoff)))


# Ops of attention.


def _rope(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    x, shape = graph.wide(given["x"]), tensor_type(given["x"]).shape
    rotary, width = tensor_type(given["table"]).shape[1], shape[-1]
    assert isinstance(rotary, int) and isinstance(width, int)
    half = rotary // 2
    angles = graph.op("Gather", graph.wide(given["table"]), graph.wide(given["positions"]), axis=0)
    angles = graph.op("Unsqueeze", angles, graph.ints(1))
    cos, sin = _part(graph, angles, 0, half), _part(graph, angles, half, rotary)
    if given["interleaved"]:
        first, second = _part(graph, x, 0, rotary, step=2), _part(graph, x, 1, rotary, step=2)
    else:
        first, second = _part(graph, x, 0, half), _part(graph, x, half, rotary)
    one = graph.op("Sub", graph.op("Mul", first, cos), graph.op("Mul", second, sin))
    other = graph.op("Add", graph.op("Mul", second, cos), graph.op("Mul", first, sin))
    if given["interleaved"]:
        pairs = [graph.op("Unsqueeze", part, graph.ints(-1)) for part in (one, other)]
        heads = shape[1]
        assert isinstance(heads, int)
        parts = [graph.op("Reshape", graph.op("Concat", *pairs, axis=-1), graph.ints(0, heads, rotary))]
    else:
        parts = [one, other]
    if rotary < width:
        parts.append(_part(graph, x, rotary, width))
    graph.result(node, parts[0] if len(parts) == 1 else graph.op("Concat", *parts, axis=-1))


def _part(graph: Graph, x: str, begin: int, end: int, *, axis: int = -1, step: int = 1) -> str:
    return graph.op("Slice", x, graph.ints(begin), graph.ints(end), graph.ints(axis), graph.ints(step))


def _merge_attention(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    lses = [graph.wide(given["one_lse"]), graph.wide(given["other_lse"])]
    # A log-sum-exp of -inf in both parts must not become inf - inf.
    peak = graph.op("Max", *lses, graph.number(_FLOAT_MIN))
    shares = [graph.op("Exp", graph.op("Sub", lse, peak)) for lse in lses]
    total = graph.op("Add", *shares)
    columns = [graph.op("Unsqueeze", share, graph.ints(-1)) for share in shares]
    parts = [
        graph.op("Mul", graph.wide(given[name]), column) for name, column in zip(("one", "other"), columns, strict=True)
    ]
    least = graph.op("Unsqueeze", graph.op("Max", total, graph.number(_FLOAT_TINY)), graph.ints(-1))
    merged = graph.op("Div", graph.op("Add", *parts), least)
    graph.result(node, merged, graph.op("Add", peak, graph.op("Log", total)))


# Ops that move numbers.


def _concat(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    graph.moved(node, graph.op("Concat", graph.moving(given["x"]), graph.moving(given["y"]), axis=given["dim"]))


def _view(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    before, after = tensor_type(given["x"]).shape, tensor_type(node).shape
    # 0 keeps the size of the input's axis, and -1 is the rest.
    sizes = [
        size if isinstance(size, int) else 0 if axis < len(before) and before[axis] == size else -1
        for axis, size in enumerate(after)
    ]
    graph.moved(node, graph.op("Reshape", graph.moving(given["x"]), graph.ints(*sizes)))


def _two_unknown(node: fx.Node, given: Mapping[str, Any]) -> str:
    before, after = tensor_type(given["x"]).shape, tensor_type(node).shape
    moved = [size for axis, size in enumerate(after) if isinstance(size, str) and before[axis : axis + 1] != (size,)]
    return f"no translation of a view of {tensor_type(given['x'])} as {tensor_type(node)}" if len(moved) > 1 else ""


def _slice(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    begin, end = given["start"] or 0, given["end"] if given["end"] is not None else math.inf
    last = int(min(end, 2**63 - 1))
    graph.moved(node, _part(graph, graph.moving(given["x"]), begin, last, axis=given["dim"], step=given["step"]))


def _permute(graph: Graph, node: fx.Node, given: Mapping[str, Any]) -> None:
    dims = [dim % len(given["dims"]) for dim in given["dims"]]
    graph.moved(node, graph.op("Transpose", graph.moving(given["x"]), perm=dims))


TRANSLATIONS: Mapping[str, Translation] = {
    "ingot.silu_mul": _silu_mul,
    "ingot.gelu_mul": _gelu_mul,
    "ingot.activate": _activate,
    "ingot.soft_cap": _soft_cap,
    "ingot.clamp": _clamp,
    "ingot.scale_by_position": _scale_by_position,
    "ingot.cast": _cast,
    "ingot.linear": _linear,
    "ingot.head_linear": _head_linear,
    "ingot.mix": _mix,
    "ingot.rms_norm": _rms_norm,
    "ingot.add_rms_norm": _add_rms_norm,
    "ingot.layer_norm": _layer_norm,
    "ingot.match_rms": _match_rms,
    "ingot.gaussian_top_k": _gaussian_top_k,
    "ingot.rope": _rope,
    "ingot.merge_attention": _merge_attention,
    "ingot.concat": _concat,
    "aten.add.Tensor": _binary("Add"),
    "aten.mul.Tensor": _binary("Mul"),
    "aten.view.default": _view,
    "aten.slice.Tensor": _slice,
    "aten.permute.default": _permute,
}
# Why a call of an op in the table cannot be translated; "" if it can.
_REFUSED: Mapping[str, Callable[[fx.Node, Mapping[str, Any]], str]] = {
    "ingot.activate": _unknown_activation,
    "ingot.linear": _not_a_matrix,
    "aten.add.Tensor": _not_float,
    "aten.mul.Tensor": _not_float,
    "aten.view.default": _two_unknown,
}
