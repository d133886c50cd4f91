"""The method "bitsandbytes": NF4 with quantized scales, and INT8 with outliers.

NF4 (QLoRA, arXiv 2305.14314): `weight` holds two codes in a byte, the first in the high four bits. Blocks of elements
in row-major order share a scale, `weight.absmax`. With double quantization, that is a code: its number in
`weight.nested_quant_map`, times `weight.nested_absmax` of 256 of them, plus an offset. `weight.quant_state.…` is JSON.

INT8 (LLM.int8(), arXiv 2208.07339): `weight` times `SCB` / 127 of its row. Activations are rounded to int8 token by
token, but elements of at least a threshold are not. The library decides so for all tokens of a batch at once, and this
reader for each token, so that results do not depend on the batch.
"""

import json
import math
from collections.abc import Callable
from typing import Any

import torch

from ingot.frontend.quantized.fields import Fields, matcher
from ingot.frontend.quantized.stored import Logical, Stored, Weight, packing_of, weight
from ingot.ir.formats import ELEMENTS, Activations, Scales, format_of
from ingot.ir.recipe import Recipe, affine, repeat, reshape, source, take_slice
from ingot.ir.stored.recipes import check_scales, lookup, multiply, pack, unpack

_STATE = "weight.quant_state.bitsandbytes__"
_WORDS = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)


def read_bitsandbytes(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError."""
    four, eight = (
        any([fields.get(f"{start}load_in_{bits}bit", bool, False) for start in ("", "_")]) for bits in (4, 8)
    )
    if four == eight:
        raise fields.error("load_in_4bit", f"is {four} with load_in_8bit {eight}", "one of the two to be true")
    if four:
        fields.choice("bnb_4bit_quant_type", ("nf4",), "nf4")
    fields.get("bnb_4bit_use_double_quant", bool, False)  # the tensors say so, too
    threshold = float(fields.get("llm_int8_threshold", (float, int), 6.0))
    ignored = matcher(fields.names("llm_int8_skip_modules", "modules_to_not_convert"))
    fields.skip("quant_method", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage")
    fields.skip("llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_target_modules")
    fields.end()

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        modules = stored.modules(f"{_STATE}nf4") if four else stored.modules("SCB")
        for module in modules:
            if ignored(module):
                raise stored.error(f"{module} is quantized, but the quantization_config excludes it", "floats")
            made = _nf4(stored, module) if four else _int8(stored, module, threshold)
            weights[f"{module}.weight"] = made
        return Logical.of(stored, weights)

    return read


def _state(stored: Stored, module: str) -> dict[str, Any]:
    name = f"{module}.{_STATE}nf4"
    stored.info(name, (torch.uint8,), [])
    try:
        state = json.loads(bytes(stored.read(name).tolist()))
    except ValueError as error:
        raise stored.error(f"{name} is not JSON: {str(error)[:100]}", "the state of a weight as JSON") from None
    shape = state.get("shape") if isinstance(state, dict) else None
    known = {"quant_type", "blocksize", "dtype", "shape", "nested_blocksize", "nested_dtype", "nested_offset"}
    if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(size, int) and size > 0 for size in shape):
        raise stored.error(f"{name} is {state!s:.200}", "an object with the weight's shape")
    if unknown := sorted(state.keys() - known):
        raise stored.error(f"{name} has the unknown field '{unknown[0]}'", ", ".join(sorted(known)))
    if state.get("quant_type") != "nf4" or not isinstance(state.get("blocksize"), int) or state["blocksize"] < 1:
        raise stored.error(f"{name} is {state!s:.200}", "quant_type nf4 and a blocksize")
    return dict(state)


def _nf4(stored: Stored, module: str) -> Weight:
    state = _state(stored, module)
    (rows, columns), size = state["shape"], state["blocksize"]
    if columns % size:
        raise stored.error(
            f"rows of {columns} elements of {module} are no multiple of the block of {size}", "whole blocks"
        )
    words = stored.info(f"{module}.weight", _WORDS, [])
    if math.prod(words.shape) * words.dtype.itemsize * 2 != rows * columns:
        raise stored.error(f"{module}.weight is {list(words.shape)}", f"two codes in a byte of {rows} x {columns}")
    stored.info(f"{module}.weight.quant_map", (torch.float32,), [(16,)])
    if not torch.equal(stored.read(f"{module}.weight.quant_map"), torch.tensor(ELEMENTS["nf4"].table)):
        raise stored.error(f"{module}.weight.quant_map has other numbers than NF4", "the numbers of NF4")
    count = rows * columns // size
    scales = reshape(_absmax(stored, module, count, state), (rows, columns // size))
    bytes_of_row = columns // 2 // words.dtype.itemsize
    codes = unpack(reshape(source(f"{module}.weight"), (rows, bytes_of_row)), 4, 1, columns, (1, 0))
    format = format_of("nf4", (Scales(1, size),), None, packing_of("nf4"))
    uses = [f"{module}.weight.quant_map", f"{module}.{_STATE}nf4"]
    return weight((rows, columns), format, {"weight": pack(codes, packing_of("nf4")), "scales": scales}, *uses)


def _absmax(stored: Stored, module: str, count: int, state: dict[str, Any]) -> Recipe:
    """Return the recipe of the scales of a weight's blocks, f32[count]. A block of zeros has the scale zero."""
    name = f"{module}.weight.absmax"
    if "nested_blocksize" not in state:
        stored.info(name, (torch.float32,), [(count,)])
        return check_scales(source(name), zero=True)
    stored.info(name, (torch.uint8,), [(count,)])
    size, offset = state["nested_blocksize"], state.get("nested_offset")
    if not isinstance(size, int) or size < 1 or not isinstance(offset, float) or not math.isfinite(offset):
        raise stored.error(f"{module}.{_STATE}nf4 is {state!s:.200}", "nested_blocksize and nested_offset")
    outer, table = f"{module}.weight.nested_absmax", f"{module}.weight.nested_quant_map"
    stored.info(outer, (torch.float32,), [(-(-count // size),)])
    stored.info(table, (torch.float32,), [(256,)])
    each = take_slice(repeat(source(outer), 0, size), 0, 0, count)
    return check_scales(affine(multiply(lookup(source(table), source(name)), each), 1.0, offset), zero=True)


def _int8(stored: Stored, module: str, threshold: float) -> Weight:
    found = stored.info(f"{module}.weight", (torch.int8,), [])
    if len(found.shape) != 2:
        raise stored.error(f"{module}.weight is {list(found.shape)}", "a matrix")
    rows, columns = found.shape
    stored.info(f"{module}.SCB", (torch.float32,), [(rows,)])
    scales = reshape(affine(check_scales(source(f"{module}.SCB"), zero=True), 1 / 127, 0.0), (rows, 1))
    uses = []
    if f"{module}.weight_format" in stored.tensors:
        stored.info(f"{module}.weight_format", (torch.uint8,), [()])
        if int(stored.read(f"{module}.weight_format")) != 0:  # row-major; others are layouts of a GPU
            raise stored.error(
                f"{module}.weight_format is {int(stored.read(f'{module}.weight_format'))}", "0: row-major"
            )
        uses.append(f"{module}.weight_format")
    rule = Activations("i8", outliers=threshold)
    parts = {"weight": source(f"{module}.weight"), "scales": scales}
    return weight((rows, columns), format_of("i8", (Scales(),), rule), parts, *uses)
