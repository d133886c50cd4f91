"""Build the ONNX model of a decoder, write its weights to one file, and check it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from onnx import TensorProto, helper

from ingot.backends.onnx.build import FORMAT, OPSET
from ingot.backends.onnx.model import ELEMENTS
from ingot.export.onnx.graph import (
    ATTENTION_MASK,
    BATCH,
    CUSTOM_DOMAIN,
    INPUT_IDS,
    LOGITS,
    PAST,
    PAST_LENGTH,
    PRESENT,
    SEQUENCE,
    TOTAL_LENGTH,
    WINDOW_LENGTH,
    CachedLayer,
    DecoderGraph,
)
from ingot.export.onnx.translate import translate_call, why_not
from ingot.export.weights import made_in_turn
from ingot.ir.errors import ExportError, InternalError
from ingot.ir.program import Program, tensor_type

MODEL, DATA = "model.onnx", "model.onnx.data"
# ONNX Runtime maps external data; a map begins at a page, and 64 KiB is the granularity on Windows.
_ALIGNMENT = 1 << 16
# Smaller weights are not aligned to pages, which would waste more than they hold.
_SMALL = 1 << 20
_VECTOR = 64  # bytes: a cache line, and the widest vector of a CPU
_KNOWN_INPUTS = ("tokens", "positions", "token_seqs", "logit_rows")


@dataclass(frozen=True)
class Decoder:
    """An ONNX model without its weights: the graph, its caches by number, and the width of the logits."""

    graph: DecoderGraph
    model: onnx.ModelProto
    vocab_size: int

    @property
    def layers(self) -> dict[int, CachedLayer]:
        return self.graph.layers


def build_decoder(program: Program, max_seq_len: int, *, window_caches: bool = True) -> Decoder:
    """Return the ONNX model of a program at stage QUANTIZED. Raises ExportError, which lists what has no form in ONNX.

    Inputs are `input_ids` and `attention_mask`, i64[batch, sequence] and i64[batch, total], and for each layer
    `past_key_values.N.key` and `.value` [batch, kv_heads, past, head_dim]. Outputs are `logits`
    f32[batch, sequence, vocab] and `present.N.key` and `.value` [batch, kv_heads, total, head_dim]. With
    `window_caches`, `past` and `present` of a layer with a window are equally long, and at least as long as the window.
    """
    _refuse(program)
    graph = DecoderGraph(params=program.params, max_seq_len=max_seq_len, window_caches=window_caches)
    graph.begin({str(node.target): node for node in program.placeholders("input")})
    for node in program.placeholders("param"):
        graph.give_param(node)
    for node in program.calls():
        translate_call(graph, node)
    logits = program.output_nodes()["logits"]
    vocab = tensor_type(logits).shape[-1]
    assert isinstance(vocab, int)
    graph.by_sequence(graph.op("Cast", graph.stored(logits), to=ELEMENTS[torch.float32]), vocab)
    graph.nodes[-1].output[0] = LOGITS
    read = {name for node in graph.nodes for name in node.input}
    for name in graph.weights.keys() - read:
        del graph.weights[name]
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            program.name,
            _inputs(graph),
            _outputs(graph, vocab),
            initializer=[one for one in graph.constants.values() if one.name in read],
            value_info=graph.typed,
        ),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(CUSTOM_DOMAIN, 1)],
        ir_version=FORMAT,
        producer_name="ingot",
    )
    return Decoder(graph, model, vocab)


def _refuse(program: Program) -> None:
    inputs = [str(node.target) for node in program.placeholders("input")]
    found = [f"the input '{name}'" for name in inputs if name not in _KNOWN_INPUTS]
    if "logits" not in program.outputs:
        found.append(f"outputs without logits: {', '.join(program.outputs)}")
    if program.states:
        found.append(f"the state '{next(iter(program.states))}'")
    caches: set[int] = set()
    for node in program.calls():
        if reason := why_not(node):
            found.append(f"{reason} ({node.meta.get('origin', node.name)})")
        layer = node.kwargs.get("layer")
        if isinstance(layer, int) and layer in caches:
            found.append(f"layers that share the cache {layer} ({node.meta.get('origin', node.name)})")
        elif isinstance(layer, int):
            caches.add(layer)
    if found:
        listed = "; ".join(dict.fromkeys(found[:3]))
        rest = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        raise ExportError(
            f"the model has parts without a form in an ONNX decoder: {listed[:600]}{rest}",
            where=f"program {program.name}",
            hint="--to torch and --to safetensors have other limits",
        )


def _inputs(graph: DecoderGraph) -> list[onnx.ValueInfoProto]:
    made = [
        helper.make_tensor_value_info(INPUT_IDS, TensorProto.INT64, [BATCH, SEQUENCE]),
        helper.make_tensor_value_info(ATTENTION_MASK, TensorProto.INT64, [BATCH, TOTAL_LENGTH]),
    ]
    return [*made, *_caches(graph, PAST, PAST_LENGTH)]


def _outputs(graph: DecoderGraph, vocab: int) -> list[onnx.ValueInfoProto]:
    logits = helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, [BATCH, SEQUENCE, vocab])
    return [logits, *_caches(graph, PRESENT, TOTAL_LENGTH)]


def _caches(graph: DecoderGraph, pattern: str, length: str) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(
            pattern.format(layer=layer, part=part),
            ELEMENTS[cache.dtype],
            [BATCH, cache.kv_heads, WINDOW_LENGTH if graph.window_caches and cache.window else length, cache.head_dim],
        )
        for layer, cache in sorted(graph.layers.items())
        for part in ("key", "value")
    ]


def write_decoder(
    decoder: Decoder,
    folder: Path,
    read: Callable[[str], torch.Tensor],
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write model.onnx and model.onnx.data into `folder`, check them, and return the bytes of the weights.

    `read` returns a checkpoint tensor by name. `on_done` is called with the weights written and their number. One
    weight is in memory at a time. Raises InternalError if onnx.checker refuses the model.
    """
    graph, model = decoder.graph, onnx.ModelProto()
    model.CopyFrom(decoder.model)
    weights = list(graph.weights.values())
    tensors = made_in_turn([[graph.params[name] for name in one.params] for one in weights], read)
    with (folder / DATA).open("wb") as data:
        for done, (one, parts) in enumerate(zip(weights, tensors, strict=True), 1):
            elements = one.make(*parts).contiguous()
            if tuple(elements.shape) != one.shape and elements.numel() != _count(one.shape):
                raise InternalError(f"the weight {one.name} has shape {list(elements.shape)}", expected=f"{one.shape}")
            align = _ALIGNMENT if elements.nbytes >= _SMALL else _VECTOR
            data.write(bytes(-data.tell() % align))
            model.graph.initializer.append(_external(one.name, one.element, one.shape, data.tell(), elements.nbytes))
            if elements.nbytes:
                elements.reshape(-1).view(torch.uint8).numpy().tofile(data)
            del elements, parts
            on_done(done, len(weights))
        total = data.tell()
    path = folder / MODEL
    path.write_bytes(model.SerializeToString(deterministic=True))
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # the checker and shape inference raise types of their own
        raise InternalError(f"the exported ONNX model is invalid: {error}"[:500]) from error
    return total


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _external(name: str, element: int, shape: tuple[int, ...], offset: int, length: int) -> TensorProto:
    made = TensorProto(name=name, data_type=element, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", DATA), ("offset", offset), ("length", length)):
        made.external_data.add(key=key, value=str(value))
    return made
