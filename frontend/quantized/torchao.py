"""The method "torchao": tensor subclasses that are stored flat in safetensors, and described in the files' metadata.

A weight X.weight is stored as `X._weight_qdata`, `X._weight_scale` and perhaps `X._weight_zero_point`. The metadata has
its class, blocks and rounding of activations as JSON (torchao, `prototype/safetensors`). Read are Float8Tensor,
Int8Tensor and IntxUnpackedToInt8Tensor; the layouts of a GPU's kernels are not.
"""

import json
from collections.abc import Callable
from typing import Any

import torch

from ingot.frontend.quantized.fields import Fields, matcher
from ingot.frontend.quantized.stored import Logical, Stored, Weight, packing_of, scales_of, weight
from ingot.frontend.safetensors_header import read_metadata
from ingot.ir.formats import Activations, Scales, format_of
from ingot.ir.recipe import Recipe, source
from ingot.ir.stored.recipes import bitcast, pack, shift

E4M3 = torch.float8_e4m3fn
_CLASSES = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
_PARTS = {"qdata", "scale", "zero_point"}
# Attributes that say how another library computes.
_IRRELEVANT = ("dtype", "mm_config", "kernel_preference", "reduce_range")


def read_torchao(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError."""
    ignored = matcher(fields.names("modules_to_not_convert"))
    # The metadata of each tensor says what these say.
    fields.skip("quant_method", "quant_type", "quant_type_kwargs")
    fields.skip("include_input_output_embeddings", "untie_embedding_weights")
    fields.end()

    def read(stored: Stored) -> Logical:
        described: dict[str, str] = {}
        for file in sorted({info.file for info in stored.tensors.values()}):
            described |= read_metadata(file)
        weights: dict[str, Weight] = {}
        for module in stored.modules("_weight_qdata"):
            if ignored(module):
                raise stored.error(f"{module} is quantized, but the quantization_config excludes it", "floats")
            weights[f"{module}.weight"] = _weight(stored, module, described.get(f"{module}.weight", ""))
        return Logical.of(stored, weights)

    return read


def _weight(stored: Stored, module: str, text: str) -> Weight:
    kind, fields = _described(stored, module, text)
    data = f"{module}._weight_qdata"
    stored.info(data, (E4M3 if kind == "Float8Tensor" else torch.int8,), [])
    shape = stored.tensors[data].shape
    block = fields.get("block_size", list, [])
    if len(shape) != 2 or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise stored.error(f"{data} is {list(shape)} with blocks {block}", "a matrix, and two sizes")
    rows, columns = (0 if size >= whole else size for size, whole in zip(block, shape, strict=True))
    if rows != 1 and (columns or rows > 1):
        raise stored.error(f"{data} has blocks {block}", "blocks within a row, or one for the whole weight")
    if columns and shape[1] % columns:
        raise stored.error(f"rows of {shape[1]} elements of {module} are no multiple of {columns}", "whole groups")
    level = Scales(rows, columns)
    grid = level.grid((shape[0], shape[1]))
    rule = _activations(fields, "act_quant_kwargs")
    bits = _bits(fields) if kind == "IntxUnpackedToInt8Tensor" else 8
    fields.skip(*_IRRELEVANT)
    fields.end()
    scales, dtype = scales_of(stored, f"{module}._weight_scale", grid, wide=columns == 0)
    zeros = _zeros(stored, f"{module}._weight_zero_point", grid, bits)
    codes, element = source(data), "f8e4m3"
    if kind != "Float8Tensor":
        element = ("i" if zeros is None else "u") + ("4" if bits <= 4 else "8")
        if element != "i8":
            codes = shift(bitcast(codes, torch.uint8), 8 if bits <= 4 else 128, 4 if bits <= 4 else 8)
    parts = {"weight": pack(codes, packing_of(element)), "scales": scales}
    levels = (Scales(rows, columns, zeros is not None, dtype),)
    uses = [name for name in (f"{module}._weight_zero_point",) if name in stored.tensors]
    format = format_of(element, levels, rule, packing_of(element))
    return weight(shape, format, parts if zeros is None else {**parts, "zeros": zeros}, *uses)


def _described(stored: Stored, module: str, text: str) -> tuple[str, Fields]:
    """Return the class of a weight, and its attributes. Raises CheckpointError if the metadata does not have them."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("_data"), dict):
        raise stored.error(f"the metadata does not describe {module}.weight: {text:.100}", "a class and its attributes")
    if found.get("_type") not in _CLASSES:
        raise stored.error(f"{module}.weight is a {found.get('_type')}, which cannot be read", " or ".join(_CLASSES))
    if unknown := sorted(set(found.get("_tensor_data_names") or ()) - _PARTS):
        raise stored.error(f"{module}.weight has the part {unknown[0]}", ", ".join(sorted(_PARTS)))
    return str(found["_type"]), Fields(found["_data"], f"{stored.where}, metadata of {module}.weight")


def _bits(fields: Fields) -> int:
    target = fields.object("target_dtype")
    found = None if target is None else target.choice("_data", tuple(f"int{bits}" for bits in range(1, 9)), "")
    fields.choice("activation_quantization", (None,), None)
    return int(str(found).removeprefix("int"))


def _activations(fields: Fields, name: str) -> Activations | None:
    """Return the rule for activations that are rounded in each step. A scale for a tensor becomes one for a token."""
    given = fields.object(name)
    if given is None:
        return None
    kind = given.values.get("_type")
    data = given.object("_data") or Fields({}, given.where)
    if kind == "QuantizeTensorToInt8Kwargs":
        if (mapping := data.object("mapping_type")) is not None:
            mapping.choice("_data", ("SYMMETRIC",), "SYMMETRIC")
        rule = Activations("i8")
    elif kind == "QuantizeTensorToFloat8Kwargs":
        if (dtype := data.object("float8_dtype")) is not None:
            dtype.choice("_data", ("float8_e4m3fn",), "float8_e4m3fn")
        data.choice("hp_value_lb", (None,), None)
        rule = Activations("f8e4m3", bound=float(data.get("hp_value_ub", (float, int), 0.0)))
    else:
        raise fields.error(name, f"is a {kind}", "int8 or float8")
    if (granularity := data.object("granularity")) is not None:
        granularity.choice("_type", ("PerRow", "PerTensor"), "PerRow")
    data.skip("mapping_type", "reduce_range", "float8_dtype", "mm_config", "kernel_preference")
    data.end()
    return rule


def _zeros(stored: Stored, name: str, grid: tuple[int, int], bits: int) -> Recipe | None:
    """Return the recipe of zero points as codes; None if there are none, or all are zero."""
    if name not in stored.tensors:
        return None
    stored.info(name, (torch.int8,), [grid])
    if not bool(stored.read(name).any()):
        return None
    return shift(bitcast(source(name), torch.uint8), 8 if bits <= 4 else 128, 4 if bits <= 4 else 8)
