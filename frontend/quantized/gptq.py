"""The method "gptq": integers of 2, 3, 4 or 8 bits in words of 32, with groups along the inputs of a weight.

A module stores `qweight` i32[K * bits / 32, N], `qzeros` i32[groups, N * bits / 32], `scales` [groups, N] and `g_idx`
i32[K], the group of each input. Code i of a column of words is at bits i * bits, the lowest first. The form "gptq"
(version 1) stores each zero point minus one, and "gptq_v2" as it is (GPTQModel, `convert_gptq_v1_to_v2_format`). A zero
point of 0 is stored as the largest code, so adding one wraps around, as in AutoGPTQ's kernels.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ingot.frontend.quantized.fields import Fields, matcher
from ingot.frontend.quantized.stored import Logical, Stored, Weight, columns_order, packing_of, weight
from ingot.ir.formats import Scales, format_of
from ingot.ir.recipe import permute, source
from ingot.ir.stored.recipes import check_scales, gather, pack, shift, unpack

BITS = (2, 3, 4, 8)
# Fields about how the weights were found, or which kernels another library runs.
_IRRELEVANT = (
    "quant_method",
    "damp_percent",
    "damp_auto_increment",
    "true_sequential",
    "static_groups",
    "model_name_or_path",
    "model_file_base_name",
    "model_seqlen",
    "dataset",
    "tokenizer",
    "batch_size",
    "pad_token_id",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "cache_block_outputs",
    "max_input_length",
    "use_cuda_fp16",
    "use_exllama",
    "disable_exllama",
    "exllama_config",
    "backend",
    "act_group_aware",
    "hyb_act",
    "quantizer",
    "failsafe",
    "mse",
    "meta",
    "lm_head",
    "is_marlin_format",
)


@dataclass(frozen=True)
class Scheme:
    """How a module is stored: bits of an element, inputs of a group (0: all), and what is added to zero points."""

    bits: int
    size: int
    added: int


def read_gptq(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError."""
    scheme, changed = _scheme(fields), _changed(fields)
    fields.skip(*_IRRELEVANT)
    fields.end()

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        for module in stored.modules("qweight"):
            own = changed(module, scheme)
            if own is None:
                raise stored.error(f"{module} is quantized, but the quantization_config excludes it", "floats")
            weights[f"{module}.weight"] = read_weight(stored, module, own)
        return Logical.of(stored, weights)

    return read


def _scheme(fields: Fields) -> Scheme:
    bits = fields.choice("bits", BITS, 4)
    size = fields.choice("group_size", (-1, *(1 << power for power in range(3, 12))), -1)
    form = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    fields.choice("format", (form,), form)  # GPTQModel's newer name of the same field
    fields.choice("pack_dtype", ("int32",), "int32")
    # Zero points and orders are stored in either case, so the tensors say what these fields say.
    fields.get("sym", bool, True)
    fields.get("desc_act", bool, False)
    return Scheme(bits, max(size, 0), 1 if form == "gptq" else 0)


def _changed(fields: Fields) -> Callable[[str, Scheme], Scheme | None]:
    """Return a function: a module's name and the common scheme -> the scheme of the module; None: it is not quantized.

    The field `dynamic` maps patterns to changes: "-:PATTERN" excludes modules, and "+:PATTERN" changes fields. The
    first pattern that matches counts (GPTQModel, `QuantizeConfig.dynamic_get`).
    """
    rules: list[tuple[re.Pattern[str], Scheme | None, dict[str, Any]]] = []
    listed = fields.object("dynamic")
    for text in listed.values if listed is not None else ():
        assert listed is not None
        own = listed.object(text) or Fields({}, listed.where)
        pattern = re.compile(text.removeprefix("+:").removeprefix("-:"))
        if text.startswith("-:"):
            rules.append((pattern, None, {}))
            continue
        made: dict[str, Any] = {}
        if own.values.get("bits") is not None:
            made["bits"] = own.choice("bits", BITS, 4)
        if own.values.get("group_size") is not None:
            made["size"] = max(own.choice("group_size", (-1, *(1 << power for power in range(3, 12))), -1), 0)
        own.skip("sym", "desc_act", "mse", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential")
        own.end()
        rules.append((pattern, Scheme(0, 0, 0), made))
    excluded = matcher(fields.names("modules_to_not_convert"))

    def changed(module: str, scheme: Scheme) -> Scheme | None:
        for pattern, kept, made in rules:
            if pattern.match(module):
                return None if kept is None else replace(scheme, **made)
        return None if excluded(module) else scheme

    return changed


def read_weight(stored: Stored, module: str, scheme: Scheme) -> Weight:
    """Return the weight of a module. Raises CheckpointError if what is stored does not fit the scheme."""
    bits = scheme.bits
    packed = stored.info(f"{module}.qweight", (torch.int32,), [])
    if len(packed.shape) != 2:
        raise stored.error(f"{module}.qweight is {list(packed.shape)}", "a matrix of words")
    columns, rows = packed.shape[0] * 32 // bits, packed.shape[1]
    size = scheme.size or columns
    if columns % size:
        raise stored.error(
            f"{columns} inputs of {module} are no multiple of the group of {size}", "a group size that divides them"
        )
    groups = columns // size
    stored.info(f"{module}.qzeros", (torch.int32,), [(groups, -(-rows * bits // 32))])
    found = stored.info(f"{module}.scales", (torch.float16, torch.bfloat16, torch.float32), [(groups, rows)])
    # As [outputs, inputs].
    codes = permute(unpack(source(f"{module}.qweight"), bits, 0, columns), (1, 0))
    zeros = shift(permute(unpack(source(f"{module}.qzeros"), bits, 1, rows), (1, 0)), scheme.added, bits)
    element = "u8" if bits == 8 else "u4"
    order = columns_order(stored, f"{module}.g_idx", columns, size)
    parts = {
        "weight": pack(codes if order is None else gather(codes, order, 1), packing_of(element)),
        "scales": permute(check_scales(source(f"{module}.scales")), (1, 0)),
        "zeros": zeros,
        **({} if order is None else {"order": order}),
    }
    level = Scales(1, scheme.size, zeros=True, dtype=found.dtype)
    format = format_of(element, (level,), None, packing_of(element), ordered=order is not None)
    uses = [f"{module}.g_idx"] if f"{module}.g_idx" in stored.tensors else []
    return weight((rows, columns), format, parts, *uses)
