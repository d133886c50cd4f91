"""Methods that quantize experts alone: "mxfp4" as GPT-OSS stores it, and "experts_int8".

The weight of expert E is named EXPERTS.E.PROJECTION.weight, a matrix [outputs, inputs], also where experts are stacked.
Experts of GPTQ and AWQ (vLLM's MoE-WNA16) are modules like others, which the readers of these methods read.
"""

import re
from collections.abc import Callable

import torch

from ingot.frontend.quantized.fields import Fields, matcher
from ingot.frontend.quantized.stored import Logical, Stored, Weight, weight
from ingot.ir.formats import find_format
from ingot.ir.recipe import dequantize, quantize, reshape, source, take_slice
from ingot.ir.stored.recipes import bitcast, check_scales

_BLOCKS, _SCALES = "_blocks", "_scales"
# The bytes of a block: 32 elements of four bits (OCP Microscaling Formats 1.0).
_BYTES = 16
_INT8 = "int8"
_EXPERT = re.compile(r".*\.experts\.\d+\.\w+\.weight")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def read_mxfp4(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError.

    Stacked experts [E, N, K] are stored as PROJECTION_blocks u8[E, N, K / 32, 16], the first element of a byte in its
    low four bits, and PROJECTION_scales u8[E, N, K / 32], the exponents of powers of two plus 127 (transformers,
    `integrations/mxfp4.py`).
    """
    ignored = matcher(fields.names("modules_to_not_convert"))
    fields.choice("dequantize", (True, False), False)  # how another library computes
    fields.skip("quant_method")
    fields.end()

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        for name in stored.tensors:
            if not name.endswith(_BLOCKS):
                continue
            base = name.removesuffix(_BLOCKS)
            if ignored(base):
                raise stored.error(f"{base} is quantized, but the quantization_config excludes it", "floats")
            weights |= _stacked(stored, base)
        return Logical.of(stored, weights)

    return read


def _stacked(stored: Stored, base: str) -> dict[str, Weight]:
    """Return the weights of stacked experts by name. `base` is the name of their tensors without the ending."""
    blocks = stored.info(base + _BLOCKS, (torch.uint8,), [])
    if len(blocks.shape) != 4 or blocks.shape[3] != _BYTES:
        raise stored.error(f"{base}{_BLOCKS} is {list(blocks.shape)}", f"experts, rows, blocks and {_BYTES} bytes")
    experts, rows, groups, _ = blocks.shape
    stored.info(base + _SCALES, (torch.uint8,), [(experts, rows, groups)])
    module, _, projection = base.rpartition(".")
    found = {}
    for index in range(experts):
        codes, exponents = (take_slice(source(base + part), 0, index, index + 1) for part in (_BLOCKS, _SCALES))
        parts = {
            "weight": reshape(codes, (rows, groups * _BYTES)),
            "scales": check_scales(bitcast(reshape(exponents, (rows, groups)), torch.float8_e8m0fnu)),
        }
        made = weight((rows, groups * _BYTES * 2), find_format("mxfp4"), parts)
        found[f"{module}.{index}.{projection}.weight"] = made
    return found


def read_experts_int8(fields: Fields) -> Callable[[Stored], Logical]:
    """Return the reader of a checkpoint with this quantization_config. Raises ConfigError.

    The tensors are floats, and the method rounds the weights of experts to eight bits, with a scale for each row: the
    largest number is 127 (vLLM, `experts_int8.py`). Scales are computed in float32.
    """
    fields.skip("quant_method")
    fields.end()

    def read(stored: Stored) -> Logical:
        weights: dict[str, Weight] = {}
        for name, info in stored.tensors.items():
            if not _EXPERT.fullmatch(name):
                continue
            stored.info(name, _FLOATS, [])
            if len(info.shape) != 2:
                raise stored.error(f"{name} is {list(info.shape)}", "a matrix for each expert")
            recipe = dequantize(quantize(source(name), _INT8), _INT8)
            weights[name] = Weight((info.shape[0], info.shape[1]), recipe, recipe.sources())
        if not weights:
            raise stored.error("the checkpoint has no experts", "tensors such as …experts.0.up_proj.weight")
        return Logical.of(stored, weights)

    return read
