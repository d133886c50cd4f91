"""Translations of the ops that regions lack: attention over a cache, tokens to rows, and quantized linears.

All other ops have the table of the onnx backend.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ingot.backends.onnx.translate import translate, untranslated
from ingot.export.onnx.graph import (
    BATCH,
    PAST,
    PRESENT,
    SEQUENCE,
    CachedLayer,
    DecoderGraph,
)
from ingot.export.onnx.quantized import quant_linear, unquantizable
from ingot.ir.masks import Mask
from ingot.ir.program import named_arguments, target_name, tensor_type

Translation = Callable[[DecoderGraph, fx.Node, Mapping[str, Any]], None]

# GroupQueryAttention takes heads of a multiple of this width (its check of the inputs in ONNX Runtime).
_HEAD_UNIT = 8


def why_not(node: fx.Node) -> str:
    """Return why a call cannot be exported, or "" if it can."""
    name = target_name(node.target)
    if name not in _OWN:
        return untranslated(node)
    refused = _REFUSED.get(name)
    return refused(node, named_arguments(node)) if refused else ""


def translate_call(graph: DecoderGraph, node: fx.Node) -> None:
    """Add the nodes of a call to the graph. `why_not` has accepted the call."""
    own = _OWN.get(target_name(node.target))
    if own is None:
        translate(graph, node)
    else:
        own(graph, node, named_arguments(node))


def _embedding(graph: DecoderGraph, node: fx.Node, given: Mapping[str, Any]) -> None:
    graph.give(node, graph.op("Gather", graph.stored(given["weight"]), graph.stored(given["tokens"]), axis=0))


def _select_rows(graph: DecoderGraph, node: fx.Node, given: Mapping[str, Any]) -> None:
    graph.give(node, graph.stored(given["x"]))  # the model returns the logits of every row


def _not_the_logits(node: fx.Node, given: Mapping[str, Any]) -> str:
    rows = given["rows"]
    chosen = rows.op == "placeholder" and rows.target == "logit_rows"
    return "" if chosen else "rows are selected by another value than 'logit_rows'"


def _attention(graph: DecoderGraph, node: fx.Node, given: Mapping[str, Any]) -> None:
    heads, head_dim = _heads(given["q"])
    kv_heads, _ = _heads(given["k"])
    mask, layer, dtype = Mask.named(given["mask"]), given["layer"], tensor_type(node).dtype
    window = mask.size if mask.kind == "window" and mask.size < graph.max_seq_len else 0
    width = -(-head_dim // _HEAD_UNIT) * _HEAD_UNIT  # zeros at the end change no dot product
    graph.layers[layer] = CachedLayer(heads, kv_heads, width, window, dtype)
    q, k, v = (
        graph.by_sequence(_widened(graph, graph.stored(given[name]), width - head_dim), count * width)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    past, present = (
        tuple(pattern.format(layer=layer, part=part) for part in ("key", "value")) for pattern in (PAST, PRESENT)
    )
    inputs = [q, k, v, *past, *graph.lengths()]
    if given["sinks"] is not None:
        inputs += ["", "", "", "", graph.stored(given["sinks"])]  # no rotary tables, positions and bias
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": given["scale"]}
    if window:
        attributes["local_window_size"] = window
        if graph.window_caches:
            attributes["sliding_window_cache"] = 1
    if given["soft_cap"] is not None:
        attributes["softcap"] = given["soft_cap"]
    made = graph.custom("GroupQueryAttention", *inputs, outputs=present, **attributes)
    graph.state_type(made, dtype, BATCH, SEQUENCE, heads * width)
    rows = graph.op("Reshape", made, graph.ints(-1, heads, width))
    graph.give(
        node,
        rows if width == head_dim else graph.op("Slice", rows, graph.ints(0), graph.ints(head_dim), graph.ints(-1)),
    )


def _widened(graph: DecoderGraph, rows: str, more: int) -> str:
    return graph.op("Pad", rows, graph.ints(0, 0, 0, 0, 0, more)) if more else rows


def _heads(value: fx.Node) -> tuple[int, int]:
    _, heads, head_dim = tensor_type(value).shape
    assert isinstance(heads, int) and isinstance(head_dim, int)
    return heads, head_dim


def _unattended(node: fx.Node, given: Mapping[str, Any]) -> str:
    if given["v"] is None or _heads(given["v"]) != _heads(given["k"]):
        return "attention whose values are not as wide as its keys"
    if given["slopes"] is not None:
        return "attention with ALiBi slopes"
    if Mask.named(given["mask"]).kind not in ("causal", "window"):
        return f"attention with the mask '{given['mask']}'"
    return ""


_OWN: Mapping[str, Translation] = {
    "ingot.embedding": _embedding,
    "ingot.select_rows": _select_rows,
    "ingot.attention": _attention,
    "ingot.quant_linear": quant_linear,
}
_REFUSED: Mapping[str, Callable[[fx.Node, Mapping[str, Any]], str]] = {
    "ingot.select_rows": _not_the_logits,
    "ingot.attention": _unattended,
    "ingot.quant_linear": unquantizable,
}
